"""When a critic may stand in for rewards: per-problem readiness, audits, and two controllers.

Host-side and pure: every function takes a state and returns the next one, so that what decides is
explicit data that a run checkpoints (AC2, arXiv 2609.39247, sections 2.3, 2.4 and 2.6).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from agentrl_jax.losses.arguments import finite, not_negative, whole


def round_to_grid(x: Fraction | float, parts: int = 10) -> float:
  """Nearest multiple of 1 / parts, ties down: .25 -> .2, .55 -> .5.

  Computed in rationals: a float .55 is read as the decimal it prints as.
  """
  exact = x if isinstance(x, Fraction) else Fraction(str(float(x)))
  scaled = exact * parts
  below = scaled.numerator // scaled.denominator
  return (below + (scaled - below > Fraction(1, 2))) / parts


def critic_target(rewards: Sequence[float], *, least: int = 8) -> float | None:
  """The group's mean reward on the grid, None with fewer than `least` valid (finite) rewards."""
  valid = [Fraction(str(float(r))) for r in rewards if np.isfinite(r)]
  return round_to_grid(sum(valid, Fraction(0)) / len(valid)) if len(valid) >= least else None


def audited(ready: Sequence[str], rng: np.random.Generator, *, share: float = 0.25) -> list[str]:
  """ceil(share x n) of the ready problems, which get full rollouts all the same."""
  count = math.ceil(len(ready) * Fraction(str(share)))
  chosen = sorted(int(i) for i in rng.permutation(len(ready))[:count])
  return [ready[i] for i in chosen]


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What is known of one problem's critic; `error` is of its last prediction, 1 if invalid."""

  error: float = 1.0
  solved: bool = False  # a correct trajectory exists
  spoke: bool = False  # the critic has predicted something else than zero
  ready: bool = False


@dataclasses.dataclass(frozen=True)
class Readiness:
  """Per-problem evidence and the mean errors of the last complete steps."""

  problems: Mapping[str, Evidence] = dataclasses.field(default_factory=dict)
  recent: tuple[float, ...] = ()
  opened: bool = False  # the mean error has been small enough once
  window: int = 5
  most_global: float = 0.20
  most_local: float = 0.18

  def __post_init__(self):
    whole(1, window=self.window)

  def why_not(self, problem: str) -> str | None:
    """The first condition that a problem fails, None if it is ready."""
    evidence = self.problems.get(problem, Evidence())
    if evidence.ready:
      return None
    if not self._small():
      return "global error"
    if evidence.error >= self.most_local:
      return "own error"
    if not evidence.solved:
      return "never solved"
    return None if evidence.spoke else "critic silent"

  def ready(self, problem: str) -> bool:
    """Whether continuations of the problem may be scored by the critic. Once ready, always."""
    return self.why_not(problem) is None

  def _small(self) -> bool:
    """Whether the last complete steps are enough, and their mean error small."""
    return len(self.recent) == self.window and float(np.mean(self.recent)) < self.most_global

  def after_step(
    self,
    predictions: Mapping[str, float],
    targets: Mapping[str, float],
    solved: Sequence[str] = (),
  ) -> "Readiness":
    """The state after a step's pre-update predictions met their targets.

    Predictions that are not finite count as error 1; problems without a target are left alone.
    """
    problems, errors = dict(self.problems), []
    for name in solved:
      problems[name] = dataclasses.replace(problems.get(name, Evidence()), solved=True)
    for name, target in targets.items():
      guess = predictions.get(name, np.nan)
      error = abs(guess - target) if np.isfinite(guess) else 1.0
      errors.append(error)
      old = problems.get(name, Evidence())
      spoke = old.spoke or bool(np.isfinite(guess) and guess != 0)
      problems[name] = dataclasses.replace(old, error=error, spoke=spoke)
    recent = self.recent
    if errors:
      recent = (*recent, float(np.mean(errors)))[-self.window :]
    state = dataclasses.replace(self, problems=problems, recent=recent)
    state = dataclasses.replace(state, opened=self.opened or state._small())
    latched = {n: dataclasses.replace(e, ready=state.ready(n)) for n, e in problems.items()}
    return dataclasses.replace(state, problems=latched)


@dataclasses.dataclass(frozen=True)
class ClipController:
  """Moves the upper clip by `step` towards more room while entropy (nats) is below `target`."""

  offset: float = 0.06
  base: float = 0.28
  target: float = 0.28
  step: float = 0.02
  most: float = 0.08

  def __post_init__(self):
    finite(offset=self.offset, base=self.base, target=self.target)
    not_negative(step=self.step, most=self.most)
    if abs(self.offset) > self.most or self.most > self.base:
      raise ValueError(
        f"the upper clip is base={self.base} + offset={self.offset}, at most {self.most} away: "
        "expected |offset| <= most <= base"
      )

  @property
  def high(self) -> float:
    """This step's upper clip, for `Aux.clip_high`."""
    return self.base + self.offset

  def after_step(self, entropy: float) -> "ClipController":
    """Entropy is the mean over tokens of responses to the *empty* prefix."""
    moved = self.offset + self.step * float(np.sign(self.target - entropy))
    return dataclasses.replace(self, offset=float(np.clip(moved, -self.most, self.most)))


@dataclasses.dataclass(frozen=True)
class RateController:
  """Halves the critic's learning rate after two steps in a row whose update was too large.

  Too large: critic update norm over the actor's two update norms exceeds sqrt(2).
  """

  rate: float = 2 * 2**0.5 * 1e-6
  floor: float = 5 * 2**0.5 * 1e-7
  strikes: int = 0

  def after_step(self, critic_norm: float, actor_norms: float) -> "RateController":
    if critic_norm <= 2**0.5 * actor_norms:
      return dataclasses.replace(self, strikes=0)
    if self.strikes == 0:
      return dataclasses.replace(self, strikes=1)
    return dataclasses.replace(self, rate=max(self.floor, self.rate / 2), strikes=0)


@dataclasses.dataclass(frozen=True)
class DecodeCost:
  """FLOPs of a dense transformer: `per_token` + `per_pair` for each earlier position."""

  per_token: int
  per_pair: int

  def __call__(self, prefix: int, generated: int) -> int:
    """Of decoding `generated` tokens after `prefix` (prompt, replay); prefill gives the first."""
    return self.forward(max(generated - 1, 0), prefix)

  def forward(self, tokens: int, prefix: int = 0) -> int:
    """Of one pass over `tokens` that attend to themselves, one another and a `prefix`."""
    pairs = tokens * prefix + tokens * (tokens + 1) // 2
    return self.per_token * tokens + self.per_pair * pairs


def decode_cost(
  *, layers: int, embed: int, heads: int, kv_heads: int, head_dim: int, ffw: int, vocab_size: int
) -> DecodeCost:
  """From an architecture with grouped-query attention, a gated MLP and an output head."""
  q, kv = heads * head_dim, kv_heads * head_dim
  layer = 2 * embed * q + 2 * embed * kv + 3 * embed * ffw
  return DecodeCost(2 * (layers * layer + embed * vocab_size), 4 * layers * q)
