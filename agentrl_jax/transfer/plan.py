"""The routing plan: which box of which source shard goes where, as a pure function of layouts.

Every destination element is written exactly once. The plan holds no values and no device handles:
it is made once, hashed, and used until a layout changes; two sides that exchange layouts compute
the same digest.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from agentrl_jax.ops.quantize import Quantization, grid
from agentrl_jax.ops.quantize import check as check_quantization
from agentrl_jax.transfer.boxes import Boxes, Grid, merged, tiles
from agentrl_jax.transfer.layout import Assembly, Box, check, extents, full, intersect

ITEM_BYTES = {
  "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1, "bool": 1,
  "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
}  # fmt: skip
MAX_NAME_BYTES = 500  # of a tensor, as JSON has it: so many tensors as a frame tells fit into one
_FLOATS = frozenset({"float32", "bfloat16", "float16"})


class Shard(NamedTuple):
  """What one rank holds of a tensor, in global coordinates."""

  rank: int
  index: Box


class Tensor(NamedTuple):
  """A tensor's layout on one side. Replicated shards share an index."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  shards: tuple[Shard, ...]


class Segment(NamedTuple):
  """A run of bytes in a bucket: (part of) what one rank receives of one tensor, row-major."""

  name: str
  rank: int
  part: tuple[int, int]  # k of n, along the first axis
  dtype: str
  shape: tuple[int, ...]
  index: Box  # in the published tensor
  bucket: int  # counted per rank
  offset: int
  nbytes: int


class Copy(NamedTuple):
  """permute(source[src_index]) is written to segment[tile] viewed as `view`, at `dst_index`."""

  src_name: str
  src_rank: int
  src_index: Box  # global source coordinates, inside the rank's shard
  perm: tuple[int, ...]  # source axis of each axis of the view; left-out axes have extent one
  segment: int
  tile: Box  # in the segment
  view: tuple[int, ...]
  dst_index: Box  # in the tile's view
  nbytes: int  # at the destination


class Bucket(NamedTuple):
  """The bytes one rank receives at once."""

  rank: int
  index: int
  nbytes: int


class Plan(NamedTuple):
  """Copies sorted by source tensor; segments sorted by (rank, name, part).

  Copies into a tensor that is `quantized` are of its values before; its scales are segments that
  no copy writes, as they are computed.
  """

  segments: tuple[Segment, ...]
  copies: tuple[Copy, ...]
  buckets: tuple[Bucket, ...]
  quantized: Mapping[str, Quantization]  # by published name; `scale_name` names its scales
  digest: str

  @property
  def nbytes(self) -> int:
    """Payload bytes over all destination ranks."""
    return sum(segment.nbytes for segment in self.segments)


def plan(
  source: Iterable[Tensor],
  target: Iterable[Tensor],
  assemblies: Iterable[Assembly],
  *,
  bucket_bytes: int,
  align: int = 16,
  split: bool = True,
  drop: Collection[str] = (),
  quantized: Mapping[str, Quantization] | None = None,
) -> Plan:
  """Plans every copy from `source` layouts to `target` layouts.

  Cost is proportional to the number of copies. Of replicated source shards the one with the fewest
  bytes assigned so far sends, ties to the lowest rank.

  Args:
    source, target: layouts, in any order; names are unique on each side.
    assemblies: one for each target tensor.
    bucket_bytes: most bytes of a bucket. A larger segment is split along its first axis into parts,
      or has a bucket of its own when `split` is False (receivers that need whole tensors).
    align: every offset is a multiple of it.
    drop: source tensors that are deliberately not sent.
    quantized: how to make the targets whose dtype is an FP8 one. Their scales become targets, too.
  Raises:
    ValueError: naming the tensor: a name too long, no assembly, no source, repeated, other shape,
      overlapping or incomplete shards, a dtype that cannot be converted, a shard that cuts a block.
  """
  if bucket_bytes < 1 or align < 1:
    raise ValueError(f"bucket_bytes is {bucket_bytes} and align {align}, expected at least 1")
  sources = _by_name(source, "source")
  targets = _by_name(target, "target")
  made_by = _by_name(assemblies, "assembly", key="dst")
  _check_names(sources, targets, made_by, drop)
  shapes = {name: tensor.shape for name, tensor in sources.items()}
  grids = {name: Grid(name, tensor.shape, tensor.shards) for name, tensor in sources.items()}
  packer = _Packer(bucket_bytes, align, split)
  quantized = dict(sorted((quantized or {}).items()))
  pieces = {}
  for name, tensor in targets.items():
    check(made_by[name], shapes)
    _check_target(tensor, made_by[name])
    _check_dtype(tensor, made_by[name], sources, quantized.get(name))
    pieces[name] = Boxes([piece.dst_box for piece in made_by[name].pieces])
  scales = [_scales(targets[name], how) for name, how in quantized.items()]
  targets |= _by_name([*targets.values(), *scales], "target")
  for name in targets:
    if len(json.dumps(name)) > MAX_NAME_BYTES:
      raise ValueError(
        f"target tensor {name[:100]}...: its name has {len(json.dumps(name))} bytes as JSON, at "
        f"most {MAX_NAME_BYTES} are sent"
      )
  placed = sorted(
    (shard.rank, name, shard.index) for name, tensor in targets.items() for shard in tensor.shards
  )
  segments = [
    segment
    for rank, name, index in placed
    for segment in packer.place(targets[name], Shard(rank, index))
  ]
  sent: dict[int, int] = {}
  copies: list[Copy] = []
  routes: dict[tuple[str, Box], list[_Route]] = {}  # replicas ask for the same boxes
  for number, segment in enumerate(segments):
    key = (segment.name, segment.index)
    if segment.name not in made_by:  # computed scales
      continue
    if key not in routes:
      routes[key] = list(_routes(segment, made_by[segment.name], pieces[segment.name], grids))
    copies += _copies(number, routes[key], sent)
  return _finished(segments, sorted(copies), packer, quantized)


