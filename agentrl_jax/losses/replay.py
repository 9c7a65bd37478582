"""Start states from the past: stored trajectories, their prefixes, and who scores a continuation.

Host-side and pure (AC2, arXiv 2609.39247, section 2.2). A prefix from an old policy is only a
state: it carries no loss and needs no ratio.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentrl_jax.losses.arguments import whole


@dataclasses.dataclass(frozen=True)
class Stored:
  """One trajectory that may be replayed: token ids of the response to `problem`."""

  problem: str
  ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Replay:
  """The latest `capacity` trajectories, oldest first, correct or not."""

  stored: tuple[Stored, ...] = ()
  capacity: int = 256

  def __post_init__(self):
    whole(1, capacity=self.capacity)

  def push(self, fresh: Sequence[Stored]) -> "Replay":
    """The store with `fresh` at its end and the oldest beyond capacity gone."""
    return dataclasses.replace(self, stored=(*self.stored, *fresh)[-self.capacity :])

  def prefixes(
    self, count: int, rng: np.random.Generator, *, grid: int = 10_000, most: float = 0.9
  ) -> list[Stored]:
    """`count` start states: problems in a random order, cycled, one trajectory of each.

    Each is cut at a uniform multiple of `grid` tokens, at most `most` of its length; 0 is the bare
    problem. An empty store gives none.
    """
    problems = sorted({one.problem for one in self.stored})
    if not problems:
      return []
    order = [problems[i] for i in rng.permutation(len(problems))]
    chosen = []
    for k in range(count):
      own = [one for one in self.stored if one.problem == order[k % len(order)]]
      one = own[rng.integers(len(own))]
      cuts = int(most * len(one.ids)) // grid
      chosen.append(Stored(one.problem, one.ids[: grid * int(rng.integers(cuts + 1))]))
    return chosen


def critic_scores(
  *, reached_chunk: bool, out_of_budget: bool, finished: bool, answered: bool
) -> bool:
  """Whether the critic scores where a continuation stopped; if not, the environment's judge does.

  Args:
    reached_chunk: it has as many new tokens as a chunk allows.
    out_of_budget: the whole budget, prefix included, is used up.
    finished: the policy ended it.
    answered: it holds a complete answer already.

  Raises:
    ValueError: it stopped for none of the three reasons.
  """
  if not (reached_chunk or out_of_budget or finished):
    raise ValueError("a continuation stopped before its chunk, its budget and its own end")
  return reached_chunk and not (out_of_budget or finished or answered)
