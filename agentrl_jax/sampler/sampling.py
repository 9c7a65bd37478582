"""One token a row from `softmax(logits / T)` over the whole vocabulary, without a pass to spare.

The vocabulary is cut into blocks; a block is drawn by its probability mass and then a token within
it by its share of the block, each by inverse CDF with a uniform of its own. That is exact, reads
the logits twice, and needs two random numbers a row where the Gumbel trick needs one for every
token.
"""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32


def request_key(engine_seed: int, request_seed: int) -> UInt32[np.ndarray, "2"]:
  """The random key of a request: a hash of two integers of any size."""
  digest = hashlib.blake2b(f"{engine_seed}/{request_seed}".encode(), digest_size=8).digest()
  return np.frombuffer(digest, np.uint32)


def uniforms(key: UInt32[Array, "R 2"], index: Int[Array, "R"]) -> Float[Array, "R 2"]:
  """Two uniforms in [0, 1) a row: a function of the row's key and token index alone."""

  def draw(row_key, row_index):
    typed = jax.random.wrap_key_data(row_key, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(typed, row_index), (2,), jnp.float32)

  return jax.vmap(draw)(key, index)


def sample(
  logits: Float[Array, "R V"], temperature: Float[Array, "R"], uniform: Float[Array, "R 2"]
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
  """Sampled ids (int32) and their log-probs (float32) under `log_softmax(logits / temperature)`.

  A row with temperature 0 takes its first largest logit and reports the log-prob at temperature 1.
  """
  rows, vocab = logits.shape
  width = _block_width(vocab)
  greedy = temperature == 0
  scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
  padded = jnp.pad(scaled, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
  blocks = padded.reshape(rows, -1, width)
  peak = jnp.max(blocks, axis=2)
  top = jnp.max(peak, axis=1)
  mass = jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=2)

  block = jnp.where(greedy, jnp.argmax(peak, axis=1), _inverse_cdf(mass, uniform[:, 0]))
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  shares = jnp.exp(inside - jnp.max(inside, axis=1, keepdims=True))
  offset = jnp.where(greedy, jnp.argmax(inside, axis=1), _inverse_cdf(shares, uniform[:, 1]))

  chosen = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
  logp = chosen - top - jnp.log(jnp.sum(mass, axis=1))
  return (block * width + offset).astype(jnp.int32), logp


def _block_width(vocab: int) -> int:
  """About sqrt(vocab), so that both draws are short; a multiple of 64 where that is large."""
  root = math.isqrt(vocab - 1) + 1
  return root if root < 64 else -(-root // 64) * 64


def _inverse_cdf(weight: Float[Array, "R N"], uniform: Float[Array, "R"]) -> Int[Array, "R"]:
  """First index whose cumulative weight exceeds uniform * total: never one of weight zero.

  uniform <= 1 - 2**-24, so the product rounds to less than the total and such an index exists.
  """
  cumulative = jnp.cumsum(weight, axis=1)
  target = uniform * cumulative[:, -1]
  return jnp.sum(cumulative <= target[:, None], axis=1)
