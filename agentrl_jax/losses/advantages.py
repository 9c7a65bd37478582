"""Advantage slot: `(TrajectoryBatch, Aux) -> Credit`, made once on the whole batch, without
gradient.

Statistics run over scored trajectories, one vote each however many rows, turns or samples they
occupy.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.ops.scales import TRAJ, scored, spread
from agentrl_jax.types import AdvantageFn, Aux, Credit, TrajectoryBatch

ALL_EQUAL = 1e-6  # a group whose largest centred reward is below this (relative) has no signal

GroupScale = Callable[[Float[Array, "R"], Float[Array, "R"], Float[Array, "R"]], Float[Array, "R"]]


def by_std(eps: float = 1e-6) -> GroupScale:
  """Divide by the group's sample standard deviation (ddof 1) plus `eps` (GRPO, arXiv
  2402.03300).
  """

  def scale(square_sum, count, mean):
    del mean
    return jnp.sqrt(square_sum / jnp.maximum(count - 1.0, 1.0)) + eps

  return scale


def unscaled() -> GroupScale:
  """Centre only (Dr.GRPO, arXiv 2503.20783): no division, so no bias towards easy or hard tasks."""

  def scale(square_sum, count, mean):
    del count, mean
    return jnp.ones_like(square_sum)

  return scale


def group_relative(scale: GroupScale | None = None) -> AdvantageFn:
  """Return minus the mean return of the task's scored group, divided by `scale` (default
  `by_std()`).

  A group of one and a group of equal rewards get exactly 0.
  """
  scale = scale or by_std()

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    returns, group, valid = trajectory_returns(batch), batch.traj_group, batch.traj_group >= 0
    count = _over_group(jnp.ones_like(returns), group, valid)
    mean = _over_group(returns, group, valid) / jnp.maximum(count, 1.0)
    centred = jnp.where(valid, returns - mean, 0.0)
    largest = _over_group(jnp.abs(centred), group, valid, jax.ops.segment_max)
    signal = (count > 1) & (largest >= ALL_EQUAL * jnp.maximum(1.0, jnp.abs(mean))) & valid
    divisor = scale(_over_group(jnp.square(centred), group, valid), count, mean)
    per_trajectory = jnp.where(signal, centred / jnp.where(signal, divisor, 1.0), 0.0)
    return Credit(to_tokens(per_trajectory, batch))

  return advantage


def imitation() -> AdvantageFn:
  """Advantage 1 on every scored action token: the credit of supervised training."""

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    return Credit(scored(batch).astype(jnp.float32))

  return advantage


def trajectory_returns(batch: TrajectoryBatch) -> Float[Array, "R"]:
  """Sum of each trajectory's turn rewards."""
  size = batch.traj_group.shape[0]
  inside = batch.turn_traj >= 0
  ids = jnp.where(inside, batch.turn_traj, size)
  reward = jnp.where(inside, batch.turn_reward, 0.0)
  return jax.ops.segment_sum(reward, ids, size + 1)[:-1]


def to_tokens(per_trajectory: Float[Array, "R"], batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """A trajectory's number on each of its scored action tokens, 0 elsewhere."""
  return jnp.where(scored(batch), spread(per_trajectory, TRAJ(batch)), 0.0)


def _over_group(
  x: Float[Array, "R"], group: Array, valid: Bool[Array, "R"], reduce=jax.ops.segment_sum
) -> Float[Array, "R"]:
  """`reduce` of x over the valid members of each trajectory's group, given back to each member."""
  size = group.shape[0]
  ids = jnp.where(valid, group, size)
  return reduce(jnp.where(valid, x, 0.0), ids, size + 1)[ids]
