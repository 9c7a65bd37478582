"""Attention of many query heads over one key that is also the value: a window of recent positions,
and beyond it blocks of positions, each compressed to one key (DeepSeek V4, as transformers has it).

Blocks count from a sample's beginning, so none straddles two samples of a row, and a query sees
those whose last position it has reached. Where blocks are many, an indexer leaves each query those
it scores highest; it chooses and has no gradient. Sinks take a share of each softmax. Axis letters
as in `layers`; C slots for blocks, X positions of a block, W the width of its projections (H, or 2H
where blocks overlap), Q the latent of queries, J heads and I dimensions of the indexer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import layers
from agentrl_jax.models.attention import MIXED
from agentrl_jax.models.layers import RopeScaling, Rotation
from agentrl_jax.models.model import param

_QUERIES = 128  # of a row whose scores are held at once
_LOW = -1e30  # masked scores: finite, so that no gradient is inf - inf
_NONE = -1  # the sample, and the number, of a slot without a block


@dataclasses.dataclass(frozen=True)
class Sight:
  """What of its past a layer sees, and how positions are told apart there."""

  window: int  # positions seen one by one, the query's own included
  block: int | None  # positions compressed to one key; None: nothing beyond the window
  kept: int | None  # blocks that the indexer leaves to a query; None: all of them
  rotary_dim: int  # of each head's dimensions the last so many are rotated
  rope_theta: float
  rope_scaling: RopeScaling | None
  norm_epsilon: float

  def rotation(self, position: Int[Array, "B T"]) -> Rotation:
    return layers.rotation(position, self.rotary_dim, self.rope_theta, self.rope_scaling)


@flax.struct.dataclass
class Compressor:
  """A block's key is the mean of its positions' keys, weighted by the softmax of their gates, for
  each dimension on its own; then normalised, and rotated as the block's first position is.

  Where W is 2H, blocks overlap: the first half of each position's key and gate counts in the next
  block, the second in its own.
  """

  key: Float[Array, "D W"]
  gate: Float[Array, "D W"]
  place_bias: Float[Array, "X W"]  # of the gates, by the place in the block
  norm: Float[Array, "H"]

  @classmethod
  def abstract(
    cls, depth: int, embed: int, head_dim: int, block: int, *, overlap: bool
  ) -> "Compressor":
    width = 2 * head_dim if overlap else head_dim
    matrix = param((depth, embed, width), ("layers", "embed", None), layers.scaled_normal)
    return cls(
      key=matrix,
      gate=matrix,
      place_bias=param((depth, block, width), ("layers", None, None), layers.zeros),
      norm=param((depth, head_dim), ("layers", None), layers.ones),
    )


@flax.struct.dataclass
class Indexer:
  """Scores blocks by keys of its own: the sum over heads of a weight times relu(query . key)."""

  compressor: Compressor
  query: Float[Array, "Q J*I"]
  weight: Float[Array, "D J"]


@flax.struct.dataclass
class Attention:
  """Queries through a latent, the one key, sinks, and an output in groups of heads; what a layer
  does not have is None.
  """

  query_down: Float[Array, "D Q"]
  query_norm: Float[Array, "Q"]
  query: Float[Array, "Q N*H"]
  key: Float[Array, "D H"]
  key_norm: Float[Array, "H"]
  sinks: Float[Array, "N"]  # in each head's softmax, the logit of what is not mixed
  group: Float[Array, "N*H/G G*R"]  # each group of heads by itself, to R dimensions
  output: Float[Array, "G*R D"]
  compressor: Compressor | None
  indexer: Indexer | None


@flax.struct.dataclass
class Blocks:
  """Which positions the slots of a row stand for."""

  first: Int[Array, "B C"]  # where along the row the block begins
  number: Int[Array, "B C"]  # of the block in its sample
  sample: Int[Array, "B C"]


def blocks_of(sample: Int[Array, "B T"], position: Int[Array, "B T"], size: int) -> Blocks:
  """Those that end in packed rows, in as many slots as there can be; a sample is contiguous."""
  length = sample.shape[1]
  start = jnp.pad(sample, ((0, 0), (size - 1, 0)), constant_values=_NONE)[:, :length]
  ends = (sample >= 0) & (start == sample) & (position % size == size - 1)
  last = jnp.argsort(~ends, axis=1, stable=True)[:, : length // size].astype(jnp.int32)
  there = jnp.take_along_axis(ends, last, axis=1)

  def at_last(x: Array) -> Array:
    return jnp.where(there, jnp.take_along_axis(x, last, axis=1), _NONE)

  return Blocks(last - (size - 1), at_last(position // size), at_last(sample))


def projected(
  weights: Compressor, x: Float[Array, "B T D"], matmul: layers.Matmul
) -> Float[Array, "B T 2*W"]:
  """Each position's key, then its gate, before the place in a block is known."""
  return jnp.concatenate([matmul(x, weights.key), matmul(x, weights.gate)], axis=-1)


