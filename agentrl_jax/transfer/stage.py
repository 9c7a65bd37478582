"""From device shards to packed host buckets: the only place where a push reads weights.

One source tensor at a time: its shards are cast and transposed where they live, brought to the host
and copied into their place in the buckets by several threads, which hash what is whole meanwhile.
Peak memory is the buckets plus one cast shard. What is quantised is transposed and quantised on its
devices first, one published tensor at a time.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.model import parameter_path
from agentrl_jax.ops.quantize import Quantization, block_amax, grid, quantize_with, scales_of
from agentrl_jax.transfer.layout import Box, extents, slices
from agentrl_jax.transfer.plan import Copy, Plan, Segment, Shard, Tensor, scale_name

_THREADS = 8  # copying and hashing free the interpreter lock

NUMPY_DTYPES: Mapping[str, np.dtype] = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(jnp.bfloat16),
  "float16": np.dtype(np.float16),
  "int32": np.dtype(np.int32),
  "uint8": np.dtype(np.uint8),
  "bool": np.dtype(np.bool_),
  "float8_e4m3fn": np.dtype(jnp.float8_e4m3fn),
  "float8_e4m3fnuz": np.dtype(jnp.float8_e4m3fnuz),
}


class Staged(NamedTuple):
  """A round's packed weights on the host. `buffers[(rank, bucket)]` is uint8; `hashes` follow
  `plan.segments`.

  Where other processes have the other buckets, `join` has them take part in a delivery: it is given
  what they must know, or None when there is no more, and raises CallError where one of them fails.
  """

  key: str
  plan: Plan
  buffers: Mapping[tuple[int, int], np.ndarray]
  hashes: tuple[str, ...]  # of `tensor_hash`
  fingerprint: str
  join: Callable[[Any], None] | None = None

  @property
  def whole(self) -> bool:
    """Whether all of it is here."""
    return self.join is None

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


class Together(Protocol):
  """What a process that holds some of the shards needs of the others while it stages.

  `same_buffers`: all of them write to the same ones, so that the first can hash everything.
  """

  same_buffers: bool

  def largest(self, amax: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """By tensor, the elementwise maximum over processes."""
    ...

  def written(self, sums: "Sums") -> None:
    """Returns once all have written their part, and their replicas agree."""
    ...

  def hashes(self, mine: Mapping[int, str]) -> Mapping[int, str]:
    """By segment, those of all processes, on the first of them; `mine` on the others."""
    ...


Sums = Mapping[str, Mapping[int, int]]  # by tensor and box, for each device that holds it, its bits


def stage(
  plan: Plan,
  weights: Any,
  buffers: Mapping[tuple[int, int], np.ndarray],
  key: str,
  together: Together | None = None,
) -> Staged:
  """Runs a plan's copies into `buffers` for the round `key` and hashes every segment.

  Args:
    buffers: all of the plan's, or those of this process where the others have the rest.
    together: where other processes hold the other shards and write them.

  Raises:
    ValueError: a weight is not finite, replicas of a shard differ, or a shard that the plan reads
      is not on this process; all name the tensor.
  """
  hashed: dict[int, concurrent.futures.Future[str]] = {}
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:

    def start_hash(number: int) -> None:
      segment = plan.segments[number]
      data = segment_bytes(buffers[segment.rank, segment.bucket], segment)
      hashed[number] = pool.submit(tensor_hash, data)

    scales = fill(plan, weights, buffers, pool, start_hash, together)
    targets = _by_name(plan.segments) if scales else {}
    for name, values in scales.items():
      for segment in targets[name]:
        if (segment.rank, segment.bucket) not in buffers:
          continue
        view = segment_view(buffers[segment.rank, segment.bucket], segment)
        view[...] = values[slices(segment.index)]
    for number, segment in enumerate(plan.segments):
      if number not in hashed and (segment.rank, segment.bucket) in buffers:
        start_hash(number)
    found: Mapping[int, str] = {number: one.result() for number, one in hashed.items()}
  if together is not None and not together.same_buffers:
    found = together.hashes(found)
  hashes = tuple(found.get(number, "") for number in range(len(plan.segments)))
  rows = [
    (s.rank, s.name, s.part, s.shape, s.dtype, digest)
    for s, digest in zip(plan.segments, hashes, strict=True)
  ]
  return Staged(key, plan, buffers, hashes, fingerprint_of(rows))


def fill(
  plan: Plan,
  weights: Any,
  buffers: Mapping[tuple[int, int], np.ndarray],
  pool: concurrent.futures.Executor,
  complete: Callable[[int], None] = lambda number: None,
  together: Together | None = None,
) -> Mapping[str, np.ndarray]:
  """Writes what the shards of this process give, or all of it where it is alone.

  Args:
    complete: called with each plain segment that this process alone has filled.

  Returns the scales of everything quantised, by name. Raises as `stage`.
  """
  arrays = leaves(weights)
  sums = replica_sums(arrays)
  compare_replicas(sums)
  plain, to_quantize = _split(plan)
  left = collections.Counter(copy.segment for copy in plain)
  if together is not None:
    here = {s.device.id for leaf in arrays.values() for s in leaf.addressable_shards}
    plain = [copy for copy in plain if copy.src_rank in here]
    to_quantize = {
      name: [copy for copy in copies if copy.src_rank in here]
      for name, copies in to_quantize.items()
    }
  for name, group in itertools.groupby(plain, key=lambda copy: copy.src_name):
    copies = tuple(group)
    _copy_leaf(arrays[name], copies, plan.segments, buffers, pool)
    left.subtract(copy.segment for copy in copies)
    for number in {copy.segment for copy in copies}:
      if not left[number]:
        complete(number)
  scales = _fill_quantized(plan, to_quantize, arrays, buffers, together)
  if together is not None:
    together.written(sums)
  return scales


def replica_sums(arrays: Mapping[str, jax.Array]) -> Sums:
  """What tells whether shards that should be equal are, of those on this process.

  Each device adds up its own shard's bits, so only one number leaves it.
  """
  sums: dict[str, dict[int, jax.Array]] = {}
  for name, leaf in arrays.items():
    boxes = leaf.sharding.devices_indices_map(leaf.shape).values()
    held = collections.Counter(_box(index, leaf.shape) for index in boxes)
    for shard in leaf.addressable_shards:
      box = _box(shard.index, leaf.shape)
      if held[box] > 1:
        sums.setdefault(f"{name} {box}", {})[shard.device.id] = _bit_sum(shard.data)
  return {key: {d: int(bits) for d, bits in copies.items()} for key, copies in sums.items()}


def compare_replicas(sums: Sums) -> None:
  """Raises ValueError, naming tensor and device, unless shards that should be equal are: any of
  them may be sent.
  """
  for key, copies in sums.items():
    (first, want), *others = copies.items()
    for device, got in others:
      if got != want:
        name = key.partition(" ")[0]
        raise ValueError(f"{name}: the copy on device {device} differs from that on {first}")


def check_replicas(arrays: Mapping[str, jax.Array]) -> None:
  """As `compare_replicas`, of the shards on this process."""
  compare_replicas(replica_sums(arrays))


def tensor_hash(data: Any) -> str:
  """The first 16 bytes of SHA-256, hex, of anything with the buffer protocol; processors compute
  that by themselves, 2.3 times as fast as BLAKE2b.
  """
  return hashlib.sha256(data).hexdigest()[:32]


def fingerprint_of(
  rows: Iterable[tuple[int, str, tuple[int, int], tuple[int, ...], str, str]],
) -> str:
  """One hash over sorted (rank, name, part, shape, dtype, tensor hash)."""
  return hashlib.blake2b(repr(sorted(rows)).encode(), digest_size=16).hexdigest()


def segment_view(buffer: np.ndarray, segment: Segment) -> np.ndarray:
  """A segment's values as a view of its bucket."""
  return segment_bytes(buffer, segment).view(NUMPY_DTYPES[segment.dtype]).reshape(segment.shape)


