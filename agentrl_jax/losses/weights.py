"""Weight slot: `(TrajectoryBatch, Aux, Credit) -> [B T]`, every denominator of the loss, on the
whole batch.

The loss is a plain weighted sum, so micro-batches, hosts and packings add exactly.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.surrogates import bounded_exp
from agentrl_jax.ops.scales import TRAJ, Partition, Scale, scored, spread, unit_count
from agentrl_jax.types import Aux, Credit, TrajectoryBatch, WeightFn


def mean_over(scale: Scale) -> WeightFn:
  """Mean over units of the mean over each unit's tokens: 1 / (units x tokens of the unit); sums to
  1.
  """

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    del aux, credit
    counts, units = _scored_counts(batch, scale)
    present = (counts > 0).sum(dtype=jnp.float32)
    each = 1.0 / (jnp.maximum(present, 1.0) * jnp.maximum(counts, 1.0))
    return spread(each, units)

  return weight


def fixed_length(length: float) -> WeightFn:
  """1 / (trajectories x length): a constant divisor (Dr.GRPO, arXiv 2503.20783)."""
  if not length > 0:
    raise ValueError(f"length is {length}, expected > 0")

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    del aux, credit
    counts, units = _scored_counts(batch, TRAJ)
    present = jnp.maximum((counts > 0).sum(dtype=jnp.float32), 1.0)
    return jnp.where(units.ids >= 0, 1.0 / (present * length), 0.0)

  return weight


def truncated_is(base: WeightFn, cap: float = 2.0, low: float = 0.0) -> WeightFn:
  """Multiplies `base` by clip(exp(old - behavior), low, cap): engine and trainer disagree a little.

  The correction is a constant of the loss and is not renormalised (truncated importance sampling).
  """

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    keep = scored(batch)
    log_rho = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, batch.behavior_logp, 0.0)
    return base(batch, aux, credit) * jnp.clip(bounded_exp(log_rho), low, cap)

  return weight


def _scored_counts(batch: TrajectoryBatch, scale: Scale) -> tuple[Float[Array, "N"], Partition]:
  units = scale(batch)
  units = units._replace(ids=jnp.where(scored(batch), units.ids, -1))
  return unit_count(units), units
