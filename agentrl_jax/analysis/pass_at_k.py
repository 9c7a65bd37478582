"""pass@k (any of k succeeds) and pass^k (all k succeed), unbiased in the samples.

The mean over all k-subsets of the N samples, in closed form; resampling with replacement would give
values below the truth.
"""

from math import comb

import numpy as np
from jaxtyping import Float, Int

from agentrl_jax.analysis.intervals import Interval, bootstrap_means, percentile
from agentrl_jax.analysis.samples import Samples


def pass_at_k(
  samples: Int[np.ndarray, " P"], successes: Int[np.ndarray, " P"], k: int
) -> Float[np.ndarray, " P"]:
  """1 - C(N - c, k) / C(N, k) for each problem (Chen et al. 2021, arXiv:2107.03374, eq. 1).

  Raises ValueError where k is not in [1, N] or c not in [0, N].
  """
  return np.array([1 - comb(n - c, k) / comb(n, k) for n, c in _checked(samples, successes, k)])


def pass_hat_k(
  samples: Int[np.ndarray, " P"], successes: Int[np.ndarray, " P"], k: int
) -> Float[np.ndarray, " P"]:
  """C(c, k) / C(N, k) for each problem (Yao et al. 2024, arXiv:2406.12045).

  Raises ValueError where k is not in [1, N] or c not in [0, N].
  """
  return np.array([comb(c, k) / comb(n, k) for n, c in _checked(samples, successes, k)])


def curves(
  samples: Samples, ks: tuple[int, ...], *, resamples: int = 2000, seed: int = 0
) -> dict[str, dict[int, Interval]]:
  """Mean pass@k and pass^k over problems, with 95% intervals by the bootstrap over problems."""
  counts, _, successes = samples.counts()
  found = {}
  for name, function in (("pass@k", pass_at_k), ("pass^k", pass_hat_k)):
    columns = np.stack([function(counts, successes, k) for k in ks], axis=1)
    resampled = bootstrap_means([columns], resamples=resamples, seed=seed)
    found[name] = {k: percentile(columns[:, i].mean(), resampled[:, i]) for i, k in enumerate(ks)}
  return found


def _checked(
  samples: Int[np.ndarray, " P"], successes: Int[np.ndarray, " P"], k: int
) -> list[tuple[int, int]]:
  pairs = [(int(n), int(c)) for n, c in zip(samples, successes, strict=True)]
  for index, (n, c) in enumerate(pairs):
    if not 0 <= c <= n:
      raise ValueError(f"problem {index}: {c} successes of {n} samples")
    if not 1 <= k <= n:
      raise ValueError(f"problem {index}: k is {k}, expected 1 to its {n} samples")
  return pairs
