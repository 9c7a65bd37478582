"""What a run remembers beside its weights, and what it decides from that: pure, all of it data.

Section numbers are those of the paper (arXiv 2609.39247) as the specification counts them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_jax.losses.readiness import (
  ClipController,
  DecodeCost,
  Evidence,
  RateController,
  Readiness,
  audited,
)
from agentrl_jax.losses.replay import Replay, Stored

Trust = Callable[[Readiness, str], bool]  # whether a problem's continuations may be chunks


@dataclasses.dataclass(frozen=True)
class Pair:
  """What a critic should say of a state: the mean worth of its group, on the grid."""

  state: Stored
  target: float


@dataclasses.dataclass(frozen=True)
class Spent:
  """FLOPs so far. `decode` is what the paper counts: refills and continuations, no prefill."""

  decode: int = 0
  prefill: int = 0  # of prompts with their prefixes, once a group
  critic: int = 0  # its questions and answers
  training: int = 0  # old log-probs, and three passes for each token that a loss reads

  @property
  def total(self) -> int:
    return self.decode + self.prefill + self.critic + self.training

  def plus(self, **more: int) -> "Spent":
    return dataclasses.replace(self, **{name: getattr(self, name) + x for name, x in more.items()})


@dataclasses.dataclass(frozen=True)
class Memory:
  """Everything that the next step reads; kept with each checkpoint.

  `bank` holds the first right response to each problem, never replaced.
  """

  replay: Replay
  clip: ClipController
  rate: RateController
  readiness: Readiness = dataclasses.field(default_factory=Readiness)
  bank: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  pairs: tuple[Pair, ...] = ()
  spent: Spent = dataclasses.field(default_factory=Spent)
  cursor: int = 0  # of the training tasks


def to_carry(memory: Memory) -> dict[str, Any]:
  """As JSON values."""
  return dataclasses.asdict(memory)


def from_carry(carry: Mapping[str, Any]) -> Memory:
  """Inverse of `to_carry`, after JSON."""
  readiness, replay = carry["readiness"], carry["replay"]
  problems = {name: Evidence(**one) for name, one in readiness["problems"].items()}
  return Memory(
    replay=Replay(tuple(_stored(one) for one in replay["stored"]), replay["capacity"]),
    clip=ClipController(**carry["clip"]),
    rate=RateController(**carry["rate"]),
    readiness=Readiness(
      **{**readiness, "problems": problems, "recent": tuple(readiness["recent"])}
    ),
    bank={name: tuple(ids) for name, ids in carry["bank"].items()},
    pairs=tuple(Pair(_stored(one["state"]), one["target"]) for one in carry["pairs"]),
    spent=Spent(**carry["spent"]),
    cursor=carry["cursor"],
  )


def _stored(one: Mapping[str, Any]) -> Stored:
  return Stored(one["problem"], tuple(one["ids"]))


# --- decisions ------------------------------------------------------------------------------------


def everywhere(readiness: Readiness, problem: str) -> bool:
  """Trust without local conditions: every problem, once the mean error has been small."""
  del problem
  return readiness.opened


def at_once(readiness: Readiness, problem: str) -> bool:
  """Trust from the first step on, for a run that is to be short."""
  del readiness, problem
  return True


def chunked(
  problems: Sequence[str],
  readiness: Readiness,
  trust: Trust,
  rng: np.random.Generator,
  *,
  audit: float = 0.25,
) -> list[bool]:
  """For each problem of the batch whether its group gets chunks: it is trusted and not audited."""
  trusted = [str(i) for i, problem in enumerate(problems) if trust(readiness, problem)]
  checked = set(audited(trusted, rng, share=audit))
  return [str(i) in trusted and str(i) not in checked for i in range(len(problems))]


def with_solved(
  bank: Mapping[str, tuple[int, ...]], right: Sequence[Stored]
) -> dict[str, tuple[int, ...]]:
  """The bank after right responses, in order: the first of a problem stays."""
  found = dict(bank)
  for one in right:
    found.setdefault(one.problem, one.ids)
  return found


def with_pairs(old: Sequence[Pair], fresh: Sequence[Pair], most: int) -> tuple[Pair, ...]:
  """The latest `most` pairs, oldest first."""
  return (*old, *fresh)[-most:]


def draw(pairs: Sequence[Pair], most: int, rng: np.random.Generator) -> list[Pair]:
  """Up to `most` of the pairs, without replacement."""
  chosen = rng.permutation(len(pairs))[:most]
  return [pairs[i] for i in chosen]


def sampled(cost: DecodeCost, lengths: Sequence[tuple[int, int]]) -> int:
  """FLOPs of decoding, for (prompt and prefix, new tokens) of each response."""
  return sum(cost(prefix, new) for prefix, new in lengths)
