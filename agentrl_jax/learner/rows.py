"""How rows become micro-batches: contiguous blocks, each spread over the data axes of the mesh.

Rank says what an array is: [B, T, ...] fields are split, [U] and [R] fields and sums over routers
go whole to every micro-batch.
"""

import math
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from agentrl_jax.models.sharding import BATCH
from agentrl_jax.types import RouterSums

Batch = TypeVar("Batch")


def rows_per_micro_batch(micro_rows: int, mesh: Mesh) -> int:
  """Rows of one micro-batch over all devices, when each data shard handles `micro_rows` at a time.

  The packer pads the number of rows to a multiple of this.
  """
  if micro_rows < 1:
    raise ValueError(f"micro_rows is {micro_rows}, expected at least 1")
  return micro_rows * math.prod(mesh.shape[axis] for axis in BATCH[0])


def goes_whole(node: Any) -> bool:
  """Whether a part of a batch is not of its rows, whatever its rank."""
  return isinstance(node, RouterSums)


def split(batch: Batch, micro_rows: int, mesh: Mesh) -> tuple[Batch, int]:
  """([B T ...] fields as [M b T ...] spread over the data axes along b, the others as they are; M).

  Raises ValueError if B is not a multiple of the rows of a micro-batch.
  """
  size = rows_per_micro_batch(micro_rows, mesh)
  sharding = NamedSharding(mesh, PartitionSpec(None, *BATCH))
  rows = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim == 2)
  if rows % size:
    raise ValueError(
      f"the batch has {rows} rows, expected a multiple of {size} "
      f"(micro_rows {micro_rows} x {size // micro_rows} data shards)"
    )

  def block(x: Any) -> Any:
    if goes_whole(x) or x.ndim < 2:
      return x
    blocks = x.reshape(rows // size, size, *x.shape[1:])
    return jax.lax.with_sharding_constraint(blocks, sharding)

  return jax.tree.map(block, batch, is_leaf=goes_whole), rows // size


def take(blocks: Batch, index: Array) -> Batch:
  """Micro-batch `index` of what `split` returned."""

  def one(x: Any) -> Any:
    return x if goes_whole(x) or x.ndim < 3 else x[index]

  return jax.tree.map(one, blocks, is_leaf=goes_whole)
