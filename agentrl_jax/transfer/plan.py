"""The routing plan: which box of which source shard goes where, as a pure function of layouts.

Every destination element is written exactly once. The plan holds no values and no device handles:
it is made once, hashed, and used until a layout changes; two sides that exchange layouts compute
the same digest.
"""

import bisect
import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from agentrl_jax.transfer.layout import Assembly, Box, check, extents, full, intersect

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1, "bool": 1}
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
  """Copies sorted by source tensor; segments sorted by (rank, name, part)."""

  segments: tuple[Segment, ...]
  copies: tuple[Copy, ...]
  buckets: tuple[Bucket, ...]
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
  Raises:
    ValueError: naming the tensor: no assembly, no source, repeated, other shape, overlapping or
      incomplete shards, a dtype that cannot be converted.
  """
  if bucket_bytes < 1 or align < 1:
    raise ValueError(f"bucket_bytes is {bucket_bytes} and align {align}, expected at least 1")
  sources = _by_name(source, "source")
  targets = _by_name(target, "target")
  made_by = _by_name(assemblies, "assembly", key="dst")
  _check_names(sources, targets, made_by, drop)
  shapes = {name: tensor.shape for name, tensor in sources.items()}
  grids = {name: _Grid(tensor) for name, tensor in sources.items()}
  packer = _Packer(bucket_bytes, align, split)
  pieces = {}
  for name, tensor in targets.items():
    check(made_by[name], shapes)
    _check_target(tensor, made_by[name], sources)
    pieces[name] = _Boxes([piece.dst_box for piece in made_by[name].pieces])
  placed = sorted(
    (shard.rank, name, shard.index) for name, tensor in targets.items() for shard in tensor.shards
  )
  segments = [
    segment
    for rank, name, index in placed
    for segment in packer.place(targets[name], Shard(rank, index))
  ]
  sent: dict[int, int] = {}
  copies = []
  for number, segment in enumerate(segments):
    assembly = made_by[segment.name]
    copies += _copies(number, segment, assembly, pieces[segment.name], grids, sent)
  copies.sort()
  buckets = tuple(Bucket(*key, nbytes) for key, nbytes in sorted(packer.sizes.items()))
  digest = hashlib.blake2b(repr((segments, copies, buckets)).encode(), digest_size=16).hexdigest()
  return Plan(tuple(segments), tuple(copies), buckets, digest)


def whole(
  assemblies: Iterable[Assembly], dtype: str, ranks: Sequence[int] = (0,)
) -> tuple[Tensor, ...]:
  """The target layout of receivers that take every published tensor in full and slice it
  themselves.
  """
  return tuple(
    Tensor(r.dst, r.shape, dtype, tuple(Shard(rank, full(r.shape)) for rank in ranks))
    for r in assemblies
  )


def _copies(number, segment, assembly, pieces, grids, sent) -> Iterator[Copy]:
  item = ITEM_BYTES[segment.dtype]
  for tile, box in _tiles(segment.index, assembly.shape, assembly.view):
    local = tuple(
      (a - start, b - start) for (a, b), (start, _) in zip(tile, segment.index, strict=True)
    )
    for chosen in pieces.meeting(box):
      piece = assembly.pieces[chosen]
      common = intersect(box, piece.dst_box)
      if common is None:
        continue
      for cell, ranks in grids[piece.src].meeting(_pull_back(piece, common)):
        nbytes = item * math.prod(extents(cell))
        rank = min(ranks, key=lambda r: (sent.get(r, 0), r))
        sent[rank] = sent.get(rank, 0) + nbytes
        index = tuple(
          (a - start, b - start) for (a, b), (start, _) in zip(_push(piece, cell), box, strict=True)
        )
        yield Copy(piece.src, rank, cell, piece.perm, number, local, extents(box), index, nbytes)


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


class _Grid:
  """A source tensor's shards as cells of a rectangular grid, found by bisection on each axis."""

  def __init__(self, tensor: Tensor):
    self.bounds: list[list[tuple[int, int]]] = []
    if 0 in tensor.shape:  # nothing will be asked for
      return
    for axis, length in enumerate(tensor.shape):
      intervals = sorted({shard.index[axis] for shard in tensor.shards})
      position = 0
      for start, stop in intervals:
        if start != position or stop <= start:
          found = "overlap" if start < position else "leave a gap"
          raise ValueError(f"{tensor.name}: source shards {found} at {start} on axis {axis}")
        position = stop
      if position != length:
        raise ValueError(f"{tensor.name}: source shards end at {position} of {length}, axis {axis}")
      self.bounds.append(intervals)
    self.starts = [[start for start, _ in intervals] for intervals in self.bounds]
    self.cells: dict[Box, list[int]] = {}
    for shard in tensor.shards:
      self.cells.setdefault(shard.index, []).append(shard.rank)
    for cell in itertools.product(*self.bounds):
      if cell not in self.cells:
        raise ValueError(f"{tensor.name}: no rank holds {cell}")

  def meeting(self, box: Box) -> Iterator[tuple[Box, list[int]]]:
    """The parts of `box` by cell, with the ranks that hold them."""
    hits = []
    for (start, stop), starts, intervals in zip(box, self.starts, self.bounds, strict=True):
      first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, stop)
      hits.append(intervals[max(first, 0) : last])
    for cell in itertools.product(*hits):
      common = intersect(box, cell)
      if common is not None:
        yield common, self.cells[cell]


