"""A scale is an id array: token, turn, trajectory and group are partitions of the policy's tokens.

Every "X at level Y" is a segment sum over ids and a gather back, so packed and unpacked rows are
one code.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.types import TrajectoryBatch


class Partition(NamedTuple):
  """Units of the policy's tokens. `ids` are in [0, size), -1 for tokens in no unit; `size` is
  static.
  """

  ids: Int[Array, "B T"]
  size: int


Scale = Callable[[TrajectoryBatch], Partition]


def TOKEN(batch: TrajectoryBatch) -> Partition:
  """Every sampled token is a unit of its own."""
  rows, length = batch.tokens.shape
  ids = jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
  return Partition(jnp.where(batch.action, ids, -1), rows * length)


def TURN(batch: TrajectoryBatch) -> Partition:
  """One engine call is a unit."""
  return Partition(jnp.where(batch.action, batch.turn, -1), batch.turn_reward.shape[0])


def TRAJ(batch: TrajectoryBatch) -> Partition:
  """One episode is a unit, however many rows or samples it occupies."""
  return Partition(jnp.where(batch.action, batch.traj, -1), batch.traj_group.shape[0])


def GROUP(batch: TrajectoryBatch) -> Partition:
  """All scored episodes of one task are a unit."""
  traj = TRAJ(batch)
  return Partition(jnp.where(traj.ids >= 0, batch.traj_group[traj.ids], -1), traj.size)


def scored(batch: TrajectoryBatch) -> Bool[Array, "B T"]:
  """The policy's tokens in trajectories that were scored: faulted ones enter no statistic."""
  return batch.action & (spread(batch.traj_group, TRAJ(batch), fill=-1) >= 0)


def unit_sum(x: Float[Array, "B T"], units: Partition) -> Float[Array, "N"]:
  """Sum of `x` over each unit's tokens; x is not read outside units, so it may be NaN there."""
  inside = units.ids >= 0
  x = jnp.where(inside, x, jnp.zeros((), x.dtype))
  ids = jnp.where(inside, units.ids, units.size)
  return jax.ops.segment_sum(x.ravel(), ids.ravel(), units.size + 1)[:-1]


def unit_count(units: Partition) -> Float[Array, "N"]:
  """How many tokens each unit has."""
  return unit_sum(jnp.ones(units.ids.shape, jnp.float32), units)


def unit_mean(x: Float[Array, "B T"], units: Partition) -> Float[Array, "N"]:
  """Mean of `x` over each unit's tokens, 0 for empty units."""
  return unit_sum(x, units) / jnp.maximum(unit_count(units), 1.0)


def spread(per_unit: Array, units: Partition, fill: float = 0) -> Array:
  """Gives each token its unit's number ([N] -> [B T]), `fill` outside units."""
  inside = units.ids >= 0
  return jnp.where(inside, per_unit[units.ids], jnp.asarray(fill, per_unit.dtype))