def segment_bytes(buffer: np.ndarray, segment: Segment) -> np.ndarray:
  """A segment's bytes as a view of its bucket."""
  return buffer[segment.offset : segment.offset + segment.nbytes]


def _copy_leaf(
  leaf: jax.Array,
  copies: tuple[Copy, ...],
  segments: Sequence[Segment],
  buffers: Mapping[tuple[int, int], np.ndarray],
  pool: concurrent.futures.Executor,
) -> None:
  name = copies[0].src_name
  shards = {rank: _shard(leaf, rank, name) for rank in {copy.src_rank for copy in copies}}
  if jnp.issubdtype(leaf.dtype, jnp.floating):
    finite = [_all_finite(shard.data) for shard in shards.values()]
    if not all(map(bool, finite)):
      raise ValueError(f"{name} has a value that is not finite")

  def read(copy: Copy) -> tuple[int, str, tuple[int, ...]]:
    """The shard, and how its device lays it out: dropped axes first, then the target's order."""
    dropped = tuple(axis for axis in range(leaf.ndim) if axis not in copy.perm)
    return copy.src_rank, segments[copy.segment].dtype, dropped + copy.perm

  for (rank, dtype, order), group in itertools.groupby(sorted(copies, key=read), key=read):
    shard = shards[rank]
    host = np.asarray(_laid_out(shard.data, NUMPY_DTYPES[dtype], order))
    origin = [start for start, _ in _box(shard.index, leaf.shape)]

    def place(
      some: list[Copy],
      host: np.ndarray = host,
      origin: Sequence[int] = origin,
      order: tuple[int, ...] = order,
    ) -> None:
      for copy in some:
        box = [
          (start - o, stop - o) for (start, stop), o in zip(copy.src_index, origin, strict=True)
        ]
        found = host[slices(tuple(box[axis] for axis in order))]
        segment = segments[copy.segment]
        tile = segment_view(buffers[segment.rank, segment.bucket], segment)[slices(copy.tile)]
        dropped = found.ndim - len(copy.perm)
        tile.reshape(copy.view)[slices(copy.dst_index)] = found.reshape(found.shape[dropped:])

    every = list(group)
    list(pool.map(place, [every[i::_THREADS] for i in range(_THREADS)]))


