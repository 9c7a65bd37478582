"""Why an episode failed: its calls are played again on its task, and looked at.

Labels and thresholds are ours; an episode may have several.
"""

import dataclasses

from agentrl_jax.envs.mechanisms.environment import Playing, Problem, problem_of, score
from agentrl_jax.envs.mechanisms.words import named
from agentrl_jax.rollout.environment import ToolCall
from agentrl_jax.rollout.records import Episode

FAILED = 0.5  # with less of the way from naive to best, the reason is asked for
MANY = 3  # invalid actions
LABELS = (
  *("NEVER_PROBED", "OVER_PROBED", "MYOPIC_BUDGET", "WRONG_PLAN_GOOD_INFO"),
  *("INVALID_ACTIONS", "TURN_LIMIT", "NO_COMMIT"),
)


@dataclasses.dataclass(frozen=True)
class Played:
  """What an episode came to."""

  score: float
  gained: float  # without fees, over the naive utility
  fees: float
  probes: int
  hidden: int
  invalid: int
  ended: bool
  spent_early: bool  # nothing more could be bought before half of the periods

  def labels(self, problem: Problem) -> list[str]:
    """None for an episode that did not fail."""
    if self.score >= FAILED:
      return []
    informed = problem.presentation != "A" or self.probes == self.hidden
    reach = problem.best - problem.naive
    commits = any(tool.name == "commit" for tool in problem.mechanism.tools)
    found = {
      "NEVER_PROBED": problem.presentation == "A" and not self.probes,
      "OVER_PROBED": self.fees > max(0.0, self.gained),
      "MYOPIC_BUDGET": self.spent_early,
      "WRONG_PLAN_GOOD_INFO": self.ended and informed and self.gained < FAILED * reach,
      "INVALID_ACTIONS": self.invalid >= MANY,
      "TURN_LIMIT": not self.ended and not commits,
      "NO_COMMIT": not self.ended and commits,
    }
    return [label for label in LABELS if found[label]]


def play_again(episode: Episode) -> Played:
  """From the recorded calls; turns that were no call changed nothing but the turns left."""
  problem = problem_of(episode.task)
  again = Playing(problem)
  spent_early = False
  for view in episode.text:
    for call in view.get("tool_calls", ()):
      if not again.over:
        again.call(named(problem, ToolCall(call["name"], call["arguments"])))
        spent_early |= _spent_early(again)
  fees = problem.mechanism.probe_cost * len(again.probed)
  utility = again.utility()
  return Played(
    score=score(problem, utility),
    gained=utility + fees - problem.naive,
    fees=fees,
    probes=len(again.probed),
    hidden=len(problem.theta[problem.mechanism.hidden]),
    invalid=int(episode.info["invalid"]),
    ended=again.ended,
    spent_early=spent_early,
  )


def _spent_early(again: Playing) -> bool:
  theta, state = again.problem.theta, again.state
  if "budget" not in state:
    return False
  early = state["period"] < len(theta["multipliers"]) / 2
  return early and state["budget"] < min(theta["weights"])
