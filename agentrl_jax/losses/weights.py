"""Weight slot: `(TrajectoryBatch, Aux, Credit) -> [B T]`, every denominator, on the whole batch.

The loss is a plain weighted sum, so micro-batches, hosts and packings add exactly. Denominators
count scored units that have an action token; corrections for the engine are in `corrections`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import a_scale, above_zero, finite
from agentrl_jax.ops.scales import (
  GROUP,
  TOKEN,
  TRAJ,
  TURN,
  Scale,
  is_first,
  restrict,
  scored,
  spread,
  unit_count,
  unit_sum,
)
from agentrl_jax.types import Aux, Credit, TrajectoryBatch, WeightFn

NESTED = (TOKEN, TURN, TRAJ, GROUP)  # units of each lie within those of the next


def mean_over(scale: Scale) -> WeightFn:
  """Mean over units of the mean over each unit's tokens: 1 / (units x its tokens); sums to 1."""
  a_scale(scale=scale)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    del aux, credit
    units = restrict(scale(batch), scored(batch))
    counts = unit_count(units)
    present = (counts > 0).sum(dtype=jnp.float32)
    return spread(1.0 / (jnp.maximum(present, 1.0) * jnp.maximum(counts, 1.0)), units)

  return weight


def nested_mean(outer: Scale, inner: Scale) -> WeightFn:
  """Mean over outer units of the mean over their inner units of the token mean; sums to 1.

  Each inner unit must lie within an outer one. Trajectories of turns: known to reward having few
  turns.
  """
  a_scale(outer=outer, inner=inner)
  if inner in NESTED and outer in NESTED[: NESTED.index(inner)]:
    raise ValueError("the inner units hold the outer ones, expected (outer, inner) as (TRAJ, TURN)")

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    del aux, credit
    keep = scored(batch)
    large, small = restrict(outer(batch), keep), restrict(inner(batch), keep)
    parts = unit_sum(is_first(batch, small).astype(jnp.float32), large)
    present = jnp.maximum((parts > 0).sum(dtype=jnp.float32), 1.0)
    each = spread(jnp.maximum(parts, 1.0), large) * spread(unit_count(small), small)
    return jnp.where(keep, 1.0 / (present * jnp.where(keep, each, 1.0)), 0.0)

  return weight


def fixed_length(length: float) -> WeightFn:
  """1 / (trajectories x length): a constant divisor (Dr.GRPO, arXiv 2503.20783).

  Length 1 is the mean over trajectories of token sums.
  """
  above_zero(length=length)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    del aux, credit
    units = restrict(TRAJ(batch), scored(batch))
    present = jnp.maximum((unit_count(units) > 0).sum(dtype=jnp.float32), 1.0)
    return jnp.where(units.ids >= 0, 1.0 / (present * length), 0.0)

  return weight


def sum_over(divisor: float) -> WeightFn:
  """1 / divisor on every scored action token."""
  above_zero(divisor=divisor)
  return lambda batch, aux, credit: jnp.where(scored(batch), 1.0 / divisor, 0.0)


def drop_truncated(base: WeightFn) -> WeightFn:
  """Truncated trajectories carry no loss and are in no denominator (overlong filtering of DAPO)."""

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    cut = spread(batch.traj_truncated, TRAJ(batch))
    return base(dataclasses.replace(batch, action=batch.action & jnp.logical_not(cut)), aux, credit)

  return weight


def once_explained(base: WeightFn, least: float = 0.0) -> WeightFn:
  """No weight for the policy until the critic has explained more than `least` of the variance of
  its targets, 1 - Var(target - V) / Var(target), in an earlier step. The critic learns meanwhile.

  Where no run keeps count (`Aux.explained` is None), by this batch's own old values; raises
  ValueError, when traced, where there are none or no targets.
  """
  finite(least=least)
  if least >= 1:
    raise ValueError(f"least is {least}, expected less than 1: no critic explains more than all")

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    if aux.explained is not None:
      return jnp.where(aux.explained > least, base(batch, aux, credit), 0.0)
    value, target, learns = aux.value, credit.value_target, credit.value_weight
    if value is None or target is None or learns is None:
      raise ValueError("once_explained needs a critic: values, and an advantage that gives targets")
    keep = learns > 0
    count = jnp.maximum(keep.sum(dtype=jnp.float32), 1.0)

    def variance(x):  # of numbers that are 0 where nothing is learned
      return jnp.square(jnp.where(keep, x - x.sum() / count, 0.0)).sum() / count

    target, value = jnp.where(keep, target, 0.0), jnp.where(keep, value, 0.0)
    good = variance(target - value) < (1.0 - least) * variance(target)
    return jnp.where(good, base(batch, aux, credit), 0.0)

  return weight