def _laid_out(data: jax.Array, dtype: np.dtype, order: tuple[int, ...]) -> jax.Array:
  """Cast and transposed in one pass where it lies: a strided copy on the host is slower by far."""
  if data.dtype == dtype and order == tuple(range(data.ndim)):
    return data
  return _cast_transposed(data, dtype, order)


def _shard(leaf: jax.Array, rank: int, name: str) -> Any:
  for shard in leaf.addressable_shards:
    if shard.device.id == rank:
      return shard
  raise ValueError(f"{name}: device {rank} belongs to another process")


def _split(plan: Plan) -> tuple[list[Copy], dict[str, list[Copy]]]:
  """The copies of plain tensors, and those of each quantised tensor by its name."""
  plain, to_quantize = [], {}
  for copy in plan.copies:
    name = plan.segments[copy.segment].name
    (to_quantize.setdefault(name, []) if name in plan.quantized else plain).append(copy)
  return plain, to_quantize


def _by_name(segments: Iterable[Segment]) -> dict[str, list[Segment]]:
  out: dict[str, list[Segment]] = {}
  for segment in segments:
    out.setdefault(segment.name, []).append(segment)
  return out


class _Fragment(NamedTuple):
  """A box of a quantised tensor, from one shard, on that shard's device."""

  copy: Copy
  values: jax.Array
  inside: tuple[int, ...]  # where it begins in its first block
  blocks: Box  # that it meets


def _fill_quantized(
  plan: Plan,
  to_quantize: Mapping[str, Sequence[Copy]],
  arrays: Mapping[str, jax.Array],
  buffers: Mapping[tuple[int, int], np.ndarray],
  together: Together | None,
) -> Mapping[str, np.ndarray]:
  """Every quantised tensor: every fragment's amax, their maximum over fragments, then the bytes.
  Returns the scales by name.

  Where other processes hold fragments too, the amax of all tensors is agreed on at once, and
  fragments are made a second time rather than kept.
  """
  targets = _by_name(plan.segments) if to_quantize else {}
  shapes = {
    name: tuple(max(s.index[axis][1] for s in targets[name]) for axis in (0, 1))
    for name in to_quantize
  }
  agreed: Mapping[str, np.ndarray] = {}
  if together is not None and to_quantize:
    agreed = together.largest(
      {
        name: _amax(_fragments(plan, name, shapes[name], copies, arrays), plan, name, shapes[name])
        for name, copies in to_quantize.items()
      }
    )
  scales = {}
  for name, copies in to_quantize.items():
    how, shape = plan.quantized[name], shapes[name]
    fragments = _fragments(plan, name, shape, copies, arrays)
    amax = agreed[name] if together else _amax(fragments, plan, name, shape)
    if not np.isfinite(amax).all():
      source = next(c.src_name for c in plan.copies if plan.segments[c.segment].name == name)
      raise ValueError(f"{source} has a value that is not finite ({name})")
    made = np.asarray(scales_of(amax.reshape(grid(shape, how)), how))
    _write_quantized(plan, fragments, made, how, buffers)
    scales[scale_name(name, how)] = made
  return scales