def compress(
  weights: Compressor, made: Float[Array, "B T 2*W"], blocks: Blocks, sight: Sight
) -> Float[Array, "B C H"]:
  """The keys of blocks, of what `projected` made; of a slot without one, finite and meaningless."""
  key, gate = jnp.split(made.astype(jnp.float32), 2, axis=-1)
  size, width = weights.place_bias.shape
  dim = weights.norm.shape[-1]
  bias = weights.place_bias.astype(jnp.float32)

  def part(x: Array, half: slice, first: Array) -> Array:
    return _gathered(x[..., half], first, size)

  def gates(half: slice, first: Array) -> Array:
    return part(gate, half, first) + bias[None, None, :, half]

  own = slice(width - dim, width)
  keys, weight = part(key, own, blocks.first), gates(own, blocks.first)
  if width > dim:
    early, before = slice(0, dim), blocks.first - size
    there = (blocks.number >= 1)[:, :, None, None]
    keys = jnp.concatenate([part(key, early, before), keys], axis=2)
    weight = jnp.concatenate([jnp.where(there, gates(early, before), _LOW), weight], axis=2)
  mean = jnp.sum(keys * jax.nn.softmax(weight, axis=2), axis=2)
  normed = layers.wide_norm(mean, weights.norm, sight.norm_epsilon)
  by = sight.rotation(jnp.maximum(blocks.number, 0) * size)
  return turn(normed[:, :, None], by)[:, :, 0].astype(made.dtype)


def _gathered(
  x: Float[Array, "B T F"], first: Int[Array, "B C"], size: int
) -> Float[Array, "B C X F"]:
  """Runs of `size` positions; an index outside the row takes its nearest position."""
  index = first[:, :, None] + jnp.arange(size, dtype=first.dtype)[None, None]
  flat = jnp.clip(index, 0, x.shape[1] - 1).reshape(len(x), -1, 1)
  return jnp.take_along_axis(x, flat, axis=1).reshape(*index.shape, x.shape[-1])


def turn(x: Float[Array, "B T N H"], by: Rotation, *, back: bool = False) -> Array:
  """Rotates the pairs (2i, 2i + 1) of each head's last R dimensions, or back."""
  sin = -by.sin if back else by.sin
  cos, sin = by.cos[:, :, None], sin[:, :, None]
  rest, turned = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
  wide = turned.astype(jnp.float32)
  first, second = wide[..., ::2], wide[..., 1::2]
  pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return jnp.concatenate([rest, pairs.reshape(turned.shape).astype(x.dtype)], axis=-1)


@flax.struct.dataclass
class _Looking:
  """What of queries decides which blocks they see."""

  position: Int[Array, "B T"]  # within the sample
  sample: Int[Array, "B T"]
  index_query: Float[Array, "B T J I"] | None
  index_weight: Float[Array, "B T J"] | None


@flax.struct.dataclass
class _Past:
  """Compressed keys of a row, or of a cache."""

  key: Float[Array, "B C H"]
  index_key: Float[Array, "B C I"] | None
  number: Int[Array, "B C"]
  sample: Int[Array, "B C"]


def _indexed(
  weights: Indexer | None,
  x: Float[Array, "B T D"],
  latent: Float[Array, "B T Q"],
  by: Rotation,
  matmul: layers.Matmul,
) -> tuple[Array | None, Array | None]:
  """The indexer's queries and the weights of its heads."""
  if weights is None:
    return None, None
  heads = matmul(x, weights.weight)
  query = matmul(latent, weights.query).reshape(*heads.shape, -1)
  return turn(query, by), heads


