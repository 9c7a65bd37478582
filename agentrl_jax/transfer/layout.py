"""Name and layout maps as data: where each element of a published tensor lives in our weight tree.

Everything is a hyperrectangle map: rename, transpose, slice, fuse along an axis, unstack layers or
experts, tie (one source, several destinations). There are no callables, so an assembly can be
printed, inverted and planned over.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.models.model import Rule

Box = tuple[tuple[int, int], ...]  # half-open [start, stop) on each axis


class Piece(NamedTuple):
  """A box of one source tensor that becomes a box of the destination's view.

  Axis i of the view is source axis `perm[i]`; a source axis that `perm` leaves out (the stacked
  layer, the expert) has extent one in `src_box`.
  """

  src: str  # path in the weight tree, "layers.attention.query"
  perm: tuple[int, ...]
  src_box: Box
  dst_box: Box


class Assembly(NamedTuple):
  """How one published tensor is made.

  `view` is `shape` with axes split (same elements in row-major order) so that every piece is a box:
  a [heads * head_dim, embed] matrix has the view [heads, head_dim, embed].
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


def assemblies(
  rules: Iterable[Rule], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Assembly, ...]:
  """Expands a family's compact rules: one assembly for each Hugging Face tensor.

  Args:
    shapes: shape of each array of the weight tree by its path ("layers.attention.query").
  """
  made = []
  for rule in rules:
    if rule.whole:
      raise ValueError(f"{rule.name}: whole numbers, which are not pushed to servers")
    src = ".".join(rule.path)
    if src not in shapes:
      raise ValueError(f"{rule.name}: its source {src} is not in the weight tree")
    stacked = ("{layer}" in rule.name) + ("{expert}" in rule.name)
    for index in np.ndindex(*shapes[src][:stacked]):
      made.append(assembly(rule.tensor(index), src, shapes[src], index=index, perm=rule.perm))
  return tuple(made)


def assembly(
  dst: str,
  src: str,
  src_shape: Sequence[int],
  *,
  index: Sequence[int] = (),
  perm: Sequence[int] | None = None,
  shape: Sequence[int] | None = None,
) -> Assembly:
  """One published tensor from one source: `src[index]`, transposed by `perm`, axes merged to
  `shape`.

  `perm` counts the axes that are left after `index` (identity if None), `shape` is the published
  shape (that of the transposed source if None).
  """
  lead = len(index)
  perm = tuple(range(len(src_shape) - lead)) if perm is None else tuple(perm)
  view = tuple(src_shape[lead + axis] for axis in perm)
  src_box = tuple((i, i + 1) for i in index) + full(src_shape[lead:])
  piece = Piece(src, tuple(lead + axis for axis in perm), src_box, full(view))
  return Assembly(dst, view if shape is None else tuple(shape), view, (piece,))


def stack(dst: str, parts: Sequence[Assembly]) -> Assembly:
  """Several published tensors (experts) as one with a new first axis.

  Raises:
    ValueError: naming the first part that is not the next index of the same source array.
  """
  first = parts[0]
  (piece,) = first.pieces
  lead = [axis for axis in range(len(piece.src_box)) if axis not in piece.perm]
  for n, part in enumerate(parts):
    (other,) = part.pieces
    if (part.shape, part.view, other.src, other.perm) != (
      first.shape, first.view, piece.src, piece.perm,
    ):  # fmt: skip
      raise ValueError(f"{dst}: {part.dst} is not made as {first.dst} is")
    axis = max(lead, key=lambda a: (other.src_box[a][0] - piece.src_box[a][0], a), default=None)
    want = tuple(
      (start + n, stop + n) if a == axis else (start, stop)
      for a, (start, stop) in enumerate(piece.src_box)
    )
    if axis is None or other.src_box != want:
      raise ValueError(f"{dst}: {part.dst} is not element {n} after {first.dst}")
  start = piece.src_box[axis][0]
  src_box = tuple(
    (start, start + len(parts)) if a == axis else span for a, span in enumerate(piece.src_box)
  )
  view = (len(parts), *first.view)
  whole = Piece(piece.src, (axis, *piece.perm), src_box, full(view))
  return Assembly(dst, (len(parts), *first.shape), view, (whole,))


def cut(part: Assembly, axis: int, start: int, stop: int) -> Assembly:
  """The elements from `start` to `stop` along an axis of a published tensor of one piece, whose
  view is its shape.
  """
  (piece,) = part.pieces
  if part.shape != part.view:
    raise ValueError(f"{part.dst}: its view {part.view} is not its shape {part.shape}")
  source = piece.perm[axis]
  first = piece.src_box[source][0]
  src_box = list(piece.src_box)
  src_box[source] = (first + start, first + stop)
  shape = (*part.shape[:axis], stop - start, *part.shape[axis + 1 :])
  piece = piece._replace(src_box=tuple(src_box), dst_box=full(shape))
  return Assembly(part.dst, shape, shape, (piece,))


