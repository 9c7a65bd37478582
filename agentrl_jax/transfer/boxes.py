"""Boxes found by bisection, so that planning costs as much as there is to copy, and boxes of merged
axes.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from agentrl_jax.transfer.layout import Box, extents, full, intersect


class Grid:
  """A source tensor's shards as cells of a rectangular grid, found by bisection on each axis."""

  def __init__(self, name: str, shape: Sequence[int], shards: Iterable[tuple[int, Box]]):
    self.bounds: list[list[tuple[int, int]]] = []
    shards = list(shards)
    if 0 in shape:  # nothing will be asked for
      return
    for axis, length in enumerate(shape):
      intervals = sorted({index[axis] for _, index in shards})
      position = 0
      for start, stop in intervals:
        if start != position or stop <= start:
          found = "overlap" if start < position else "leave a gap"
          raise ValueError(f"{name}: source shards {found} at {start} on axis {axis}")
        position = stop
      if position != length:
        raise ValueError(f"{name}: source shards end at {position} of {length}, axis {axis}")
      self.bounds.append(intervals)
    self.starts = [[start for start, _ in intervals] for intervals in self.bounds]
    self.cells: dict[Box, list[int]] = {}
    for rank, index in shards:
      self.cells.setdefault(index, []).append(rank)
    for cell in itertools.product(*self.bounds):
      if cell not in self.cells:
        raise ValueError(f"{name}: no rank holds {cell}")

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


class Boxes:
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


def tiles(index: Box, shape: tuple[int, ...], view: tuple[int, ...]) -> Iterator[tuple[Box, Box]]:
  """Cuts a box of a published tensor into boxes of its view: pairs (published box, view box)."""
  if not all(extents(index)):
    return
  cuts = [
    _cut(start, stop, factors)
    for (start, stop), factors in zip(index, _factors(shape, view), strict=True)
  ]
  for tile in itertools.product(*cuts):
    yield tuple(span for span, _ in tile), tuple(itertools.chain.from_iterable(b for _, b in tile))


def merged(box: Box, shape: tuple[int, ...], view: tuple[int, ...]) -> Box:
  """A box of a published tensor's view as one of the tensor. Raises ValueError if it is none."""
  out, at = [], 0
  for factors in _factors(shape, view):
    spans = box[at : at + len(factors)]
    at += len(factors)
    long = [i for i, (start, stop) in enumerate(spans) if stop - start > 1]
    if long and any(
      span != (0, n) for span, n in zip(spans[long[0] + 1 :], factors[long[0] + 1 :], strict=True)
    ):
      raise ValueError(f"{box} of the view {view} is no box of the shape {shape}")
    start = 0
    for (first, _), n in zip(spans, factors, strict=True):
      start = start * n + first
    out.append((start, start + math.prod(extents(spans))))
  return tuple(out)


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
