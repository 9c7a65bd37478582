"""Grouped matmul: rows sorted by group, each group with a weight of its own; no row is dropped or
padded to a capacity, forward and backward.

On TPU it is `jax.lax.ragged_dot`, a kernel there. Elsewhere XLA lowers that to one masked product
over all groups, G times the work, so rows go through a loop over tiles that lie in one group each:
at most one part-filled tile a group is wasted. Axis letters: M rows, G groups, I inputs, O outputs.
"""

import functools
from typing import NamedTuple

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
  return _zero_past_the_end(jax.lax.ragged_dot(x, weight, sizes), sizes)


def _ragged_backward(x: Array, weight: Array, sizes: Array, grad: Array) -> tuple[Array, Array]:
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  _, transpose = jax.vjp(product, x, weight)
  x_grad, weight_grad = transpose(_zero_past_the_end(grad, sizes))
  return _zero_past_the_end(x_grad, sizes), weight_grad


def _zero_past_the_end(x: Array, sizes: Array) -> Array:
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


def _part(x: Array, start: Array, block: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, start, block, 0)


def _tiled_forward(x: Array, weight: Array, sizes: Array) -> Array:
  return _tiled_product(x, weight, sizes, "bi,io->bo")


def _tiled_product(x: Array, weight: Array, sizes: Array, letters: str) -> Array:
  """Each tile is written whole: its rows past the end of the group belong to later tiles, which
  overwrite them.
  """
  rows, block = x.shape[0], block_rows(x.shape[0], weight.shape[0])
  of = tiles(sizes, rows, block)
  padded = jnp.pad(x, ((0, block), (0, 0)))
  outputs = weight.shape[2 if letters.endswith("o") else 1]

  def tile(number: Array, made: Array) -> Array:
    part = _part(padded, of.start[number], block)
    product = jnp.einsum(
      letters, part, weight[of.group[number]], preferred_element_type=jnp.float32
    )
    return jax.lax.dynamic_update_slice_in_dim(made, product.astype(x.dtype), of.start[number], 0)

  start = jnp.zeros((rows + block, outputs), x.dtype)
  with jax.named_scope(_counted(rows, weight.shape[0], block)):
    made = jax.lax.fori_loop(0, of.count, tile, start)
  return _zero_past_the_end(made[:rows], sizes)


def _tiled_backward(x: Array, weight: Array, sizes: Array, grad: Array) -> tuple[Array, Array]:
  rows, block = x.shape[0], block_rows(x.shape[0], weight.shape[0])
  of = tiles(sizes, rows, block)
  padded_x, padded_grad = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, grad))

  def tile(number: Array, total: Array) -> Array:
    start, group = of.start[number], of.group[number]
    own = (start + jnp.arange(block) < of.stop[number])[:, None]
    part = jnp.where(own, _part(padded_x, start, block), jnp.zeros((), x.dtype))
    grads = jnp.where(own, _part(padded_grad, start, block), jnp.zeros((), x.dtype))
    product = jnp.einsum("bi,bo->io", part, grads, preferred_element_type=jnp.float32)
    return total.at[group].add(product)

  zeros = jnp.zeros(weight.shape, jnp.float32)
  with jax.named_scope(_counted(rows, weight.shape[0], block)):
    weight_grad = jax.lax.fori_loop(0, of.count, tile, zeros)
  return _tiled_product(grad, weight, sizes, "bo,io->bi"), weight_grad.astype(weight.dtype)
