"""From device shards to packed host buckets: the only place where a push reads weights.

One source tensor at a time: its shards are cast where they live, brought to the host, permuted
  straight into their place in the buckets. Peak memory is the buckets plus one cast shard.
"""

import concurrent.futures
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.model import parameter_path
from agentrl_jax.transfer.layout import permuted, slices
from agentrl_jax.transfer.plan import Copy, Plan, Segment, Shard, Tensor

NUMPY_DTYPES: Mapping[str, np.dtype] = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(jnp.bfloat16),
  "float16": np.dtype(np.float16),
  "int32": np.dtype(np.int32),
  "uint8": np.dtype(np.uint8),
  "bool": np.dtype(np.bool_),
}


class Staged(NamedTuple):
  """A round's packed weights on the host. `buffers[(rank, bucket)]` is uint8; `hashes` follow
  `plan.segments`.
  """

  key: str
  plan: Plan
  buffers: Mapping[tuple[int, int], np.ndarray]
  hashes: tuple[str, ...]  # blake2b of 16 bytes, hex
  fingerprint: str

  def view(self, segment: Segment) -> np.ndarray:
    """The segment's values, a view into its bucket."""
    return segment_view(self.buffers[segment.rank, segment.bucket], segment)


def leaves(weights: Any) -> dict[str, jax.Array]:
  """Tree path ("layers.attention.query") to array."""
  flat = jax.tree_util.tree_leaves_with_path(weights)
  return {".".join(parameter_path(path)): leaf for path, leaf in flat}


def source_layout(weights: Any) -> tuple[Tensor, ...]:
  """Layout of a weight tree: a rank is a device id, a shard is what its device holds."""
  return tuple(
    Tensor(
      name,
      tuple(leaf.shape),
      str(leaf.dtype),
      tuple(
        Shard(device.id, _box(index, leaf.shape))
        for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items()
      ),
    )
    for name, leaf in leaves(weights).items()
  )


def allocate(plan: Plan) -> dict[tuple[int, int], np.ndarray]:
  """Fresh buckets in ordinary memory."""
  return {(b.rank, b.index): np.zeros(b.nbytes, np.uint8) for b in plan.buckets}


def stage(
  plan: Plan, weights: Any, buffers: Mapping[tuple[int, int], np.ndarray], key: str
) -> Staged:
  """Runs a plan's copies into `buffers` for the round `key` and hashes every segment.

  Raises:
    ValueError: a weight is not finite, or a shard that the plan reads is not on this process; both
      name the tensor.
  """
  arrays = leaves(weights)
  for name, group in itertools.groupby(plan.copies, key=lambda copy: copy.src_name):
    leaf = arrays[name]
    if jnp.issubdtype(leaf.dtype, jnp.floating) and not _all_finite(leaf):
      raise ValueError(f"{name} has a value that is not finite")
    _copy_leaf(leaf, tuple(group), plan.segments, buffers)
  hashes = hash_segments(plan.segments, buffers)
  rows = [
    (s.rank, s.name, s.part, s.shape, s.dtype, digest)
    for s, digest in zip(plan.segments, hashes, strict=True)
  ]
  return Staged(key, plan, buffers, hashes, fingerprint_of(rows))


def hash_segments(
  segments: Sequence[Segment], buffers: Mapping[tuple[int, int], np.ndarray]
) -> tuple[str, ...]:
  """blake2b (16 bytes, hex) of each segment; hashing frees the interpreter lock: two threads."""

  def one(segment: Segment) -> str:
    return tensor_hash(_bytes(buffers[segment.rank, segment.bucket], segment))

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return tuple(pool.map(one, segments))


def tensor_hash(data: Any) -> str:
  """blake2b of 16 bytes, hex, of anything with the buffer protocol."""
  return hashlib.blake2b(data, digest_size=16).hexdigest()


def fingerprint_of(
  rows: Iterable[tuple[int, str, tuple[int, int], tuple[int, ...], str, str]],
) -> str:
  """One hash over sorted (rank, name, part, shape, dtype, tensor hash)."""
  return hashlib.blake2b(repr(sorted(rows)).encode(), digest_size=16).hexdigest()


def segment_view(buffer: np.ndarray, segment: Segment) -> np.ndarray:
  """A segment's values as a view of its bucket."""
  return _bytes(buffer, segment).view(NUMPY_DTYPES[segment.dtype]).reshape(segment.shape)


def _bytes(buffer: np.ndarray, segment: Segment) -> np.ndarray:
  return buffer[segment.offset : segment.offset + segment.nbytes]


def _copy_leaf(
  leaf: jax.Array,
  copies: tuple[Copy, ...],
  segments: Sequence[Segment],
  buffers: Mapping[tuple[int, int], np.ndarray],
) -> None:
  held = {shard.device.id: shard for shard in leaf.addressable_shards}
  by_read = sorted(copies, key=lambda copy: (copy.src_rank, segments[copy.segment].dtype))
  for (rank, dtype), group in itertools.groupby(
    by_read, key=lambda copy: (copy.src_rank, segments[copy.segment].dtype)
  ):
    if rank not in held:
      raise ValueError(f"{copies[0].src_name}: device {rank} belongs to another process")
    shard = held[rank]
    same = shard.data.dtype == NUMPY_DTYPES[dtype]
    host = np.asarray(shard.data if same else shard.data.astype(NUMPY_DTYPES[dtype]))
    origin = [start for start, _ in _box(shard.index, leaf.shape)]
    for copy in group:
      local = tuple(
        slice(start - o, stop - o) for (start, stop), o in zip(copy.src_index, origin, strict=True)
      )
      segment = segments[copy.segment]
      tile = segment_view(buffers[segment.rank, segment.bucket], segment)[slices(copy.tile)]
      tile.reshape(copy.view)[slices(copy.dst_index)] = permuted(host[local], copy.perm)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
  return jnp.isfinite(leaf).all()