def _finished(
  segments: Sequence[Segment],
  copies: Sequence[Copy],
  packer: "_Packer",
  quantized: Mapping[str, Quantization],
) -> Plan:
  buckets = tuple(Bucket(*key, nbytes) for key, nbytes in sorted(packer.sizes.items()))
  text = json.dumps((segments, copies, buckets, quantized), separators=(",", ":"))
  digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
  return Plan(tuple(segments), tuple(copies), buckets, quantized, digest)


def in_parts(
  plan: Plan,
  sender: Mapping[int, int],
  shapes: Mapping[str, tuple[int, ...]],
  *,
  bucket_bytes: int,
  align: int,
) -> tuple[Plan, tuple[int, ...]]:
  """The same copies, each into a segment of its own: a box of its tensor, in its sender's bucket.

  Args:
    plan: to whole tensors.
    sender: the process of each source rank.
    shapes: of the published tensors.

  Returns the plan, and the process of each of its buckets. What no copy writes, such as scales, is
  the first process's.
  Raises ValueError, naming the tensor, where what a shard gives is no box of it.
  """
  made: list[tuple[int, str, int, Box, Copy | None]] = []
  given: dict[int, int] = {}
  for copy in plan.copies:
    segment = plan.segments[copy.segment]
    if segment.part != (0, 1) or copy.tile != segment.index:
      raise ValueError(f"{segment.name}: {segment.part} of it is planned, expected all")
    try:
      box = merged(copy.dst_index, shapes[segment.name], copy.view)
    except ValueError as error:
      raise ValueError(f"{segment.name}: {error}") from error
    number = given.get(copy.segment, 0)
    given[copy.segment] = number + 1
    made.append((sender[copy.src_rank], segment.name, number, box, copy))
  made += [
    (0, segment.name, 0, segment.index, None)
    for number, segment in enumerate(plan.segments)
    if number not in given
  ]
  made.sort(key=lambda row: row[:3])
  count = {plan.segments[number].name: n for number, n in given.items()}
  dtypes = {segment.name: segment.dtype for segment in plan.segments}
  packer = _Packer(bucket_bytes, align, split=False)
  segments: list[Segment] = []
  copies: list[Copy] = []
  owners: list[int] = []
  for process, name, number, box, copy in made:
    if owners and owners[-1] != process:
      packer.open[0] += 1
    (segment,) = packer.place(Tensor(name, shapes[name], dtypes[name], ()), Shard(0, box))
    owners += [process] * (segment.bucket + 1 - len(owners))
    if copy is not None:
      size = extents(copy.dst_index)
      tile = full(extents(box))
      copies.append(
        copy._replace(segment=len(segments), tile=tile, view=size, dst_index=full(size))
      )
    segments.append(segment._replace(part=(number, count.get(name, 1))))
  return _finished(segments, sorted(copies), packer, plan.quantized), tuple(owners)


