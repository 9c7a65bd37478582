"""Name and layout maps as data: where each element of a published tensor lives in our weight tree.

Everything is a hyperrectangle map: rename, transpose, slice, fuse along an axis, unstack layers or
experts, tie (one source, several rules). There are no callables, so a rule can be printed, inverted and
planned over.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Box = tuple[tuple[int, int], ...]  # half-open [start, stop) on each axis


class Piece(NamedTuple):
  """A box of one source tensor that becomes a box of the destination's view.

  Axis i of the view is source axis `perm[i]`; a source axis that `perm` leaves out (the stacked layer,
  the expert) has extent one in `src_box`.
  """

  src: str  # path in the weight tree, "layers.attention.query"
  perm: tuple[int, ...]
  src_box: Box
  dst_box: Box


class Rule(NamedTuple):
  """How one published tensor is made.

  `view` is `shape` with axes split (same elements in row-major order) so that every piece is a box: a
  [heads * head_dim, embed] matrix has the view [heads, head_dim, embed].
  """

  dst: str  # published name, "model.layers.3.self_attn.q_proj.weight"
  shape: tuple[int, ...]
  view: tuple[int, ...]
  pieces: tuple[Piece, ...]


def full(shape: Sequence[int]) -> Box:
  """The box that covers all of `shape`."""
  return tuple((0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
  """Length of each axis of a box."""
  return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
  """The box as an index."""
  return tuple(slice(start, stop) for start, stop in box)


def rule(
  dst: str,
  src: str,
  src_shape: Sequence[int],
  *,
  index: Sequence[int] = (),
  perm: Sequence[int] | None = None,
  shape: Sequence[int] | None = None,
) -> Rule:
  """One published tensor from one source: `src[index]`, transposed by `perm`, axes merged to `shape`.

  `perm` counts the axes that are left after `index` (identity if None), `shape` is the published shape
  (that of the transposed source if None).
  """
  lead = len(index)
  perm = tuple(range(len(src_shape) - lead)) if perm is None else tuple(perm)
  view = tuple(src_shape[lead + axis] for axis in perm)
  src_box = tuple((i, i + 1) for i in index) + full(src_shape[lead:])
  piece = Piece(src, tuple(lead + axis for axis in perm), src_box, full(view))
  made = Rule(dst, view if shape is None else tuple(shape), view, (piece,))
  check(made, {src: tuple(src_shape)})
  return made


def check(rule: Rule, sources: Mapping[str, tuple[int, ...]]) -> None:
  """Raises ValueError, naming the tensor, unless real sources cover the view exactly once."""
  if math.prod(rule.shape) != math.prod(rule.view):
    raise ValueError(
      f"{rule.dst}: view {rule.view} does not have the elements of shape {rule.shape}"
    )
  for piece in rule.pieces:
    if piece.src not in sources:
      raise ValueError(f"{rule.dst}: its source {piece.src} is not in the weight tree")
    shape = sources[piece.src]
    if not _inside(piece.src_box, shape):
      raise ValueError(f"{rule.dst}: box {piece.src_box} is outside {piece.src} of shape {shape}")
    if not _inside(piece.dst_box, rule.view):
      raise ValueError(f"{rule.dst}: box {piece.dst_box} is outside its view {rule.view}")
    size = extents(piece.src_box)
    if tuple(size[axis] for axis in piece.perm) != extents(piece.dst_box) or any(
      size[axis] != 1 for axis in set(range(len(shape))) - set(piece.perm)
    ):
      raise ValueError(
        f"{rule.dst}: {piece.src}{piece.src_box} permuted by {piece.perm} does not fit "
        f"{piece.dst_box}"
      )
  boxes = [piece.dst_box for piece in rule.pieces]
  for i, box in enumerate(boxes):
    for other in boxes[:i]:
      if intersect(box, other) is not None:
        raise ValueError(f"{rule.dst}: pieces {other} and {box} overlap")
  covered = sum(math.prod(extents(box)) for box in boxes)
  if covered != math.prod(rule.view):
    raise ValueError(f"{rule.dst}: {covered} of its {math.prod(rule.view)} elements have a source")


def intersect(a: Box, b: Box) -> Box | None:
  """The common box, or None if it is empty."""
  out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
  return out if all(start < stop for start, stop in out) else None


def apply(rule: Rule, weights: Mapping[str, np.ndarray]) -> np.ndarray:
  """The published tensor, from whole source arrays keyed by tree path."""
  dtype = weights[rule.pieces[0].src].dtype
  out = np.empty(rule.view, dtype)
  for piece in rule.pieces:
    out[slices(piece.dst_box)] = _permuted(weights[piece.src][slices(piece.src_box)], piece.perm)
  return out.reshape(rule.shape)


def invert(rule: Rule, published: np.ndarray, weights: Mapping[str, np.ndarray]) -> None:
  """Writes a published tensor back into the source arrays (in place): the inverse of `apply`."""
  if published.shape != rule.shape:
    raise ValueError(f"{rule.dst} has shape {published.shape}, expected {rule.shape}")
  view = published.reshape(rule.view)
  for piece in rule.pieces:
    part = _permuted(
      weights[piece.src][slices(piece.src_box)], piece.perm
    )  # a view: this writes through
    part[...] = view[slices(piece.dst_box)]


def sources(rules: Iterable[Rule]) -> frozenset[str]:
  """Tree paths that the rules read."""
  return frozenset(piece.src for r in rules for piece in r.pieces)


def _permuted(array: np.ndarray, perm: tuple[int, ...]) -> np.ndarray:
  dropped = tuple(axis for axis in range(array.ndim) if axis not in perm)
  order = {axis: i for i, axis in enumerate(a for a in range(array.ndim) if a in perm)}
  return array.squeeze(dropped).transpose([order[axis] for axis in perm])


def _inside(box: Box, shape: Sequence[int]) -> bool:
  return len(box) == len(shape) and all(
    0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
  )
