"""Causal attention within samples of packed rows, and over a key-value cache; float32 softmax,
grouped heads.

A position attends to itself and earlier positions of its row with the same sample id; padding (-1)
attends to nothing and gets zeros. Axis letters as in `layers`; G = N / K query heads share a key-
value head, S counts keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 128  # queries and keys a block; also what a masked block skipped saves
_PLAIN_LENGTH = 256  # up to here the whole [T T] score matrix is smaller than the blocks' overhead
_LOW = -1e30  # masked scores: finite, so that no gradient is inf - inf


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """The one place where an implementation of packed attention is chosen."""
  if query.shape[1] <= _PLAIN_LENGTH:
    return attend_plain(query, key, value, sample)
  return attend_blockwise(query, key, value, sample)


def attend_plain(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """All scores at once: memory grows with T squared."""
  length = query.shape[1]
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = _same_sample(sample, sample) & causal[None]
  mixed = _softmax_mix(_grouped(query, key.shape[2]), _heads_first(key), _heads_first(value), mask)
  return _ungrouped(mixed)


def attend_cache(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K S H"],
  value: Float[Array, "B K S H"],
  position: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """Attends to cache indices up to `position` (-1: to none)."""
  mask = jnp.arange(key.shape[2])[None, None, :] <= position[:, :, None]
  return _ungrouped(_softmax_mix(_grouped(query, key.shape[1]), key, value, mask))


def write(
  cache: Float[Array, "B K S H"], new: Float[Array, "B T K H"], position: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
  """Puts `new[b, t]` at index `position[b, t]` of row b; -1 and indices past the end write nothing."""
  rows, _, length, _ = cache.shape
  index = jnp.where(position < 0, length, position)  # past the end: a negative index would wrap
  return cache.at[jnp.arange(rows)[:, None], :, index].set(new.astype(cache.dtype), mode="drop")


def _same_sample(queries: Int[Array, "B T"], keys: Int[Array, "B S"]) -> Bool[Array, "B T S"]:
  return (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]


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
  query: Float[Array, "B K G T H"],
  key: Float[Array, "B K S H"],
  value: Float[Array, "B K S H"],
  mask: Bool[Array, "B T S"],
) -> Float[Array, "B K G T H"]:
  mask = mask[:, None, None]
  scores = jnp.where(mask, _scores(query, key), _LOW)
  # A constant shift per row: the softmax does not depend on it, so neither does the gradient.
  shift = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weight = jnp.where(mask, jnp.exp(scores - shift), 0.0)
  total = jnp.sum(weight, axis=-1, keepdims=True)
  weight = (weight / jnp.where(total > 0, total, 1.0)).astype(value.dtype)
  return jnp.einsum("bkgts,bksh->bkgth", weight, value)