def whole(
  assemblies: Iterable[Assembly],
  dtype: str,
  ranks: Sequence[int] = (0,),
  quantized: Mapping[str, Quantization] | None = None,
) -> tuple[Tensor, ...]:
  """The target layout of receivers that take every published tensor in full and slice it
  themselves: `dtype`, or what it is quantised to.
  """
  target = (Tensor(r.dst, r.shape, dtype, _in_full(r.shape, ranks)) for r in assemblies)
  return with_dtypes(target, quantized or {})


def published_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
  """Of every tensor, whole or in parts."""
  shapes: dict[str, tuple[int, ...]] = {}
  for segment in plan.segments:
    stops = tuple(stop for _, stop in segment.index)
    shapes[segment.name] = tuple(map(max, stops, shapes.get(segment.name, stops)))
  return shapes


def scale_name(name: str, how: Quantization) -> str:
  """The checkpoint's name for the scales of `name`: of blocks "_scale_inv", of a tensor "_scale"
  (both multiply).
  """
  return f"{name}_scale" if how.block is None else f"{name}_scale_inv"


def with_dtypes(
  target: Iterable[Tensor], quantized: Mapping[str, Quantization]
) -> tuple[Tensor, ...]:
  """The target with the dtype of what is quantised."""
  return tuple(
    tensor._replace(dtype=quantized[tensor.name].dtype) if tensor.name in quantized else tensor
    for tensor in target
  )


def _in_full(shape: tuple[int, ...], ranks: Sequence[int]) -> tuple[Shard, ...]:
  return tuple(Shard(rank, full(shape)) for rank in ranks)


class _Route(NamedTuple):
  """A copy before its sender and its segment are chosen."""

  src: str
  cell: Box
  ranks: Sequence[int]  # that hold it
  perm: tuple[int, ...]
  tile: Box
  view: tuple[int, ...]
  index: Box
  nbytes: int


def _routes(segment: Segment, assembly: Assembly, pieces: Boxes, grids) -> Iterator[_Route]:
  item = ITEM_BYTES[segment.dtype]
  for tile, box in tiles(segment.index, assembly.shape, assembly.view):
    local = tuple(
      (a - start, b - start) for (a, b), (start, _) in zip(tile, segment.index, strict=True)
    )
    view = extents(box)
    for chosen in pieces.meeting(box):
      piece = assembly.pieces[chosen]
      common = intersect(box, piece.dst_box)
      if common is None:
        continue
      for cell, ranks in grids[piece.src].meeting(_pull_back(piece, common)):
        nbytes = item * math.prod(extents(cell))
        index = tuple(
          (a - start, b - start) for (a, b), (start, _) in zip(_push(piece, cell), box, strict=True)
        )
        yield _Route(piece.src, cell, ranks, piece.perm, local, view, index, nbytes)


def _copies(number: int, routes: Iterable[_Route], sent: dict[int, int]) -> Iterator[Copy]:
  """Chooses the sender of each route: the holder with the fewest bytes so far, then the lowest."""
  for src, cell, ranks, perm, tile, view, index, nbytes in routes:
    rank = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda r: (sent.get(r, 0), r))
    sent[rank] = sent.get(rank, 0) + nbytes
    yield Copy(src, rank, cell, perm, number, tile, view, index, nbytes)


def _pull_back(piece, box: Box) -> Box:
  out = list(piece.src_box)
  for axis, (start, stop), (origin, _) in zip(piece.perm, box, piece.dst_box, strict=True):
    shift = piece.src_box[axis][0] - origin
    out[axis] = (start + shift, stop + shift)
  return tuple(out)


def _push(piece, cell: Box) -> Box:
  return tuple(
    (
      cell[axis][0] + origin - piece.src_box[axis][0],
      cell[axis][1] + origin - piece.src_box[axis][0],
    )
    for axis, (origin, _) in zip(piece.perm, piece.dst_box, strict=True)
  )


