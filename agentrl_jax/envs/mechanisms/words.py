"""The same environments in a closed vocabulary, for models that were never taught language.

Every family has the same five verbs: what it acts with is `DO` and `NEXT`. Fields come in the order
of theta, between bars; a word is a whole number, a verb or a code, so families whose numbers have
decimals (linear) cannot be told. What never changes is left out.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.envs.mechanisms import environment
from agentrl_jax.envs.mechanisms.environment import PRESENTATIONS, Problem, problem_of
from agentrl_jax.envs.mechanisms.families import FAMILIES
from agentrl_jax.envs.mechanisms.mechanism import ANSWER, ERRORS, LIST_ITEMS, STATUS, Facts
from agentrl_jax.rollout.environment import (
  Action,
  Env,
  Malformed,
  Message,
  Opening,
  Step,
  ToolCall,
)
from agentrl_jax.rollout.records import Task

END = "<|end|>"
NUMBERS = 100
VERBS = ("DO", "NEXT", "PROBE", "STATUS", "LIST", "ANSWER")
SYMBOLS = (
  *(END, "?", "=", "|", *VERBS, *ERRORS),
  *(f"FORM-{p}" for p in PRESENTATIONS),
  *(name.upper() for name in FAMILIES),
  *(str(number) for number in range(NUMBERS)),
)


def read_words(words: Sequence[str]) -> Action:
  """The call of a turn's words, by its verb: `arguments` are its numbers, not named yet."""
  match words:
    case [verb, *rest] if verb in VERBS and all(word.isdecimal() for word in rest):
      return (ToolCall(verb, {"numbers": [int(word) for word in rest]}),)
  return Malformed(" ".join(words), "a turn is a verb and numbers")


def write_words(action: Action) -> list[str]:
  """Inverse of `read_words`; other texts word by word."""
  match action:
    case Message():
      return action.content.split()
    case Malformed():
      return action.text.split()
    case (ToolCall(name=verb, arguments={"numbers": numbers}),):
      return [verb, *map(str, numbers)]
  raise ValueError(f"{action!r}, a turn of words holds one call by its verb")


# --- verbs and tools ------------------------------------------------------------------------------


def _tools(problem: Problem) -> Mapping[str, tuple[str, list[str]]]:
  """Verb -> the family's tool and the names of its arguments."""
  m = problem.mechanism
  act, *others = m.tools
  if not act.parameters["properties"]:  # stopping goes on with the first and acts with the second
    act, others = others[0], [act]
  verbs = {"PROBE": m.probe, "STATUS": STATUS, "LIST": LIST_ITEMS, "ANSWER": ANSWER, "DO": act}
  verbs |= {"NEXT": others[0]} if others else {}
  return {verb: (tool.name, list(tool.parameters["properties"])) for verb, tool in verbs.items()}


def named(problem: Problem, call: ToolCall) -> ToolCall:
  """The family's call of a verb and its numbers; one that makes none stays as it is, to be refused
  by the environment.
  """
  verbs, numbers = _tools(problem), call.arguments.get("numbers")
  if call.name not in verbs or not isinstance(numbers, list):
    return call
  name, arguments = verbs[call.name]
  if call.name == "ANSWER":
    return ToolCall(name, {"plan": numbers})
  padded = [*arguments, *(f"more{i}" for i in range(len(numbers) - len(arguments)))]
  return ToolCall(name, dict(zip(padded, numbers, strict=False)))


def by_verb(problem: Problem, call: ToolCall) -> ToolCall:
  """Inverse of `named` for a call of the problem's tools. Raises ValueError for another tool."""
  for verb, (name, _) in _tools(problem).items():
    if name == call.name:
      values = list(call.arguments.values())
      return ToolCall(verb, {"numbers": values[0] if verb == "ANSWER" else values})
  raise ValueError(f"{problem.mechanism.name} has no tool {call.name!r}")


def told(facts: Facts, leave_out: Sequence[str] = ()) -> str:
  """The numbers and codes of facts, in their order, between bars."""
  return " | ".join(" ".join(_flat(v)) for k, v in facts.items() if k not in leave_out)


def _flat(value: Any) -> list[str]:
  if isinstance(value, list | tuple):
    return [word for one in value for word in _flat(one)]
  return [str(value)]


# --- environment ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Worded:
  """An environment whose calls come by verb and whose observations are words."""

  env: Env
  problem: Problem

  async def step(self, action: Action) -> Step:
    if isinstance(action, tuple):
      action = tuple(named(self.problem, call) for call in action)
    step = await self.env.step(action)
    seen = tuple(
      Message("tool", f"= {told(json.loads(m.content))}".strip()) for m in step.observation
    )
    return dataclasses.replace(step, observation=seen)

  async def cut(self, reason: str) -> Step:
    return await self.env.cut(reason)

  async def close(self) -> None:
    await self.env.close()


async def build(task: Task) -> Opening:
  """The environment of a task, told in words. Raises ValueError as `problem_of` does."""
  problem, opening = problem_of(task), await environment.build(task)
  m = problem.mechanism
  shown = told(m.shown(problem.theta, problem.presentation), m.constants)
  content = f"{m.name.upper()} FORM-{problem.presentation} | {shown} ?"
  env = Worded(opening.env, problem)
  return dataclasses.replace(opening, env=env, messages=[Message("user", content)])