def _frozen(tree: Any) -> Any:
  """What only chooses learns nothing from the choice."""
  return jax.tree.map(jax.lax.stop_gradient, tree)


def _seen(looking: _Looking, past: _Past, sight: Sight) -> Bool[Array, "B T C"]:
  """The blocks each query sees: of its sample, ended, and left by the indexer."""
  assert sight.block is not None
  ended = ((looking.position + 1) // sight.block)[:, :, None]
  number, sample = past.number[:, None], past.sample[:, None]
  seen = (number >= 0) & (number < ended) & (sample == looking.sample[:, :, None])
  if sight.kept is None or past.key.shape[1] <= sight.kept:
    return seen
  assert looking.index_query is not None and looking.index_weight is not None
  assert past.index_key is not None
  score = jnp.einsum(
    "btji,bci->btjc",
    looking.index_query.astype(jnp.float32),
    past.index_key.astype(jnp.float32),
  )
  weight = looking.index_weight.astype(jnp.float32)
  score = jnp.sum(jax.nn.relu(score) * weight[..., None], axis=2)  # constants change no order
  return _highest(score, seen, sight.kept)


def _highest(
  score: Float[Array, "B T C"], seen: Bool[Array, "B T C"], count: int
) -> Bool[Array, "B T C"]:
  """Of those seen, the `count` that score highest; of equal ones, the first."""
  score = jnp.where(seen, score, -jnp.inf)
  least = jax.lax.top_k(score, count)[0][..., -1:]
  above, equal = score > least, score == least
  left = count - jnp.sum(above, axis=-1, keepdims=True)
  return seen & (above | (equal & (jnp.cumsum(equal, axis=-1) <= left)))


def _attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S H"],
  mask: Bool[Array, "B T S"],
  sinks: Float[Array, "N"],
) -> Float[Array, "B T N H"]:
  """All scores at once, in float32; a query that sees nothing gets zeros."""
  scores = jnp.einsum("btnh,bsh->bnts", query, key, preferred_element_type=jnp.float32)
  mask = mask[:, None]
  scores = jnp.where(mask, scores * query.shape[-1] ** -0.5, _LOW)
  sink = sinks.astype(jnp.float32)[None, :, None, None]
  # A constant shift per row: the softmax does not depend on it, so neither does the gradient.
  peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
  peak = jax.lax.stop_gradient(peak)
  weight = jnp.where(mask, jnp.exp(scores - peak), 0.0)
  total = jnp.sum(weight, axis=-1, keepdims=True) + jnp.exp(sink - peak)
  return jnp.einsum("bnts,bsh->btnh", (weight / total).astype(key.dtype), key)


# (weights, x [B T D], latent [B T Q], query [B T N H], key [B T H]) -> (mixed [B T N H], kept)
See = Callable[[Attention, Array, Array, Array, Array], tuple[Array, Any]]


