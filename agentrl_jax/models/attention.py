"""Causal attention within samples of packed rows, and over a key-value cache; float32 softmax,
grouped heads.

A position attends to itself and earlier positions of its row with the same sample id, and to those
of its parent, a stream that several samples continue; a sliding window leaves the nearest of these.
Padding (-1) attends to nothing and gets zeros. Axis letters as in `layers`; G = N / K query heads
share a key-value head, S counts keys.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.ops.quantize import OCP, finite, quantize

Carry = tuple[Array, Array, Array]  # running sums of a loop over blocks

MIXED = "mixed"  # what `remat.save_attention` keeps of attention in blocks
PLAIN_LENGTH = 256  # up to here the whole [T T] score matrix is smaller than the blocks' overhead
# Queries and keys a block. A large one reads and writes less memory for its products, a small one
# stays in a CPU's cache and skips more of what is masked.
_SMALLEST_BLOCK = 128
_LARGEST_BLOCK = {"cpu": 128}
_LARGEST_BLOCK_OF_ACCELERATORS = 512

_LOW = -1e30  # masked scores: finite, so that no gradient is inf - inf
_LOWEST_PEAK = -1e20  # above it, so that exp(_LOW - peak) is 0 before any key was seen


@flax.struct.dataclass
class Window:
  """Of the keys that a query would see, those fewer than `size` positions back; itself included."""

  position: Int[Array, "B T"]  # within the stream: a sample goes on where its parent ends
  size: Int[Array, ""]


# (query [B T N H], key [B T K H], value [B T K H], sample [B T], parent [B T] or None, window or
# None) -> [B T N H]
AttendRows = Callable[
  [Array, Array, Array, Array, Array | None, Window | None], Float[Array, "B T N H"]
]


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  window: Window | None = None,
  *,
  platform: str = "cpu",
) -> Float[Array, "B T N H"]:
  """All scores at once of short rows, else block by block; of kernels `context.choose` knows."""
  length = query.shape[1]
  if length <= PLAIN_LENGTH:
    return attend_plain(query, key, value, sample, parent, window)
  block = block_of(length, platform)
  return attend_blockwise(query, key, value, sample, parent, window, block=block)


def block_of(length: int, platform: str) -> int:
  """The platform's largest block that pads rows of this length by an eighth at most."""
  block = _LARGEST_BLOCK.get(platform, _LARGEST_BLOCK_OF_ACCELERATORS)
  while block > _SMALLEST_BLOCK and -length % block > length // 8:
    block //= 2
  return block


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
  block: int = _SMALLEST_BLOCK,
) -> Float[Array, "B T N H"]:
  """The same in memory linear in T, forward and backward (Dao et al. 2022), block by block.

  Blocks in which no row's queries see a key are skipped: those above the diagonal, before samples
  or windows begin, and between a sample and its parent. A sample must be contiguous in its row.
  """
  length = query.shape[1]
  extra = -length % block

  def pad(x: Array, fill: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)

  own = pad(sample, -1)
  if window is not None:
    window = Window(pad(window.position, 0), window.size)
  seen = _Seen(own, own if parent is None else pad(parent, -1), window)
  columns = _columns_of(seen, block, continued=parent is not None)
  queries = _blocks(_grouped(pad(query, 0), key.shape[2]), 3, block)
  keys, values = (_blocks(_heads_first(pad(x, 0)), 2, block) for x in (key, value))
  mixed = _blockwise(queries, keys, values, seen, columns)
  return _ungrouped(_joined(mixed, 3))[:, :length]


@flax.struct.dataclass
class Scaled:
  """Keys [B K H S] or values [B K S H] of a cache in FP8, with a scale a position and head."""

  values: Array
  scale: Float[Array, "B K S"]


Cached = Array | Scaled


