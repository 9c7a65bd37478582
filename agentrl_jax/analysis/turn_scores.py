"""What a critic says about turns: whether it is constant inside them, and which of them went wrong.

A turn's surprise is how much the expected return fell over it, u_k = V_k - (R_k + gamma V_{k+1}),
which is minus its TD error. Divided by the spread of TD errors in successful runs it is a score,
and a conformal threshold over such runs bounds false alarms. It needs the next state only, so it
can flag a turn while the episode goes on. Plain numpy.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Trace:
  """One episode as a critic sees it.

  `value[t]` is of the state before action token t, `turn[t]` its turn, from 0 without a gap;
  `reward[k]` is of turn k, `boot` the value after the last turn (0 where the episode terminated).

  Raises:
    ValueError: shapes that do not fit, turns that skip or go back, or a number that is not finite.
  """

  value: Float[np.ndarray, "N"]
  turn: Int[np.ndarray, "N"]
  reward: Float[np.ndarray, "K"]
  boot: float = 0.0
  success: bool = False

  def __post_init__(self):
    turns = len(self.reward)
    if self.value.shape != self.turn.shape or not turns:
      raise ValueError(f"{self.value.shape} values, {self.turn.shape} turns, {turns} rewards")
    if self.turn[0] != 0 or self.turn[-1] != turns - 1 or not set(np.diff(self.turn)) <= {0, 1}:
      raise ValueError(f"turns {self.turn.tolist()}, expected 0 to {turns - 1} in order")
    if not (np.isfinite(self.value).all() and np.isfinite(self.reward).all()):
      raise ValueError(f"values {self.value}, rewards {self.reward}: expected finite numbers")

  @property
  def starts(self) -> Int[np.ndarray, "K"]:
    """Index of each turn's first token."""
    return np.flatnonzero(np.diff(self.turn, prepend=-1))


def turn_values(trace: Trace) -> Float[np.ndarray, "K"]:
  """V of the state before each turn."""
  return trace.value[trace.starts]


def surprises(trace: Trace, gamma: float = 1.0) -> Float[np.ndarray, "K"]:
  """u_k = V_k - (R_k + gamma V_{k+1}); after the last turn comes `boot`."""
  values = turn_values(trace)
  return values - (trace.reward + gamma * np.append(values[1:], trace.boot))


def surprise_scale(successes: Sequence[Trace], gamma: float = 1.0) -> float:
  """Sample standard deviation of the TD errors of all turns of successful runs.

  Raises ValueError with fewer than two turns, or a spread of 0.
  """
  every = np.concatenate([surprises(t, gamma) for t in successes]) if successes else np.zeros(0)
  scale = float(np.std(every, ddof=1)) if len(every) > 1 else 0.0
  if not scale > 0:
    raise ValueError(
      f"{len(successes)} successful runs with {len(every)} turns, whose surprises spread by "
      f"{scale:g}: expected some that differ, as they set the scale of all scores"
    )
  return scale


def turn_scores(trace: Trace, scale: float, gamma: float = 1.0) -> Float[np.ndarray, "K"]:
  """a_k = max(0, u_k) / scale: how many usual errors the expected return fell over turn k."""
  return np.maximum(surprises(trace, gamma), 0.0) / scale


def conformal_threshold(maxima: Sequence[float], false_alarms: float) -> float:
  """The ceil((n + 1)(1 - q))-th smallest of n successful runs' largest scores; inf beyond the n-th.

  A further successful run exceeds it with probability at most q if runs are exchangeable.
  """
  if not 0 < false_alarms < 1:
    raise ValueError(f"rate of false alarms is {false_alarms}, expected between 0 and 1")
  n = len(maxima)
  rank = math.ceil(round((n + 1) * (1 - false_alarms), 9))  # 9 digits: .9 x 10 is 9, not 9 + 2e-16
  return math.inf if rank > n else float(np.sort(maxima)[rank - 1])


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float:
  """Probability that a positive scores above a negative, ties half; NaN without one of either."""
  all_scores, yes = np.asarray(scores, float), np.asarray(positive, bool)
  if yes.all() or not yes.any():
    return math.nan
  above = all_scores[yes][:, None] - all_scores[~yes][None, :]
  return float((above > 0).mean() + 0.5 * (above == 0).mean())


def first_alarm(scores: Float[np.ndarray, "K"], threshold: float) -> int | None:
  """The first turn whose score exceeds the threshold."""
  over = np.flatnonzero(scores > threshold)
  return int(over[0]) if over.size else None