def attention(
  weights: Attention,
  x: Float[Array, "B T D"],
  by: Rotation,
  see: See,
  *,
  heads: int,
  groups: int,
  norm_epsilon: float,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  """The output projection, without a residual, and what `see` kept.

  Args:
    by: of the positions of x, in the way of this kind of layer.
    see: `see_row` or `see_cache`, all but its last five arguments given.
  """
  latent = layers.wide_norm(matmul(x, weights.query_down), weights.query_norm, norm_epsilon)
  query = matmul(latent, weights.query).reshape(*x.shape[:2], heads, -1)
  ones = jnp.ones(query.shape[-1:], jnp.float32)
  query = turn(layers.wide_norm(query, ones, norm_epsilon), by)
  key = layers.wide_norm(matmul(x, weights.key), weights.key_norm, norm_epsilon)
  key = turn(key[:, :, None], by)[:, :, 0]
  mixed, kept = see(weights, x, latent, query, key)
  # The value was rotated with the key: turned back, it depends on the distance alone.
  mixed = turn(mixed, by, back=True).reshape(*x.shape[:2], groups, -1)
  group = layers.plain(weights.group, x.dtype).reshape(mixed.shape[-1], groups, -1)
  made = jnp.einsum("btgi,igr->btgr", mixed, group)
  return matmul(made.reshape(*x.shape[:2], -1), weights.output), kept


def see_row(
  sight: Sight,
  sample: Int[Array, "B T"],
  position: Int[Array, "B T"],
  by: Rotation,
  matmul: layers.Matmul,
  weights: Attention,
  x: Float[Array, "B T D"],
  latent: Float[Array, "B T Q"],
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T H"],
  *,
  queries: int = _QUERIES,
) -> tuple[Float[Array, "B T N H"], None]:
  """Of packed rows, some queries at a time, whose scores are computed again for the gradient:
  memory grows with T, not with its square.
  """
  past = None
  looking = _Looking(position, sample, None, None)
  if sight.block is not None and x.shape[1] >= sight.block:
    assert weights.compressor is not None
    blocks = blocks_of(sample, position, sight.block)
    made = compress(weights.compressor, projected(weights.compressor, x, matmul), blocks, sight)
    index_key = None
    if weights.indexer is not None and sight.kept is not None and made.shape[1] > sight.kept:
      indexer, frozen, frozen_latent = _frozen((weights.indexer, x, latent))
      looking = _Looking(position, sample, *_indexed(indexer, frozen, frozen_latent, by, matmul))
      pooled = projected(indexer.compressor, frozen, matmul)
      index_key = compress(indexer.compressor, pooled, blocks, sight)
    past = _Past(made, index_key, blocks.number, blocks.sample)
  mixed = _by_parts(sight, weights.sinks, looking, past, query, key, min(queries, x.shape[1]))
  return checkpoint_name(mixed, MIXED), None


def _by_parts(
  sight: Sight,
  sinks: Float[Array, "N"],
  looking: _Looking,
  past: _Past | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T H"],
  size: int,
) -> Float[Array, "B T N H"]:
  """`size` queries at a time, each with the keys of its window and all compressed ones."""
  length = query.shape[1]
  count = -(-length // size)
  reach = min(-(-(sight.window - 1) // size), count - 1)  # parts before its own that a part sees

  def cut(x: Array, fill: int = 0) -> Array:
    rest = [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, [(0, 0), (0, count * size - length), *rest], constant_values=fill)
    return jnp.moveaxis(padded.reshape(len(x), count, size, *x.shape[2:]), 1, 0)

  def with_earlier(x: Array, fill: int = 0) -> Array:
    parts = cut(x, fill)
    empty = jnp.full((reach, *parts.shape[1:]), fill, x.dtype)
    whole = jnp.concatenate([empty, parts])
    return jnp.concatenate([whole[j : j + count] for j in range(reach + 1)], axis=2)

  ago = jnp.arange(size)[:, None] + reach * size - jnp.arange((reach + 1) * size)[None]
  near = (ago >= 0) & (ago < sight.window)

  def part(of: tuple[Array, Array, Array, _Looking]) -> Array:
    queries, keys, samples, looks = of
    own = looks.sample[:, :, None]
    mask = near[None] & (own == samples[:, None]) & (own >= 0)
    if past is not None:
      keys = jnp.concatenate([keys, past.key], axis=1)
      mask = jnp.concatenate([mask, _seen(looks, past, sight)], axis=2)
    return _attend(queries, keys, mask, sinks)

  looks = jax.tree.map(cut, looking)
  looks = looks.replace(sample=cut(looking.sample, _NONE))
  parts = cut(query), with_earlier(key), with_earlier(looking.sample, _NONE), looks
  if count == 1:
    mixed = part(jax.tree.map(lambda x: x[0], parts))[None]
  else:
    mixed = jax.lax.map(jax.checkpoint(part), parts)
  whole = jnp.moveaxis(mixed, 0, 1).reshape(len(query), count * size, *query.shape[2:])
  return whole[:, :length]


@flax.struct.dataclass
class Compressed:
  """Of one compressor: the blocks of a row, and what the next ones will be made of."""

  key: Float[Array, "B 1 C H"]
  pending: Float[Array, "B 1 L 2*W"]  # of the last L positions, L = X - 1, or 2X - 1 with overlap


@flax.struct.dataclass
class Held:
  """The cache of one layer. Which entries count follows from the position of what is appended."""

  recent: Float[Array, "B 1 window-1 H"]  # keys of the last positions
  blocks: Compressed | None
  index: Compressed | None


def empty_cache(
  sight: Sight, rows: int, length: int, head_dim: int, index_dim: int, dtype: Any
) -> Held:
  """Of one layer, for rows of at most `length` positions."""

  def compressed(dim: int, overlap: bool) -> Compressed:
    assert sight.block is not None
    spans, width = (2, 2 * dim) if overlap else (1, dim)
    slots, pending = -(-length // sight.block), spans * sight.block - 1
    return Compressed(
      jnp.zeros((rows, 1, slots, dim), dtype), jnp.zeros((rows, 1, pending, 2 * width), dtype)
    )

  overlap = sight.kept is not None
  return Held(
    recent=jnp.zeros((rows, 1, sight.window - 1, head_dim), dtype),
    blocks=None if sight.block is None else compressed(head_dim, overlap),
    index=compressed(index_dim, overlap) if overlap else None,
  )


def see_cache(
  sight: Sight,
  held: Held,
  position: Int[Array, "B T"],
  by: Rotation,
  matmul: layers.Matmul,
  weights: Attention,
  x: Float[Array, "B T D"],
  latent: Float[Array, "B T Q"],
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T N H"], Held]:
  """Of rows that go on where the cache's end, or begin at position 0; -1, at the end, is padding,
  which leaves the cache as it is.
  """
  start = position[:, :1]  # -1 of a row that is all padding
  count = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)[:, None]
  keys, recent = _appended(held.recent, key, count)
  ago = (
    position[:, :, None] - (start - (sight.window - 1) + jnp.arange(keys.shape[1])[None])[:, None]
  )
  mask = (ago >= 0) & (ago < sight.window) & (ago <= position[:, :, None])
  kept = Held(recent, held.blocks, held.index)
  if held.blocks is not None:
    assert weights.compressor is not None
    add = functools.partial(_compressed_on, sight, start, count, x, matmul)
    blocks = add(weights.compressor, held.blocks)
    index, looks = None, (None, None)
    if held.index is not None:
      assert weights.indexer is not None
      index = add(weights.indexer.compressor, held.index)
      looks = _indexed(weights.indexer, x, latent, by, matmul)
    kept = Held(recent, blocks, index)
    number = jnp.broadcast_to(jnp.arange(blocks.key.shape[2])[None], (len(x), blocks.key.shape[2]))
    past = _Past(
      blocks.key[:, 0].astype(key.dtype),
      None if index is None else index.key[:, 0],
      number,
      jnp.zeros_like(number),
    )
    seen = _seen(_Looking(position, jnp.zeros_like(position), *looks), past, sight)
    keys = jnp.concatenate([keys, past.key], axis=1)
    mask = jnp.concatenate([mask, seen], axis=2)
  return _attend(query, keys, mask, weights.sinks), kept


def _appended(
  held: Float[Array, "B 1 L F"], new: Float[Array, "B T F"], count: Int[Array, "B 1"]
) -> tuple[Float[Array, "B L+T F"], Float[Array, "B 1 L F"]]:
  """What was held with what is new behind it, and the last L of the former and of `count` new."""
  whole = jnp.concatenate([held[:, 0].astype(new.dtype), new], axis=1)
  last = count + jnp.arange(held.shape[2])[None]
  return whole, jnp.take_along_axis(whole, last[..., None], axis=1)[:, None].astype(held.dtype)


def _compressed_on(
  sight: Sight,
  start: Int[Array, "B 1"],
  count: Int[Array, "B 1"],
  x: Float[Array, "B T D"],
  matmul: layers.Matmul,
  weights: Compressor,
  held: Compressed,
) -> Compressed:
  """With the blocks that end among the new positions, which begin at `start`."""
  size = sight.block
  assert size is not None
  whole, pending = _appended(held.pending, projected(weights, x, matmul), count)
  slots = -(-x.shape[1] // size)
  number = jnp.maximum(start, 0) // size + jnp.arange(slots)[None]
  first = number * size - start + held.pending.shape[2]
  key = compress(weights, whole, Blocks(first, number, jnp.zeros_like(number)), sight)
  ended = (start >= 0) & ((number + 1) * size <= start + count)
  place = jnp.where(ended, number, held.key.shape[2])  # past the end: not written
  rows = jnp.arange(len(x))[:, None]
  written = held.key.at[rows, 0, place].set(key.astype(held.key.dtype), mode="drop")
  return Compressed(written, pending)
