"""Grouped matmul: rows sorted by group, each group with a weight of its own; no row is dropped or
padded to a capacity, forward and backward.

On TPU it is `jax.lax.ragged_dot`, a kernel there. Elsewhere XLA lowers that to one masked product
over all groups, G times the work, so rows go through a loop over tiles that lie in one group each:
at most one part-filled tile a group is wasted. Axis letters: M rows, G groups, I inputs, O outputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LARGEST, _SMALLEST = 128, 8  # rows of a tile
_TILES_A_GROUP = 8  # aimed at, so that the part-filled last one wastes a sixteenth on average


@jax.custom_vjp
def grouped_matmul(
  x: Float[Array, "M I"], weight: Float[Array, "G I O"], sizes: Int[Array, "G"]
) -> Float[Array, "M O"]:
  """Rows of group g times `weight[g]`, in the dtype of x; rows past the last group give zeros.

  Args:
    sizes: rows of each group; the first `sizes[0]` rows of x are group 0, and so on.
  """
  return _by_platform(_ragged_forward, _tiled_forward)(x, weight.astype(x.dtype), sizes)


def _forward(x: Array, weight: Array, sizes: Array) -> tuple[Array, tuple[Array, ...]]:
  return grouped_matmul(x, weight, sizes), (x, weight, sizes)


def _backward(kept: tuple[Array, ...], grad: Array) -> tuple[Array, Array, None]:
  x, weight, sizes = kept
  grads = _by_platform(_ragged_backward, _tiled_backward)
  x_grad, weight_grad = grads(x, weight.astype(x.dtype), sizes, grad)
  return x_grad, weight_grad.astype(weight.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _by_platform(tpu, default):
  """The one place where an implementation is chosen."""
  return functools.partial(jax.lax.platform_dependent, tpu=tpu, default=default)


def _ragged_forward(x: Array, weight: Array, sizes: Array) -> Array:
  return zero_past_the_end(jax.lax.ragged_dot(x, weight, sizes), sizes)


def _ragged_backward(x: Array, weight: Array, sizes: Array, grad: Array) -> tuple[Array, Array]:
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  _, transpose = jax.vjp(product, x, weight)
  x_grad, weight_grad = transpose(zero_past_the_end(grad, sizes))
  return zero_past_the_end(x_grad, sizes), weight_grad


def zero_past_the_end(x: Array, sizes: Array) -> Array:
  return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.zeros((), x.dtype))


class Tiles(NamedTuple):
  """`count` tiles in order, each of rows `start` to at most `start + block` of one group; entries
  from `count` on mean nothing.
  """

  group: Int[Array, "tiles"]
  start: Int[Array, "tiles"]
  stop: Int[Array, "tiles"]  # where the tile's group ends
  count: Int[Array, ""]


def block_rows(rows: int, groups: int) -> int:
  """Rows of a tile: a power of two."""
  block = _LARGEST
  while block > _SMALLEST and block * _TILES_A_GROUP * groups > rows:
    block //= 2
  return block


def tiles(sizes: Int[Array, "G"], rows: int, block: int) -> Tiles:
  """The tiles of groups of these sizes, of which there are at most `rows // block + G`."""
  ends = jnp.cumsum(sizes)
  counts = (sizes + block - 1) // block
  tile_ends = jnp.cumsum(counts)
  number = jnp.arange(rows // block + sizes.shape[0], dtype=sizes.dtype)
  group = jnp.sum(number[:, None] >= tile_ends[None, :-1], axis=1)  # the first with a later end
  within = number - (tile_ends - counts)[group]
  return Tiles(group, (ends - sizes)[group] + within * block, ends[group], tile_ends[-1])


def _counted(rows: int, groups: int, block: int) -> str:
  """A scope that says how long the loop within is: what decides it is data, which no plan has."""
  return f"tiles_of_{block}_in_{groups}_groups_of_{rows}_rows"


def map_tiles(
  product: Callable[[Any, Array], Array],
  rows: Any,
  sizes: Int[Array, "G"],
  outputs: int,
  dtype: Any,
) -> Float[Array, "M O"]:
  """`product(rows of a tile, their group)` of each tile; rows past the last group give zeros.

  Each tile is written whole: its rows past the end of the group belong to later tiles, which
  overwrite them.

  Args:
    rows: a tree of arrays [M ...].
  """
  count = jax.tree.leaves(rows)[0].shape[0]
  block = block_rows(count, sizes.shape[0])
  of, padded = tiles(sizes, count, block), _padded(rows, block)

  def tile(number: Array, made: Array) -> Array:
    start = of.start[number]
    part = product(_part(padded, start, block), of.group[number])
    return jax.lax.dynamic_update_slice_in_dim(made, part.astype(dtype), start, 0)

  start = jnp.zeros((count + block, outputs), dtype)
  with jax.named_scope(_counted(count, sizes.shape[0], block)):
    made = jax.lax.fori_loop(0, of.count, tile, start)
  return zero_past_the_end(made[:count], sizes)


def sum_tiles(
  product: Callable[[Any], Array],
  rows: Any,
  sizes: Int[Array, "G"],
  shape: tuple[int, ...],
  block: int | None = None,
) -> Float[Array, "G I O"]:
  """The float32 sum of `product(rows of a tile)` over each group's tiles; rows of a tile that are
  not of its group are zeros there. `rows` as of `map_tiles`, `block` rows of a tile.
  """
  count = jax.tree.leaves(rows)[0].shape[0]
  block = block or block_rows(count, sizes.shape[0])
  of, padded = tiles(sizes, count, block), _padded(rows, block)

  def tile(number: Array, total: Array) -> Array:
    start = of.start[number]
    own = start + jnp.arange(block) < of.stop[number]

    def masked(x: Array) -> Array:
      return jnp.where(own.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    part = jax.tree.map(masked, _part(padded, start, block))
    return total.at[of.group[number]].add(product(part))

  zeros = jnp.zeros((sizes.shape[0], *shape), jnp.float32)
  with jax.named_scope(_counted(count, sizes.shape[0], block)):
    return jax.lax.fori_loop(0, of.count, tile, zeros)


def _padded(rows: Any, block: int) -> Any:
  return jax.tree.map(lambda x: jnp.pad(x, ((0, block), *[(0, 0)] * (x.ndim - 1))), rows)


def _part(rows: Any, start: Array, block: int) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, block, 0), rows)


def _tiled_forward(x: Array, weight: Array, sizes: Array) -> Array:
  return _tiled_product(x, weight, sizes, "bi,io->bo")


def _tiled_product(x: Array, weight: Array, sizes: Array, letters: str) -> Array:
  def product(part: Array, group: Array) -> Array:
    return jnp.einsum(letters, part, weight[group], preferred_element_type=jnp.float32)

  outputs = weight.shape[2 if letters.endswith("o") else 1]
  return map_tiles(product, x, sizes, outputs, x.dtype)


def _tiled_backward(x: Array, weight: Array, sizes: Array, grad: Array) -> tuple[Array, Array]:
  def product(part: tuple[Array, Array]) -> Array:
    return jnp.einsum("bi,bo->io", *part, preferred_element_type=jnp.float32)

  weight_grad = sum_tiles(product, (x, grad), sizes, weight.shape[1:])
  return _tiled_product(grad, weight, sizes, "bo,io->bi"), weight_grad.astype(weight.dtype)