def fuse(
  dst: str,
  parts: Sequence[Assembly],
  ranks: int,
  *,
  axis: int = 0,
  sharing: Sequence[int] | None = None,
) -> Assembly:
  """Several published tensors as one, blocks along `axis` interleaved so that each rank's lie
  together.

  Rank r of `ranks` holds [parts[0]_r; parts[1]_r; ...], which is how engines store query, key and
  value (or gate and up) of a tensor-parallel rank in one parameter. Each part is a whole-tensor
  assembly of one piece whose `axis` divides by `ranks`.

  Args:
    sharing: for each part, how many neighbouring ranks hold the same rows (1 if None): key-value
      heads are repeated where there are fewer than ranks.
  Raises:
    ValueError: naming the part that does not divide or whose other axes differ.
  """
  pieces, at = [], 0
  rest = parts[0].view[:axis] + parts[0].view[axis + 1 :]
  for rank in range(ranks):
    for part, share in zip(parts, sharing or [1] * len(parts), strict=True):
      (piece,) = part.pieces
      size = part.view[axis] * share
      if (
        part.shape != part.view
        or size % ranks
        or part.view[:axis] + part.view[axis + 1 :] != rest
        or ranks % share
      ):
        raise ValueError(
          f"{dst}: {part.dst} of shape {part.shape} does not fuse over {ranks} ranks"
        )
      rows = size // ranks
      src_axis, src_box = piece.perm[axis], list(piece.src_box)
      start = src_box[src_axis][0] + rank // share * rows
      src_box[src_axis] = (start, start + rows)
      box = list(full(part.view))
      box[axis] = (at, at + rows)
      pieces.append(Piece(piece.src, piece.perm, tuple(src_box), tuple(box)))
      at += rows
  shape = (*rest[:axis], at, *rest[axis:])
  return Assembly(dst, shape, shape, tuple(pieces))


def check(assembly: Assembly, sources: Mapping[str, tuple[int, ...]]) -> None:
  """Raises ValueError, naming the tensor, unless real sources cover the view exactly once."""
  if math.prod(assembly.shape) != math.prod(assembly.view):
    raise ValueError(
      f"{assembly.dst}: view {assembly.view} does not have the elements of shape {assembly.shape}"
    )
  for piece in assembly.pieces:
    if piece.src not in sources:
      raise ValueError(f"{assembly.dst}: its source {piece.src} is not in the weight tree")
    shape = sources[piece.src]
    if not _inside(piece.src_box, shape):
      raise ValueError(
        f"{assembly.dst}: box {piece.src_box} is outside {piece.src} of shape {shape}"
      )
    if not _inside(piece.dst_box, assembly.view):
      raise ValueError(f"{assembly.dst}: box {piece.dst_box} is outside its view {assembly.view}")
    size = extents(piece.src_box)
    if tuple(size[axis] for axis in piece.perm) != extents(piece.dst_box) or any(
      size[axis] != 1 for axis in set(range(len(shape))) - set(piece.perm)
    ):
      raise ValueError(
        f"{assembly.dst}: {piece.src}{piece.src_box} permuted by {piece.perm} does not fit "
        f"{piece.dst_box}"
      )
  boxes = [piece.dst_box for piece in assembly.pieces]
  for i, box in enumerate(boxes):
    for other in boxes[:i]:
      if intersect(box, other) is not None:
        raise ValueError(f"{assembly.dst}: pieces {other} and {box} overlap")
  covered = sum(math.prod(extents(box)) for box in boxes)
  if covered != math.prod(assembly.view):
    raise ValueError(
      f"{assembly.dst}: {covered} of its {math.prod(assembly.view)} elements have a source"
    )


def intersect(a: Box, b: Box) -> Box | None:
  """The common box, or None if it is empty."""
  out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
  return out if all(start < stop for start, stop in out) else None


def apply(assembly: Assembly, weights: Mapping[str, np.ndarray]) -> np.ndarray:
  """The published tensor, from whole source arrays keyed by tree path."""
  dtype = weights[assembly.pieces[0].src].dtype
  out = np.empty(assembly.view, dtype)
  for piece in assembly.pieces:
    out[slices(piece.dst_box)] = permuted(weights[piece.src][slices(piece.src_box)], piece.perm)
  return out.reshape(assembly.shape)


def invert(assembly: Assembly, published: np.ndarray, weights: Mapping[str, np.ndarray]) -> None:
  """Writes a published tensor back into the source arrays (in place): the inverse of `apply`."""
  if published.shape != assembly.shape:
    raise ValueError(f"{assembly.dst} has shape {published.shape}, expected {assembly.shape}")
  view = published.reshape(assembly.view)
  for piece in assembly.pieces:
    part = permuted(
      weights[piece.src][slices(piece.src_box)], piece.perm
    )  # a view: this writes through
    part[...] = view[slices(piece.dst_box)]


def permuted(array: np.ndarray, perm: Sequence[int]) -> np.ndarray:
  """A view with axes in the order `perm`; axes that it leaves out have extent one and go."""
  kept = sorted(perm)
  dropped = tuple(axis for axis in range(array.ndim) if axis not in kept)
  return array.squeeze(dropped).transpose([kept.index(axis) for axis in perm])


def _inside(box: Box, shape: Sequence[int]) -> bool:
  return len(box) == len(shape) and all(
    0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
  )
