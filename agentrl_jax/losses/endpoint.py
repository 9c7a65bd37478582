"""Endpoint baseline: a group continues one prefix; reward or critic scores where each one got.

A finished continuation is worth its return, an unfinished one the critic's value of where it
stopped; the advantage is that worth minus the group's mean (AC2, arXiv 2609.39247, section 2.1).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.losses.advantages import (
  relative_to_set,
  to_tokens,
  trajectory_returns,
  unscaled,
)
from agentrl_jax.losses.arguments import above_zero, not_negative
from agentrl_jax.ops.scales import (
  TRAJ,
  Partition,
  is_first,
  is_last,
  restrict,
  scored,
  spread,
  unit_sum,
)
from agentrl_jax.types import AdvantageFn, Aux, Credit, TrajectoryBatch, WeightFn


def endpoint_baseline(*, min_valid: int = 8, grid: float = 0.1) -> AdvantageFn:
  """Centred endpoint worths, and the group's mean worth as target of the critic at its prefix.

  A critic value that is not finite is invalid: the mean of the group's valid worths replaces it (0
  if there is none), `valid_endpoints` gives it no weight, and it enters no target. Needs `value`.

  Args:
    min_valid: groups with fewer valid worths give the critic no target.
    grid: targets are rounded to multiples of this, ties down; 0 leaves them as they are.
  """
  above_zero(min_valid=min_valid)
  not_negative(grid=grid)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    worth, valid = endpoint_worth(batch, aux)
    group, size = batch.traj_group, batch.traj_group.shape[0]
    label = jnp.where(valid, group, size)
    ids = jnp.where(group >= 0, group, size)
    count, total = (
      jnp.zeros(size + 1).at[label].add(jnp.where(valid, x, 0.0))[ids] for x in (1.0, worth)
    )
    mean = total / jnp.maximum(count, 1.0)
    filled = jnp.where(valid, worth, mean)
    relative = relative_to_set(filled, group, unscaled())
    target = ties_down(mean, grid) if grid else mean
    starts = restrict(TRAJ(batch), scored(batch))
    learns = is_first(batch, starts) & spread((count >= min_valid) & (group >= 0), starts)
    share = learns.astype(jnp.float32)
    weight = share / jnp.maximum(share.sum(), 1.0)
    at_start = jnp.where(learns, spread(target, starts), 0.0)
    return Credit(to_tokens(relative, batch), at_start, weight)

  return advantage


def valid_endpoints(base: WeightFn) -> WeightFn:
  """Weight 0 for continuations without a valid endpoint; denominators stay as they are."""

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    _, valid = endpoint_worth(batch, aux)
    return jnp.where(spread(valid, TRAJ(batch)), base(batch, aux, credit), 0.0)

  return weight


def endpoint_worth(batch: TrajectoryBatch, aux: Aux) -> tuple[Float[Array, "R"], Bool[Array, "R"]]:
  """(worth, valid): returns, plus the critic's value at the sentinel of truncated trajectories."""
  if aux.value is None:
    raise ValueError("an endpoint baseline needs value: name it in Algorithm.needs")
  everything = Partition(batch.traj, batch.traj_group.shape[0])
  sentinel = is_last(batch, everything) & jnp.logical_not(batch.action)
  known = jnp.isfinite(aux.value)
  value = unit_sum(jnp.where(sentinel & known, aux.value, 0.0), everything)
  known = unit_sum((sentinel & known).astype(jnp.float32), everything) > 0
  scored_here = batch.traj_group >= 0
  worth = trajectory_returns(batch) + jnp.where(batch.traj_truncated, value, 0.0)
  return worth, scored_here & (known | jnp.logical_not(batch.traj_truncated))


def ties_down(x: Float[Array, "*shape"], step: float) -> Float[Array, "*shape"]:
  """Nearest multiple of `step`, half-way values down; 1e-4 of a step counts as half-way.

  A float32 mean of tenths misses .55 by 1e-7, so an exact comparison would break ties at random.
  """
  return jnp.ceil(x / step - 0.5 - 1e-4) * step