def _fragments(
  plan: Plan,
  name: str,
  shape: Sequence[int],
  copies: Sequence[Copy],
  arrays: Mapping[str, jax.Array],
) -> list[_Fragment]:
  """Devices work at the same time: nothing is waited for."""
  block = plan.quantized[name].block or shape
  made = []
  for copy in copies:
    leaf = arrays[copy.src_name]
    shard = _shard(leaf, copy.src_rank, copy.src_name)
    box = _published_box(copy, plan.segments[copy.segment])
    inside = tuple(start % size for (start, _), size in zip(box, block, strict=True))
    start = [
      at - begin
      for (at, _), (begin, _) in zip(copy.src_index, _box(shard.index, leaf.shape), strict=True)
    ]
    values = _fragment(shard.data, start, extents(copy.src_index), copy.perm)
    blocks = tuple((a // size, -(-b // size)) for (a, b), size in zip(box, block, strict=True))
    made.append(_Fragment(copy, values, inside, blocks))
  return made


def _amax(
  fragments: Sequence[_Fragment], plan: Plan, name: str, shape: Sequence[int]
) -> np.ndarray:
  """The largest magnitude in each block, over these fragments."""
  how = plan.quantized[name]
  parts = [block_amax(fragment.values, how, fragment.inside) for fragment in fragments]
  amax = np.zeros(grid(shape, how) or (1, 1), np.float32)
  for fragment, part in zip(fragments, parts, strict=True):
    place = amax[slices(fragment.blocks)]
    np.maximum(place, np.asarray(part), out=place)
  return amax


def _write_quantized(
  plan: Plan,
  fragments: Sequence[_Fragment],
  scales: np.ndarray,
  how: Quantization,
  buffers: Mapping[tuple[int, int], np.ndarray],
) -> None:
  coded = [
    quantize_with(values, scales[slices(blocks)] if how.block else scales, how, inside)
    for _, values, inside, blocks in fragments
  ]
  for fragment, part in zip(fragments, coded, strict=True):
    copy = fragment.copy
    segment = plan.segments[copy.segment]
    tile = segment_view(buffers[segment.rank, segment.bucket], segment)[slices(copy.tile)]
    tile[slices(copy.dst_index)] = np.asarray(part)


def _published_box(copy: Copy, segment: Segment) -> tuple[tuple[int, int], ...]:
  """Where a copy into a tensor that is its own view lies in the published tensor."""
  return tuple(
    (begin + tile + start, begin + tile + stop)
    for (begin, _), (tile, _), (start, stop) in zip(
      segment.index, copy.tile, copy.dst_index, strict=True
    )
  )


@functools.partial(jax.jit, static_argnames=("size", "perm"))
def _fragment(data: jax.Array, start: Sequence[int], size: tuple[int, ...], perm: tuple[int, ...]):
  """A box of a shard in bfloat16, axes in the order `perm`; layers differ by `start` only."""
  box = jax.lax.dynamic_slice(data, start, size).astype(jnp.bfloat16)
  rest = tuple(axis for axis in range(len(size)) if axis not in perm)
  return box.transpose(rest + perm).reshape([size[axis] for axis in perm])


@functools.partial(jax.jit, static_argnames=("dtype", "order"))
def _cast_transposed(data: jax.Array, dtype: np.dtype, order: tuple[int, ...]) -> jax.Array:
  return data.astype(dtype).transpose(order)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@jax.jit
def _bit_sum(data: jax.Array) -> jax.Array:
  """The sum of all elements' bits, each weighted by its place so that swaps show."""
  width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[data.dtype.itemsize]
  bits = data if data.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(data, width)
  flat = bits.reshape(-1).astype(jnp.uint32)
  place = jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(2) + jnp.uint32(1)
  return (flat * place).sum(dtype=jnp.uint32)


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
  return jnp.isfinite(leaf).all()
