"""One environment for all families: parameters, the two utilities that fix the reward, and a turn
limit.

Three presentations share parameters, utilities and state hash. F: all is told, one `answer` gives
the whole plan. I: all is told, the policy acts call by call. A: it acts, and what is hidden is only
advertised; probes reveal it for a fee. Every call costs a turn, and what is wrong with it is an
observation. The one reward part, `task/utility`, comes at the end.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jsonschema

from agentrl_jax.envs.mechanisms.families import family
from agentrl_jax.envs.mechanisms.mechanism import (
  ANSWER,
  BAD_ARGS,
  ENDED,
  LIST_ITEMS,
  STATUS,
  UNKNOWN_TOOL,
  Facts,
  Mechanism,
  State,
  Theta,
)
from agentrl_jax.envs.mechanisms.skins import story
from agentrl_jax.rollout.environment import (
  Action,
  EnvFault,
  Malformed,
  Message,
  Opening,
  Step,
  Tool,
  ToolCall,
)
from agentrl_jax.rollout.records import Task

PRESENTATIONS = ("F", "I", "A")
REWARD = "task/utility"
SPARE_TURNS = 4  # beside one for each act of the longest plan and each probe
ANSWER_TURNS = 3  # in presentation F
ABOVE = 1e-6  # relative; a utility further above the optimum is a fault of the machinery


@dataclasses.dataclass(frozen=True)
class Problem:
  """What an environment is made of; `best` and `naive` are the utilities that scale the reward."""

  mechanism: Mechanism
  theta: Theta
  best: float
  naive: float
  presentation: str
  skin: int = 0

  @property
  def turn_limit(self) -> int:
    if self.presentation == "F":
      return ANSWER_TURNS
    hidden = len(self.theta[self.mechanism.hidden])
    return self.mechanism.longest(self.theta) + hidden + SPARE_TURNS

  @property
  def tools(self) -> tuple[Tool, ...]:
    common = (STATUS, LIST_ITEMS)
    if self.presentation == "F":
      return (*common, ANSWER)
    return (*common, self.mechanism.probe, *self.mechanism.tools)

  def state_hash(self) -> str:
    """Of what decides the result: the same in every presentation and story."""
    text = json.dumps(
      [self.mechanism.name, dict(self.theta), self.best, self.naive], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_of(task: Task) -> Problem:
  """The problem of a task of `draw.make_task`. Raises ValueError naming what is wrong with it."""
  p, name = task.params, f"{task.family}/{task.split}/{task.seed}"
  try:
    if p["presentation"] not in PRESENTATIONS:
      raise ValueError(f"presentation {p['presentation']!r}, expected one of F, I, A")
    return Problem(
      family(task.family), p["theta"], p["best"], p["naive"], p["presentation"], p["skin"]
    )
  except KeyError as error:
    raise ValueError(f"task {name}: params {dict(p)!r} lack {error}") from error


async def build(task: Task) -> Opening:
  """The environment of a task, told as a story. Raises ValueError as `problem_of` does."""
  problem = problem_of(task)
  message = Message("user", story(problem.mechanism, problem.theta, problem))
  env = Playing(problem)
  return Opening(env, [message], problem.tools, problem.turn_limit, problem.state_hash())


def combine(parts: Mapping[str, float]) -> float:
  """The share of the way from the naive utility to the best one."""
  return parts.get(REWARD, 0.0)


def score(problem: Problem, utility: float) -> float:
  """(utility - naive) / (best - naive), kept within 0 and 1.

  Raises EnvFault where the utility exceeds the optimum: then rules and solver disagree.
  """
  if not utility <= problem.best + ABOVE * max(1.0, abs(problem.best)):
    name = problem.mechanism.name
    raise EnvFault("bound", f"{name}: utility {utility}, and the optimum is {problem.best}")
  share = (utility - problem.naive) / (problem.best - problem.naive)
  return min(1.0, max(0.0, share))


class Playing:
  """One episode. `call` is all that happens; `step` is its form for the agent loop."""

  def __init__(self, problem: Problem):
    self.problem = problem
    self.state: State = problem.mechanism.start(problem.theta)
    self.turns = self.invalid = 0
    self.probed: set[int] = set()
    self.ended = False

  def utility(self) -> float:
    """What has been realised so far, less the fees."""
    m = self.problem.mechanism
    return m.utility(self.problem.theta, self.state) - m.probe_cost * len(self.probed)

  def call(self, call: ToolCall) -> Facts:
    """Executes one call and returns what is seen; a wrong one costs a turn and changes nothing."""
    if self.ended:
      return {"error": ENDED}
    self.turns += 1
    facts = self._facts(call)
    self.invalid += "error" in facts
    return facts

  def _facts(self, call: ToolCall) -> Facts:
    m, theta = self.problem.mechanism, self.problem.theta
    if call.name not in (t.name for t in self.problem.tools):
      return {"error": UNKNOWN_TOOL}
    if not valid(m, call):
      return {"error": BAD_ARGS}
    if call.name == STATUS.name:
      return {name: self.state[name] for name in m.checked}
    if call.name == LIST_ITEMS.name:
      return m.shown(theta, self.problem.presentation)
    if call.name == ANSWER.name:
      return self._answer(call.arguments["plan"])
    if call.name == m.probe.name:
      place = m.place(theta, call.arguments)
      if place is None:
        return {"error": BAD_ARGS}
      self.probed.add(place)
      return {"value": theta[m.hidden][place]}
    return self._act(call)

  def _act(self, call: ToolCall) -> Facts:
    m, theta = self.problem.mechanism, self.problem.theta
    acted = m.act(theta, self.state, call)
    if isinstance(acted, str):
      return {"error": acted}
    self.state, facts = acted
    self.ended = m.over(theta, self.state)
    return facts

  def _answer(self, plan: list[float]) -> Facts:
    """Carries out a plan; an act that is refused is passed over, as if a policy had tried it."""
    m, theta = self.problem.mechanism, self.problem.theta
    try:
      if len(plan) != m.plan_length(theta):
        raise ValueError(f"a plan of {len(plan)} numbers")
      calls = m.calls(theta, plan)
    except ValueError:
      return {"error": BAD_ARGS}
    self.invalid += sum(not valid(m, one) or "error" in self._act(one) for one in calls)
    self.ended = True
    return {"plan": plan}

  async def step(self, action: Action) -> Step:
    if self.over:
      raise RuntimeError("the episode is over")
    if isinstance(action, Message | Malformed) or not action:
      self.turns += 1
      self.invalid += 1
      code = BAD_ARGS if isinstance(action, Malformed) else UNKNOWN_TOOL
      return self._step((_seen({"error": code}),))
    seen = []
    for call in action:
      if self.turns == self.problem.turn_limit:
        break
      seen.append(_seen(self.call(call), call.name))
    return self._step(tuple(seen))

  @property
  def over(self) -> bool:
    return self.ended or self.turns >= self.problem.turn_limit

  def _step(self, seen: tuple[Message, ...]) -> Step:
    if not self.over:
      return Step(seen, {}, terminated=False)
    reward, info = result(self)
    return Step(seen, reward, terminated=self.ended, truncated=not self.ended, info=info)

  async def cut(self, reason: str) -> Step:
    del reason
    reward, info = result(self)
    self.turns = self.problem.turn_limit
    return Step((), reward, terminated=False, truncated=True, info=info)

  async def close(self) -> None:
    self.turns = self.problem.turn_limit


def result(played: Playing) -> tuple[dict[str, float], dict[str, float]]:
  """(reward parts, numbers to report) of an episode as it stands."""
  problem, utility = played.problem, played.utility()
  info = {
    "utility": utility,
    "best": problem.best,
    "naive": problem.naive,
    "probes": float(len(played.probed)),
    "fees": problem.mechanism.probe_cost * len(played.probed),
    "calls": float(played.turns),
    "invalid": float(played.invalid),
    "finished": float(played.ended),
  }
  return {REWARD: score(problem, utility)}, info


# --- arguments and observations -------------------------------------------------------------------


@functools.cache
def _validators(name: str) -> Mapping[str, jsonschema.Draft202012Validator]:
  m = family(name)
  tools = (STATUS, LIST_ITEMS, ANSWER, m.probe, *m.tools)
  return {t.name: jsonschema.Draft202012Validator(dict(t.parameters)) for t in tools}


def valid(mechanism: Mechanism, call: ToolCall) -> bool:
  """Whether the arguments keep to the tool's schema; numbers that are not finite never do."""
  numbers = [x for v in call.arguments.values() for x in (v if isinstance(v, list) else [v])]
  if not all(math.isfinite(x) for x in numbers if isinstance(x, int | float) and abs(x) < 2**63):
    return False
  return _validators(mechanism.name)[call.name].is_valid(dict(call.arguments))


def text_of(value: Any) -> str:
  """JSON with sorted keys, whole numbers as such and others with two decimals."""
  match value:
    case Mapping():
      return "{" + ", ".join(f"{json.dumps(k)}: {text_of(value[k])}" for k in sorted(value)) + "}"
    case list() | tuple():
      return "[" + ", ".join(map(text_of, value)) + "]"
    case float():
      return f"{value:.2f}"
  return json.dumps(value)


def _seen(facts: Facts, name: str | None = None) -> Message:
  return Message("tool", text_of(facts), name=name)