@dataclasses.dataclass(frozen=True)
class Alarms:
  """What a threshold does on runs that it was not made from.

  A last turn's surprise holds the outcome itself: `auroc_early` is of the turns before the last,
  over runs that have some, and says more than `auroc`. `caught` is the share of failed runs with an
  alarm, `false` of successful ones; `lead` the mean number of turns between a failed run's first
  alarm and its last turn, NaN where none was flagged.
  """

  auroc: float
  auroc_early: float
  caught: float
  false: float
  lead: float


def alarms(traces: Sequence[Trace], scale: float, threshold: float, gamma: float = 1.0) -> Alarms:
  """Scores runs by their largest turn score. Raises ValueError without any run."""
  if not traces:
    raise ValueError("no runs to judge")
  scores = [turn_scores(t, scale, gamma) for t in traces]
  failed = np.array([not t.success for t in traces])
  first = [first_alarm(s, threshold) for s in scores]
  flagged = np.array([f is not None for f in first])
  lead = [
    len(s) - 1 - f for s, f, bad in zip(scores, first, failed, strict=True) if bad and f is not None
  ]
  early = [(float(s[:-1].max()), bad) for s, bad in zip(scores, failed, strict=True) if len(s) > 1]
  return Alarms(
    auroc=auroc([float(s.max()) for s in scores], failed.tolist()),
    auroc_early=auroc([score for score, _ in early], [bool(bad) for _, bad in early]),
    caught=_share(flagged, failed),
    false=_share(flagged, ~failed),
    lead=float(np.mean(lead)) if lead else math.nan,
  )


def _share(flag: Bool[np.ndarray, "R"], among: Bool[np.ndarray, "R"]) -> float:
  return float(flag[among].mean()) if among.any() else math.nan


# --- constancy ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Constancy:
  """`eta2` is the share of the values' variance that lies between turns; `inside` the mean
  |V(last token) - V(first)| of a turn, `between` the mean |V_{k+1} - V_k| from turn to turn.
  """

  eta2: float
  inside: float
  between: float


def constancy(traces: Sequence[Trace]) -> Constancy:
  """eta2 = SS_between / (SS_between + SS_within) over action tokens, turns as classes.

  Of trajectories with at least two turns; NaN where there is none or values do not vary.
  """
  several = [t for t in traces if len(t.reward) > 1]
  if not several:
    return Constancy(math.nan, math.nan, math.nan)
  turns = [part for t in several for part in np.split(t.value.astype(float), t.starts[1:])]
  every = np.concatenate(turns)
  within = sum(float(np.square(part - part.mean()).sum()) for part in turns)
  between = sum(len(part) * float(part.mean() - every.mean()) ** 2 for part in turns)
  total = within + between
  return Constancy(
    eta2=between / total if total > 0 else math.nan,
    inside=float(np.mean([abs(part[-1] - part[0]) for part in turns])),
    between=float(np.mean(np.concatenate([np.abs(np.diff(turn_values(t))) for t in several]))),
  )


def with_permuted_turns(trace: Trace, rng: np.random.Generator) -> Trace:
  """The same values with turn boundaries elsewhere: lengths in another order, begun at a random
  token. (Lengths alone would move nothing where all turns are equally long.) A turn that runs over
  the end goes on at the beginning, so that lengths are kept; its values are put together.
  """
  lengths = rng.permutation(np.bincount(trace.turn))
  offset = int(rng.integers(len(trace.value)))
  return dataclasses.replace(
    trace,
    value=np.roll(trace.value, -offset),
    turn=np.repeat(np.arange(len(lengths)), lengths),
  )


# --- retries --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attempts:
  """Fresh plays of one episode from one of its turns on."""

  successes: int
  plays: int
  tokens: float  # sampled by a play, on average

  def chance(self, budget: float) -> float:
    """Of at least one success within `budget` tokens: 1 - (1 - p)^(budget / tokens)."""
    if not self.plays or not self.tokens > 0:
      raise ValueError(f"{self.plays} plays of {self.tokens} tokens: nothing was tried")
    return 1.0 - (1.0 - self.successes / self.plays) ** (budget / self.tokens)


def retry_value(resampled: Attempts, continued: Attempts) -> float:
  """Chance of success when a turn is drawn again, minus that when it is kept and the episode goes
  on from the next one; both get the tokens that one play of the former takes.
  """
  budget = resampled.tokens
  return resampled.chance(budget) - continued.chance(budget)
