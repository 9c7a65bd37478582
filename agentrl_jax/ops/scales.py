"""A scale is an id array: token, chunk, turn, trajectory, group are partitions of action tokens.

Every "X at level Y" is a segment sum over ids and a gather back, so packed and unpacked rows are
one code. Time inside a trajectory is (sample, position), whatever rows its samples lie in.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from agentrl_jax.types import TrajectoryBatch


class Partition(NamedTuple):
  """Units of tokens. `ids` are in [0, size), -1 for tokens in no unit; `size` is static."""

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


def fixed_chunks(length: int) -> Scale:
  """Chunks of `length` action tokens, counted from the start of each turn; the last is shorter."""
  if not isinstance(length, int) or isinstance(length, bool) or length < 1:
    raise ValueError(f"chunk length is {length!r}, expected a whole number of at least 1")

  def chunks(batch: TrajectoryBatch) -> Partition:
    turn = TURN(batch)
    so_far = jnp.cumsum(batch.action, axis=1, dtype=jnp.int32)
    first = unit_sum(jnp.where(is_first(batch, turn), so_far, 0), turn)
    return _started_by((so_far - spread(first, turn)) % length == 0, batch)

  return chunks


def marked_chunks(marks: Sequence[int]) -> Scale:
  """Chunks that end with one of the token ids `marks` (a newline, say) or with their turn."""
  if not isinstance(marks, Sequence) or not marks or not all(type(m) is int for m in marks):
    raise ValueError(f"marks are {marks!r}, expected a sequence of at least one token id")

  def chunks(batch: TrajectoryBatch) -> Partition:
    marked = batch.action & jnp.isin(batch.tokens, jnp.asarray(tuple(marks), batch.tokens.dtype))
    after = jnp.pad(marked[:, :-1], ((0, 0), (1, 0)))
    return _started_by(after | is_first(batch, TURN(batch)), batch)

  return chunks


def GROUP(batch: TrajectoryBatch) -> Partition:
  """All scored episodes of one task are a unit."""
  traj = TRAJ(batch)
  return Partition(jnp.where(traj.ids >= 0, batch.traj_group[traj.ids], -1), traj.size)


def scored(batch: TrajectoryBatch) -> Bool[Array, "B T"]:
  """The policy's tokens in trajectories that were scored: faulted ones enter no statistic."""
  return batch.action & (spread(batch.traj_group, TRAJ(batch), fill=-1) >= 0)


def restrict(units: Partition, mask: Bool[Array, "B T"]) -> Partition:
  """The same units without the tokens off `mask`."""
  return units._replace(ids=jnp.where(mask, units.ids, -1))


def is_first(batch: TrajectoryBatch, units: Partition) -> Bool[Array, "B T"]:
  """Marks each unit's first token in time."""
  return _is_least(batch.sample, batch.position, units)


def is_last(batch: TrajectoryBatch, units: Partition) -> Bool[Array, "B T"]:
  """Marks each unit's last token in time."""
  return _is_least(-batch.sample, -batch.position, units)


def unit_sum(x: Num[Array, "B T"], units: Partition) -> Num[Array, "N"]:
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


def _started_by(start: Bool[Array, "B T"], batch: TrajectoryBatch) -> Partition:
  """Units that run from one marked action token to the next; ids are flat indices of the marks."""
  token = TOKEN(batch)
  latest = jax.lax.cummax(jnp.where(start, token.ids, -1), axis=1)
  return Partition(jnp.where(batch.action, latest, -1), token.size)


def _is_least(
  major: Int[Array, "B T"], minor: Int[Array, "B T"], units: Partition
) -> Bool[Array, "B T"]:
  """Marks each unit's token with the least (major, minor)."""
  found = units.ids >= 0
  ids = jnp.where(found, units.ids, units.size)
  for key in (major, minor):
    key = jnp.where(found, key, jnp.iinfo(key.dtype).max)
    found &= key == jax.ops.segment_min(key.ravel(), ids.ravel(), units.size + 1)[ids]
  return found
