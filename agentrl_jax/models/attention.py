"""Causal attention within samples of packed rows, and over a key-value cache; float32 softmax,
grouped heads.

A position attends to itself and earlier positions of its row with the same sample id, and to those
of its parent, a stream that several samples continue; a sliding window leaves the nearest of these.
Padding (-1) attends to nothing and gets zeros. Axis letters as in `layers`; G = N / K query heads
share a key-value head, S counts keys.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 128  # queries and keys a block; also what a masked block skipped saves
_PLAIN_LENGTH = 256  # up to here the whole [T T] score matrix is smaller than the blocks' overhead
Carry = tuple[Array, Array, Array]  # running sums of a loop over blocks

_LOW = -1e30  # masked scores: finite, so that no gradient is inf - inf


@flax.struct.dataclass
class Window:
  """Of the keys that a query would see, those fewer than `size` positions back; itself included."""

  position: Int[Array, "B T"]  # within the stream: a sample goes on where its parent ends
  size: Int[Array, ""]


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  window: Window | None = None,
) -> Float[Array, "B T N H"]:
  """The one place where an implementation of packed attention is chosen."""
  if query.shape[1] <= _PLAIN_LENGTH:
    return attend_plain(query, key, value, sample, parent, window)
  return attend_blockwise(query, key, value, sample, parent, window)


def attend_plain(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  window: Window | None = None,
) -> Float[Array, "B T N H"]:
  """All scores at once: memory grows with T squared."""
  length = query.shape[1]
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = _visible(sample, sample if parent is None else parent, sample) & causal[None]
  if window is not None:
    mask &= _near(window.position, window.position, window.size)
  scores = _scores(_grouped(query, key.shape[2]), _heads_first(key))
  return _ungrouped(_softmax_mix(scores, _heads_first(value), mask))


def attend_blockwise(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  window: Window | None = None,
  *,
  block: int = _BLOCK,
) -> Float[Array, "B T N H"]:
  """The same in memory linear in T, forward and backward (Dao et al. 2022), block by block.

  Blocks above the diagonal, and those before every row's samples or windows begin, are skipped. A
  sample must be contiguous in its row.
  """
  length = query.shape[1]
  extra = -length % block

  def pad(x: Array, fill: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)

  queries = _grouped(pad(query, 0), key.shape[2])
  keys, values = _heads_first(pad(key, 0)), _heads_first(pad(value, 0))
  own = pad(sample, -1)
  if window is not None:
    window = Window(pad(window.position, 0), window.size)
  parents = own if parent is None else pad(parent, -1)
  mixed = _blockwise(block, queries, keys, values, own, parents, window)
  return _ungrouped(mixed)[:, :length]


def attend_cache(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K H S"],
  value: Float[Array, "B K S H"],
  position: Int[Array, "B T"],
  window: int | None = None,
) -> Float[Array, "B T N H"]:
  """Attends to cache indices up to `position` (-1: to none), to the last `window` of them if given.

  Keys lie transposed: for one query a head, the product with [H S] reads memory in order and takes
  half the time of that with [S H].
  """
  index = jnp.arange(key.shape[3])[None, None, :]
  mask = index <= position[:, :, None]
  if window is not None:
    mask &= index > position[:, :, None] - window
  grouped = _grouped(query, key.shape[1])
  scores = jnp.einsum("bkgth,bkhs->bkgts", grouped, key, preferred_element_type=jnp.float32)
  return _ungrouped(_softmax_mix(scores * query.shape[-1] ** -0.5, value, mask))


def write_keys(
  cache: Float[Array, "B K H S"], new: Float[Array, "B T K H"], position: Int[Array, "B T"]
) -> Float[Array, "B K H S"]:
  """Puts `new[b, t]` at index `position[b, t]` of row b; nowhere if that is -1 or past the end."""
  rows = jnp.arange(cache.shape[0])[:, None]
  index = _or_past_the_end(position, cache.shape[3])
  return cache.at[rows, :, :, index].set(new.astype(cache.dtype), mode="drop")


def write_values(
  cache: Float[Array, "B K S H"], new: Float[Array, "B T K H"], position: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
  """As `write_keys`."""
  rows = jnp.arange(cache.shape[0])[:, None]
  index = _or_past_the_end(position, cache.shape[2])
  return cache.at[rows, :, index].set(new.astype(cache.dtype), mode="drop")


def _or_past_the_end(position: Int[Array, "B T"], length: int) -> Int[Array, "B T"]:
  """Padding moved to where a dropping write ignores it; a negative index would wrap."""
  return jnp.where(position < 0, length, position)


def _visible(
  sample: Int[Array, "B T"], parent: Int[Array, "B T"], keys: Int[Array, "B S"]
) -> Bool[Array, "B T S"]:
  """Whether a query of this sample and parent (the sample itself where it has none) sees a key."""
  keys = keys[:, None, :]
  seen = (sample[:, :, None] == keys) | (parent[:, :, None] == keys)
  return seen & (sample >= 0)[:, :, None] & (keys >= 0)


def _near(
  queries: Int[Array, "B T"], keys: Int[Array, "B S"], size: Int[Array, ""]
) -> Bool[Array, "B T S"]:
  """Whether a key's position is fewer than `size` before a query's."""
  return queries[:, :, None] - keys[:, None, :] < size


def _heads_first(x: Float[Array, "B T K H"]) -> Float[Array, "B K T H"]:
  return jnp.swapaxes(x, 1, 2)


def _grouped(query: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
  rows, length, heads, head_dim = query.shape
  return jnp.moveaxis(query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim), 1, 3)


def _ungrouped(mixed: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
  rows, kv_heads, group, length, head_dim = mixed.shape
  return jnp.moveaxis(mixed, 3, 1).reshape(rows, length, kv_heads * group, head_dim)


def _scores(
  query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> Float[Array, "B K G T S"]:
  scores = jnp.einsum("bkgth,bksh->bkgts", query, key, preferred_element_type=jnp.float32)
  return scores * query.shape[-1] ** -0.5


def _softmax_mix(
  scores: Float[Array, "B K G T S"],
  value: Float[Array, "B K S H"],
  mask: Bool[Array, "B T S"],
) -> Float[Array, "B K G T H"]:
  mask = mask[:, None, None]
  scores = jnp.where(mask, scores, _LOW)
  # A constant shift per row: the softmax does not depend on it, so neither does the gradient.
  shift = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weight = jnp.where(mask, jnp.exp(scores - shift), 0.0)
  total = jnp.sum(weight, axis=-1, keepdims=True)
  weight = (weight / jnp.where(total > 0, total, 1.0)).astype(value.dtype)
  return jnp.einsum("bkgts,bksh->bkgth", weight, value)


def _first_blocks(
  sample: Int[Array, "B T"], parent: Int[Array, "B T"], window: Window | None, block: int
) -> Int[Array, "T/block"]:
  """The first key block that each query block needs in any row, made never to decrease."""
  index = jnp.arange(sample.shape[1])[None]
  before = jnp.pad(sample[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  starts = jnp.where(sample != before, index, 0)
  start = jnp.where(sample < 0, index, jax.lax.cummax(starts, axis=1))
  if window is not None:  # a sample is contiguous, so its positions count as the row does
    start = jnp.maximum(start, index - window.size + 1)
  # A stream's parent lies before it: in the extreme at the row's first position.
  start = jnp.where(parent == sample, start, 0)
  needed = jnp.min(start.reshape(sample.shape[0], -1, block), axis=(0, 2)) // block
  return jax.lax.cummin(needed, reverse=True)


def _part(x: Array, number: Int[Array, ""], block: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis)


def _block_mask(
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"],
  window: Window | None,
  row: Int[Array, ""],
  column: Int[Array, ""],
  block: int,
) -> Bool[Array, "B 1 1 block block"]:
  within = jnp.arange(block)
  causal = (row * block + within)[:, None] >= (column * block + within)[None, :]
  queries = _part(sample, row, block, 1), _part(parent, row, block, 1)
  mask = _visible(*queries, _part(sample, column, block, 1)) & causal[None]
  if window is not None:
    near = _part(window.position, row, block, 1), _part(window.position, column, block, 1)
    mask &= _near(*near, window.size)
  return mask[:, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
  block: int,
  query: Float[Array, "B K G T H"],
  key: Float[Array, "B K T H"],
  value: Float[Array, "B K T H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"],
  window: Window | None,
) -> Float[Array, "B K G T H"]:
  return _blockwise_forward(block, query, key, value, sample, parent, window)[0]


def _blockwise_forward(
  block: int,
  query: Array,
  key: Array,
  value: Array,
  sample: Array,
  parent: Array,
  window: Window | None,
) -> tuple[Array, tuple[Any, ...]]:
  """Online softmax over key blocks; keeps the log of each row's sum for the backward pass."""
  first = _first_blocks(sample, parent, window, block)

  def row_block(row: Array) -> tuple[Array, Array]:
    queries = _part(query, row, block, 3)

    def column_block(
      column: Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
      mixed, total, peak = carry
      mask = _block_mask(sample, parent, window, row, column, block)
      scores = jnp.where(mask, _scores(queries, _part(key, column, block, 2)), _LOW)
      new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
      weight = jnp.where(mask, jnp.exp(scores - new_peak), 0.0)
      shrink = jnp.exp(peak - new_peak)
      values = _part(value, column, block, 2)
      added = jnp.einsum(
        "bkgts,bksh->bkgth",
        weight.astype(value.dtype),
        values,
        preferred_element_type=jnp.float32,
      )
      total = total * shrink + jnp.sum(weight, axis=-1, keepdims=True)
      return mixed * shrink + added, total, new_peak

    zeros = jnp.zeros((*queries.shape[:-1], value.shape[-1]), jnp.float32)
    column = zeros[..., :1]
    mixed, total, peak = jax.lax.fori_loop(
      first[row], row + 1, column_block, (zeros, column, column + _LOW)
    )
    safe = jnp.where(total > 0, total, 1.0)
    return (mixed / safe).astype(query.dtype), jnp.where(total > 0, peak + jnp.log(safe), 0.0)

  mixed, log_total = jax.lax.map(row_block, jnp.arange(first.shape[0]))
  mixed, log_total = _join(mixed, 3), _join(log_total, 3)
  return mixed, (query, key, value, sample, parent, window, mixed, log_total)


def _join(blocks: Array, axis: int) -> Array:
  """[blocks ...] -> the blocks one after another along `axis` of what remains."""
  moved = jnp.moveaxis(blocks, 0, axis)
  shape = moved.shape
  return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _blockwise_backward(
  block: int, kept: tuple[Any, ...], mixed_grad: Array
) -> tuple[Array, Array, Array, None, None, None]:
  """Recomputes each block's weights from the kept normalisers: one pass over the blocks needed."""
  query, key, value, sample, parent, window, mixed, log_total = kept
  first = _first_blocks(sample, parent, window, block)
  inner = jnp.einsum("bkgth,bkgth->bkgt", mixed_grad, mixed, preferred_element_type=jnp.float32)[
    ..., None
  ]

  def column_block(query_grad: Array, column: Array) -> tuple[Array, tuple[Array, Array]]:
    keys, values = _part(key, column, block, 2), _part(value, column, block, 2)

    def row_block(row: Array, carry: Carry) -> Carry:
      query_grad, key_grad, value_grad = carry
      queries, grads = _part(query, row, block, 3), _part(mixed_grad, row, block, 3)
      mask = _block_mask(sample, parent, window, row, column, block)
      shifted = _scores(queries, keys) - _part(log_total, row, block, 3)
      weight = jnp.where(mask, jnp.exp(jnp.where(mask, shifted, 0.0)), 0.0)
      product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
      weight_grad = product("bkgth,bksh->bkgts", grads, values) - _part(inner, row, block, 3)
      score_grad = (weight * weight_grad * query.shape[-1] ** -0.5).astype(query.dtype)
      value_grad += product("bkgts,bkgth->bksh", weight.astype(query.dtype), grads)
      key_grad += product("bkgts,bkgth->bksh", score_grad, queries)
      updated = _part(query_grad, row, block, 3) + product("bkgts,bksh->bkgth", score_grad, keys)
      query_grad = jax.lax.dynamic_update_slice_in_dim(query_grad, updated, row * block, 3)
      return query_grad, key_grad, value_grad

    zeros = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    last = jnp.sum(first <= column)  # query blocks from here on begin after this key block
    query_grad, key_grad, value_grad = jax.lax.fori_loop(
      column, last, row_block, (query_grad, *zeros)
    )
    return query_grad, (key_grad, value_grad)

  query_grad, (key_grad, value_grad) = jax.lax.scan(
    column_block, jnp.zeros(query.shape, jnp.float32), jnp.arange(first.shape[0])
  )
  return (
    query_grad.astype(query.dtype),
    _join(key_grad, 2).astype(key.dtype),
    _join(value_grad, 2).astype(value.dtype),
    None,
    None,
    None,
  )


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