class _Packer:
  """Assigns aligned offsets in the buckets of each rank."""

  def __init__(self, bucket_bytes: int, align: int, split: bool):
    self.bucket_bytes, self.align, self.split = bucket_bytes, align, split
    self.sizes: dict[tuple[int, int], int] = {}
    self.open: dict[int, int] = {}

  def place(self, tensor: Tensor, shard: Shard) -> Iterator[Segment]:
    parts = self._parts(tensor, shard.index)
    for k, index in enumerate(parts):
      shape = extents(index)
      nbytes = ITEM_BYTES[tensor.dtype] * math.prod(shape)
      bucket = self.open.setdefault(shard.rank, 0)
      offset = -(-self.sizes.get((shard.rank, bucket), 0) // self.align) * self.align
      if offset and offset + nbytes > self.bucket_bytes:
        bucket, offset = bucket + 1, 0
        self.open[shard.rank] = bucket
      self.sizes[shard.rank, bucket] = offset + nbytes
      yield Segment(
        tensor.name, shard.rank, (k, len(parts)), tensor.dtype, shape, index, bucket, offset, nbytes
      )

  def _parts(self, tensor: Tensor, index: Box) -> list[Box]:
    shape = extents(index)
    nbytes = ITEM_BYTES[tensor.dtype] * math.prod(shape)
    if nbytes <= self.bucket_bytes or not self.split:
      return [index]
    row = nbytes // shape[0] if shape else nbytes
    if row > self.bucket_bytes:
      raise ValueError(
        f"{tensor.name}: one row is {row} bytes, more than a bucket of {self.bucket_bytes}"
      )
    (start, stop), rest = index[0], index[1:]
    rows = self.bucket_bytes // row
    return [((a, min(a + rows, stop)), *rest) for a in range(start, stop, rows)]


def _by_name(items, what: str, key: str = "name") -> dict:
  out = {}
  for item in items:
    name = getattr(item, key)
    if name in out:
      raise ValueError(f"{name} is repeated among the {what} tensors")
    out[name] = item
  return dict(sorted(out.items()))


def _check_names(sources, targets, assemblies, drop) -> None:
  for name in targets:
    if name not in assemblies:
      raise ValueError(f"target tensor {name} has no assembly that makes it")
  for name in assemblies:
    if name not in targets:
      raise ValueError(f"assembly for {name}: the target has no such tensor")
  used = {piece.src for assembly in assemblies.values() for piece in assembly.pieces}
  for name in sources:
    if name not in used and name not in drop:
      raise ValueError(f"source tensor {name} is in no assembly and not dropped")
    if name in used and name in drop:
      raise ValueError(f"source tensor {name} is dropped, but a assembly reads it")


def _check_dtype(
  tensor: Tensor, assembly: Assembly, sources: dict[str, Tensor], how: Quantization | None
) -> None:
  if tensor.dtype not in ITEM_BYTES:
    raise ValueError(f"{tensor.name}: unknown dtype {tensor.dtype}")
  wanted = tensor.dtype
  if how is not None:
    if (len(tensor.shape), assembly.view, how.dtype) != (2, tensor.shape, wanted):
      raise ValueError(
        f"{tensor.name}: {wanted} of shape {tensor.shape}, view {assembly.view}, is not quantised "
        f"to {how.dtype}: expected a matrix of that dtype, as it is stored"
      )
    wanted = "bfloat16"  # what is quantised
  for name in {piece.src for piece in assembly.pieces}:
    dtype = sources[name].dtype
    if dtype != wanted and not {dtype, wanted} <= _FLOATS:
      raise ValueError(f"{tensor.name}: {dtype} of {name} does not convert to {tensor.dtype}")


def _scales(tensor: Tensor, how: Quantization) -> Tensor:
  """The scales of a quantised tensor, cut as it is."""
  name, shape = scale_name(tensor.name, how), grid(tensor.shape, check_quantization(how))
  return Tensor(
    name, shape, "float32", tuple(Shard(r, _blocks(tensor, i, how)) for r, i in tensor.shards)
  )


def _blocks(tensor: Tensor, index: Box, how: Quantization) -> Box:
  if how.block is None:
    return ()
  out = []
  for (start, stop), size, block in zip(index, tensor.shape, how.block, strict=True):
    if start % block or (stop % block and stop != size):
      raise ValueError(f"{tensor.name}: shard {index} cuts a block of {how.block}")
    out.append((start // block, -(-stop // block)))
  return tuple(out)


def _check_target(tensor: Tensor, assembly: Assembly) -> None:
  if tensor.shape != assembly.shape:
    raise ValueError(
      f"{tensor.name}: target has shape {tensor.shape}, its assembly {assembly.shape}"
    )
  by_rank: dict[int, list[Box]] = {}
  for rank, index in tensor.shards:
    if len(index) != len(tensor.shape) or any(
      not 0 <= start <= stop <= n for (start, stop), n in zip(index, tensor.shape, strict=True)
    ):
      raise ValueError(f"{tensor.name}: shard {index} is outside shape {tensor.shape}")
    for other in by_rank.setdefault(rank, []):
      if other == index or intersect(index, other) is not None:
        raise ValueError(f"{tensor.name}: rank {rank} has overlapping shards {other} and {index}")
    by_rank[rank].append(index)