class _Boxes:
  """Disjoint boxes, sorted on the axis that tells most of them apart."""

  def __init__(self, boxes: Sequence[Box]):
    rank = len(boxes[0])
    self.axis = max(range(rank), key=lambda a: len({box[a][0] for box in boxes}), default=-1)
    if self.axis < 0:  # scalars
      self.order = list(range(len(boxes)))
      return
    axis = self.axis
    self.order = sorted(range(len(boxes)), key=lambda i: boxes[i][axis])
    self.starts = [boxes[i][axis][0] for i in self.order]
    self.longest = max(boxes[i][axis][1] - boxes[i][axis][0] for i in self.order)

  def meeting(self, box: Box) -> list[int]:
    """Indices of boxes that may meet `box`."""
    if self.axis < 0:
      return self.order
    start, stop = box[self.axis]
    first = bisect.bisect_left(self.starts, start - self.longest + 1)
    return self.order[first : bisect.bisect_left(self.starts, stop)]


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


def _tiles(index: Box, shape: tuple[int, ...], view: tuple[int, ...]) -> Iterator[tuple[Box, Box]]:
  """Cuts a box of a published tensor into boxes of its view: pairs (published box, view box)."""
  if not all(extents(index)):
    return
  cuts = [
    _cut(start, stop, factors)
    for (start, stop), factors in zip(index, _factors(shape, view), strict=True)
  ]
  for tile in itertools.product(*cuts):
    yield tuple(span for span, _ in tile), tuple(itertools.chain.from_iterable(b for _, b in tile))


def _factors(shape: tuple[int, ...], view: tuple[int, ...]) -> list[tuple[int, ...]]:
  """The axes of the view that each published axis was split into."""
  groups, at = [], 0
  for length in shape:
    start, product = at, 1
    while at < len(view) and (product < length or (at == start and view[at] == 1)):
      product *= view[at]
      at += 1
    if product != length:
      raise ValueError(f"view {view} does not split the axes of shape {shape}")
    groups.append(view[start:at])
  if view[at:] and groups:
    groups[-1] += view[at:]
  return groups


def _cut(start: int, stop: int, factors: tuple[int, ...]) -> list[tuple[tuple[int, int], Box]]:
  """A range of a merged axis as boxes of its factors; at most three for each level of nesting."""
  if not factors:
    return [((start, stop), ())]
  inner = math.prod(factors[1:])
  spans, at = [], start
  while at < stop:
    row = at // inner
    whole_rows = at % inner == 0 and stop - at >= inner
    end = stop - stop % inner if whole_rows else min(stop, (row + 1) * inner)
    if whole_rows:
      spans.append(((at, end), ((row, end // inner), *full(factors[1:]))))
    else:
      base = row * inner
      for (a, b), box in _cut(at - base, end - base, factors[1:]):
        spans.append(((a + base, b + base), ((row, row + 1), *box)))
    at = end
  return spans


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


def _check_target(tensor: Tensor, assembly: Assembly, sources: dict[str, Tensor]) -> None:
  if tensor.shape != assembly.shape:
    raise ValueError(
      f"{tensor.name}: target has shape {tensor.shape}, its assembly {assembly.shape}"
    )
  if tensor.dtype not in ITEM_BYTES:
    raise ValueError(f"{tensor.name}: unknown dtype {tensor.dtype}")
  for name in {piece.src for piece in assembly.pieces}:
    dtype = sources[name].dtype
    if dtype != tensor.dtype and not {dtype, tensor.dtype} <= _FLOATS:
      raise ValueError(f"{tensor.name}: {dtype} of {name} does not convert to {tensor.dtype}")
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
