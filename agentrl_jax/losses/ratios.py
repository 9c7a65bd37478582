"""Ratio slot: `(log_ratio, LossBatch) -> log_ratio`, at the scale where policies are compared."""

from jaxtyping import Array, Float

from agentrl_jax.ops.scales import Scale, spread, unit_mean
from agentrl_jax.types import LossBatch, RatioFn


def per_token() -> RatioFn:
  """Each token keeps its own log-ratio (PPO, arXiv 1707.06347)."""
  return lambda log_ratio, batch: log_ratio


def at_scale(scale: Scale) -> RatioFn:
  """Geometric mean of the unit's token ratios, the same on each of its tokens (GSPO, arXiv
  2507.18071).
  """

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    units = scale(batch.traj)
    return spread(unit_mean(log_ratio, units), units)

  return ratio