def empty_cache(keys: tuple[int, ...], values: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
  """Of one layer, of these shapes; `Scaled` where the dtype is an FP8 one."""
  made = jnp.zeros(keys, dtype), jnp.zeros(values, dtype)
  if dtype != jnp.float8_e4m3fn:
    return made
  one = jnp.zeros(values[:-1], jnp.float32)
  return Scaled(made[0], one), Scaled(made[1], one)


def attend_cache(
  query: Float[Array, "B T N H"],
  key: Cached,
  value: Cached,
  position: Int[Array, "B T"],
  window: int | None = None,
) -> Float[Array, "B T N H"]:
  """Attends to cache indices up to `position` (-1: to none), to the last `window` of them if given.

  Args:
    key: [B K H S].
    value: [B K S H].

  Keys lie transposed: for one query a head, the product with [H S] reads memory in order and takes
  half the time of that with [S H].
  """
  if isinstance(key, Scaled) and isinstance(value, Scaled):
    key = (key.values.astype(jnp.float32) * key.scale[:, :, None]).astype(query.dtype)
    value = (value.values.astype(jnp.float32) * value.scale[..., None]).astype(query.dtype)
  assert isinstance(key, Array) and isinstance(value, Array)
  index = jnp.arange(key.shape[3])[None, None, :]
  mask = index <= position[:, :, None]
  if window is not None:
    mask &= index > position[:, :, None] - window
  grouped = _grouped(query, key.shape[1])
  scores = jnp.einsum("bkgth,bkhs->bkgts", grouped, key, preferred_element_type=jnp.float32)
  return _ungrouped(_softmax_mix(scores * query.shape[-1] ** -0.5, value, mask))


def write_keys(cache: Any, new: Float[Array, "B T K H"], position: Int[Array, "B T"]) -> Any:
  """Puts `new[b, t]` at index `position[b, t]` of row b; nowhere if that is -1 or past the end.

  The cache is [B K H S].
  """
  if isinstance(cache, Scaled):
    coded, scale = _scaled(new)
    return Scaled(
      write_keys(cache.values, coded, position), _write_scale(cache.scale, scale, position)
    )
  rows = jnp.arange(cache.shape[0])[:, None]
  index = _or_past_the_end(position, cache.shape[3])
  return cache.at[rows, :, :, index].set(new.astype(cache.dtype), mode="drop")


def write_values(cache: Any, new: Float[Array, "B T K H"], position: Int[Array, "B T"]) -> Any:
  """As `write_keys`, to a cache [B K S H]."""
  if isinstance(cache, Scaled):
    coded, scale = _scaled(new)
    return Scaled(
      write_values(cache.values, coded, position), _write_scale(cache.scale, scale, position)
    )
  rows = jnp.arange(cache.shape[0])[:, None]
  index = _or_past_the_end(position, cache.shape[2])
  return cache.at[rows, :, index].set(new.astype(cache.dtype), mode="drop")


def _scaled(new: Float[Array, "B T K H"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K"]]:
  """In FP8, each head of each token with a scale of its own."""
  flat = new.reshape(-1, new.shape[-1])
  coded, scale = quantize(finite(flat), OCP._replace(block=(1, new.shape[-1])))
  return coded.reshape(new.shape), scale.reshape(new.shape[:-1])


def _write_scale(
  cache: Float[Array, "B K S"], new: Float[Array, "B T K"], position: Int[Array, "B T"]
) -> Float[Array, "B K S"]:
  rows = jnp.arange(cache.shape[0])[:, None]
  return cache.at[rows, :, _or_past_the_end(position, cache.shape[2])].set(new, mode="drop")


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


@flax.struct.dataclass
class _Seen:
  """What decides which keys a query sees; T a multiple of the block."""

  sample: Int[Array, "B T"]
  parent: Int[Array, "B T"]
  window: Window | None


@flax.struct.dataclass
class _Columns:
  """The key blocks that each query block needs in any row: two ranges, and the diagonal ends the
  second.
  """

  parents: Int[Array, "T/block"]  # where the first begins
  of_parents: Int[Array, "T/block"]  # how many it has
  own: Int[Array, "T/block"]  # where the second begins, after the first has ended

  def count(self, row: Int[Array, ""]) -> Int[Array, ""]:
    return self.of_parents[row] + row + 1 - self.own[row]

  def at(self, row: Int[Array, ""], index: Int[Array, ""]) -> Int[Array, ""]:
    before = self.of_parents[row]
    return jnp.where(index < before, self.parents[row] + index, self.own[row] + index - before)


def _columns_of(seen: _Seen, block: int, *, continued: bool) -> _Columns:
  """Args: continued: whether any sample may have a parent other than itself."""
  sample, parent, window = seen.sample, seen.parent, seen.window
  rows, length = sample.shape
  index = jnp.arange(length, dtype=jnp.int32)[None]
  before = jnp.pad(sample[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  start = jax.lax.cummax(jnp.where(sample != before, index, 0), axis=1)
  if window is not None:  # a sample is contiguous, so its positions count as the row does
    start = jnp.maximum(start, index - window.size + 1)
  start = jnp.where(sample < 0, index, start)

  def of_blocks(reduce: Callable[..., Array], x: Array) -> Array:
    return reduce(x.reshape(rows, -1, block), axis=(0, 2)) // block

  own = of_blocks(jnp.min, start)
  if not continued:
    return _Columns(jnp.zeros_like(own), jnp.zeros_like(own), own)
  first, last = jax.vmap(_runs)(sample, parent)
  if window is not None:
    of_first = jnp.take_along_axis(window.position, first, axis=1)
    first = jnp.maximum(first, first + window.position - window.size + 1 - of_first)
  there = (parent != sample) & (sample >= 0) & (first <= last)
  parents = of_blocks(jnp.min, jnp.where(there, first, length))
  last = jnp.minimum(of_blocks(jnp.max, jnp.where(there, last, -block)), own - 1)
  return _Columns(parents, jnp.maximum(last - parents + 1, 0), own)


def _runs(sample: Int[Array, "T"], ids: Int[Array, "T"]) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
  """Where the contiguous sample of each id begins and ends; (T, -1) of one that is not there."""
  order = jnp.argsort(sample, stable=True).astype(jnp.int32)
  sort = sample[order]
  left, right = (jnp.searchsorted(sort, ids, side=side) for side in ("left", "right"))
  there = left < right
  first = order[jnp.minimum(left, sample.shape[0] - 1)]
  last = order[jnp.maximum(right - 1, 0)]
  return jnp.where(there, first, sample.shape[0]), jnp.where(there, last, -1)


def _part(x: Array, number: Int[Array, ""], block: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis)


def _block_mask(
  seen: _Seen, row: Int[Array, ""], column: Int[Array, ""], block: int
) -> Bool[Array, "B block block"]:
  within = jnp.arange(block)
  causal = (row * block + within)[:, None] >= (column * block + within)[None, :]
  queries = _part(seen.sample, row, block, 1), _part(seen.parent, row, block, 1)
  mask = _visible(*queries, _part(seen.sample, column, block, 1)) & causal[None]
  if seen.window is not None:
    position = seen.window.position
    near = _part(position, row, block, 1), _part(position, column, block, 1)
    mask &= _near(*near, seen.window.size)
  return mask


def _blocks(x: Array, axis: int, block: int) -> Array:
  """[... T ...] -> [T/block ... block ...]: a block's numbers lie together in memory."""
  shape = x.shape
  cut = x.reshape(*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
  return jnp.moveaxis(cut, axis, 0)


def _joined(blocks: Array, axis: int) -> Array:
  """What `_blocks` cut, whole again."""
  moved = jnp.moveaxis(blocks, 0, axis)
  shape = moved.shape
  return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_Kept = tuple[Array, Array, Array, _Seen, _Columns, Array, Array]


# In what follows T and S are within a block, and n counts blocks.
@jax.custom_vjp
def _blockwise(
  query: Float[Array, "n B K G T H"],
  key: Float[Array, "n B K S H"],
  value: Float[Array, "n B K S H"],
  seen: _Seen,
  columns: _Columns,
) -> Float[Array, "n B K G T H"]:
  return _blockwise_forward(query, key, value, seen, columns)[0]


def _blockwise_forward(
  query: Array, key: Array, value: Array, seen: _Seen, columns: _Columns
) -> tuple[Array, _Kept]:
  """Online softmax over key blocks; keeps the log of each row's sum for the backward pass."""
  block, scale = query.shape[-2], query.shape[-1] ** -0.5
  turned = jnp.swapaxes(key, -1, -2)

  def row_block(row: Array) -> tuple[Array, Array]:
    queries = query[row]

    def column_block(index: Array, carry: Carry) -> Carry:
      mixed, total, peak = carry
      column = columns.at(row, index)
      mask = _block_mask(seen, row, column, block)[:, None, None]
      scores = _product("bkgth,bkhs->bkgts", queries, turned[column]) * scale
      scores = jnp.where(mask, scores, _LOW)
      new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
      weight = jnp.exp(scores - new_peak)
      shrink = jnp.exp(peak - new_peak)
      added = _product("bkgts,bksh->bkgth", weight.astype(value.dtype), value[column])
      total = total * shrink + jnp.sum(weight, axis=-1, keepdims=True)
      return mixed * shrink + added, total, new_peak

    zeros = jnp.zeros((*queries.shape[:-1], value.shape[-1]), jnp.float32)
    ones = zeros[..., :1]
    with _triangle(query):
      mixed, total, peak = jax.lax.fori_loop(
        0, columns.count(row), column_block, (zeros, ones, ones + _LOWEST_PEAK)
      )
    safe = jnp.where(total > 0, total, 1.0)
    log_total = jnp.where(total > 0, peak + jnp.log(safe), 0.0)
    return (mixed / safe).astype(query.dtype), log_total[..., 0]

  mixed, log_total = jax.lax.map(row_block, jnp.arange(query.shape[0]))
  mixed, log_total = (checkpoint_name(x, MIXED) for x in (mixed, log_total))
  return mixed, (query, key, value, seen, columns, mixed, log_total)


def _blockwise_backward(
  kept: _Kept, mixed_grad: Float[Array, "n B K G T H"]
) -> tuple[Array, Array, Array, None, None]:
  """Recomputes each block's weights from the kept normalisers, in one pass over the blocks needed.

  Scores are [S T], keys first, and so is the gradient of queries: then no product has to turn a
  matrix of scores, which a CPU does element by element across memory.
  """
  query, key, value, seen, columns, mixed, log_total = kept
  block, scale = query.shape[-2], query.shape[-1] ** -0.5
  turned = jnp.swapaxes(key, -1, -2)

  def row_block(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
    queries, grads = query[row], mixed_grad[row]
    queries_turned = jnp.einsum("bkgth->bkhgt", queries)
    grads_turned = jnp.einsum("bkgth->bkhgt", grads)
    inner = _product("bkgth,bkgth->bkgt", grads, mixed[row])[:, :, None]
    log_totals = log_total[row][:, :, None]

    def column_block(index: Array, carry: Carry) -> Carry:
      query_grad, key_grad, value_grad = carry
      column = columns.at(row, index)
      mask = jnp.swapaxes(_block_mask(seen, row, column, block), 1, 2)[:, None, :, None]
      scores = _product("bksh,bkhgt->bksgt", key[column], queries_turned) * scale
      weight = jnp.exp(jnp.where(mask, scores - log_totals, _LOW))
      weight_grad = _product("bksh,bkhgt->bksgt", value[column], grads_turned)
      score_grad = (weight * (weight_grad - inner) * scale).astype(query.dtype)
      of_value = _product("bksgt,bkgth->bksh", weight.astype(query.dtype), grads)
      of_key = _product("bksgt,bkgth->bksh", score_grad, queries)
      return (
        query_grad + _product("bkhs,bksgt->bkhgt", turned[column], score_grad),
        _added(key_grad, column, of_key),
        _added(value_grad, column, of_value),
      )

    start = jnp.zeros(queries_turned.shape, jnp.float32), *carry
    with _triangle(query):
      query_grad, of_keys, of_values = jax.lax.fori_loop(0, columns.count(row), column_block, start)
    turned_back = jnp.einsum("bkhgt->bkgth", query_grad).astype(query.dtype)
    return (of_keys, of_values), turned_back

  zeros = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
  (key_grad, value_grad), query_grad = jax.lax.scan(row_block, zeros, jnp.arange(query.shape[0]))
  return query_grad, key_grad.astype(key.dtype), value_grad.astype(value.dtype), None, None


def _triangle(query: Float[Array, "n ..."]) -> AbstractContextManager[Any]:
  """Says to `jaxpr_cost` how many blocks of keys a block of queries has in a row of one sample."""
  return jax.named_scope(f"triangle_of_{len(query)}_blocks")


def _added(blocks: Array, number: Int[Array, ""], more: Array) -> Array:
  """With `more` added to one block, in place."""
  return jax.lax.dynamic_update_index_in_dim(blocks, blocks[number] + more, number, 0)


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
