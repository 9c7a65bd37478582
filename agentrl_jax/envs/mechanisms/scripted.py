"""Policies that are scripts: the optimum, the naive rule, doing nothing, and chance."""

import random
from collections.abc import Sequence

from agentrl_jax.envs.mechanisms import solvers, words
from agentrl_jax.envs.mechanisms.environment import Problem
from agentrl_jax.envs.mechanisms.mechanism import ANSWER, STATUS, Plan
from agentrl_jax.rollout.environment import Action, Message, Tool, ToolCall
from agentrl_jax.rollout.scripted import Policy


def oracle_calls(problem: Problem) -> list[ToolCall]:
  """The best plan, in A after probing everything that is hidden."""
  probes = probe_calls(problem) if problem.presentation == "A" else []
  return [*probes, *_carried_out(problem, solvers.BEST[problem.mechanism.name](problem.theta).plan)]


def naive_calls(problem: Problem) -> list[ToolCall]:
  """The naive rule, which trusts what is advertised and probes nothing."""
  return _carried_out(problem, solvers.NAIVE[problem.mechanism.name](problem.theta).plan)


def idle_calls(problem: Problem) -> list[ToolCall]:
  """Asks how things stand, to the last turn."""
  return [ToolCall(STATUS.name, {})] * problem.turn_limit


def probe_calls(problem: Problem) -> list[ToolCall]:
  """One probe of each hidden number, in order."""
  m, theta = problem.mechanism, problem.theta
  names = list(m.probe.parameters["properties"])
  count = len(theta[m.hidden])
  if len(names) == 1:
    return [ToolCall(m.probe.name, {names[0]: i}) for i in range(count)]
  pairs = ((i, j) for i in range(count) for j in range(i + 1, count))
  every = [dict(zip(names, pair, strict=True)) for pair in pairs]
  return [ToolCall(m.probe.name, a) for a in every if m.place(theta, a) is not None]


def random_call(problem: Problem, draw: random.Random) -> ToolCall:
  """Any tool with arguments in or just outside what makes sense."""
  one = draw.choice(problem.tools)
  length = problem.mechanism.plan_length(problem.theta)
  return ToolCall(one.name, {n: _any(one, n, draw, length) for n in _names(one)})


def _names(one: Tool) -> list[str]:
  return list(one.parameters["properties"])


def _any(one: Tool, name: str, draw: random.Random, length: int) -> object:
  match one.parameters["properties"][name]["type"]:
    case "integer":
      return draw.randint(0, 8)
    case "number":
      return draw.choice((draw.uniform(0, 4), draw.randint(0, 9)))
  most = draw.choice((1, 2, 6))
  return [draw.randint(0, most) for _ in range(length)]


def _carried_out(problem: Problem, plan: Plan) -> list[ToolCall]:
  if problem.presentation == "F":
    return [ToolCall(ANSWER.name, {"plan": list(plan)})]
  return problem.mechanism.calls(problem.theta, plan)


def in_order(calls: Sequence[ToolCall]) -> Policy:
  """A policy that makes one call a turn; after the last it asks how things stand."""

  def act(messages: Sequence[Message]) -> Action:
    turn = sum(m.role == "assistant" for m in messages)
    return (calls[turn] if turn < len(calls) else ToolCall(STATUS.name, {}),)

  return act


def in_words(problem: Problem, calls: Sequence[ToolCall]) -> Policy:
  """The same in the closed vocabulary: calls by their verbs."""
  return in_order([words.by_verb(problem, call) for call in calls])
