"""Estimates with their uncertainty: a bootstrap over problems, and Wilson's interval of a share."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Interval(NamedTuple):
  """An estimate with the ends of its confidence interval."""

  estimate: float
  low: float
  high: float

  def __str__(self) -> str:
    return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
  """Wilson's score interval of a share (Wilson 1927). No trials: estimate NaN, interval [0, 1]."""
  if not 0 <= successes <= trials:
    raise ValueError(f"{successes} successes of {trials} trials")
  if trials == 0:
    return Interval(math.nan, 0.0, 1.0)
  z = NormalDist().inv_cdf(0.5 + confidence / 2)
  share = successes / trials
  scale = 1 + z**2 / trials
  middle = (share + z**2 / (2 * trials)) / scale
  half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2)) / scale
  low = middle - half if successes else 0.0  # exact at the ends, where rounding would not be
  high = middle + half if successes < trials else 1.0
  return Interval(share, low, high)


def percentile(
  estimate: float, resampled: Float[np.ndarray, " N"], confidence: float = 0.95
) -> Interval:
  """The percentile interval of bootstrap values around an estimate."""
  tail = (1 - confidence) / 2
  low, high = np.quantile(resampled, [tail, 1 - tail])
  return Interval(float(estimate), float(low), float(high))


def bootstrap_means(
  sets: Sequence[Float[np.ndarray, "P K"]], *, resamples: int, seed: int
) -> Float[np.ndarray, "N K"]:
  """Bootstrap values of K means: over problems within a set, then over the sets.

  Whole problems are drawn with replacement, with all that was sampled on them, so both the choice
  of problems and the sampling noise are in the spread. With several sets (model pairs), sets are
  drawn too.
  """
  rng = np.random.default_rng(seed)
  total = np.zeros((resamples, sets[0].shape[1]))
  for _ in sets:
    drawn = rng.integers(len(sets), size=resamples)
    for index, values in enumerate(sets):
      rows = drawn == index
      problems = len(values)
      draws = rng.multinomial(problems, np.full(problems, 1 / problems), size=int(rows.sum()))
      total[rows] += draws @ values / problems
  return total / len(sets)
