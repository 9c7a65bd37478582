"""Hidden states and an unembedding become log-probs and entropies, never a [B, T, V] array.

The only next-token shift of the code base is here. Only positions that are asked for cost anything,
as they move to the front of their row and the loop over columns ends where the fullest row ends.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

CHUNK_ELEMENTS = 1 << 24  # logits alive at once (float32: 64 MiB)
MIN_COLUMNS = 16


def token_logprobs(
  hidden: Float[Array, "B T D"],
  unembedding: Float[Array, "D V"],
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  temperature: float = 1.0,
  chunk: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Log-prob of each masked token and the entropy of the distribution it was drawn from.

  The distribution of `tokens[b, t]` is softmax(hidden[b, t - 1] @ unembedding / temperature), over
  the whole vocabulary, in float32.

  Args:
    hidden: final hidden states, after the last norm.
    unembedding: output head; may be sharded over V.
    tokens: the token streams.
    sample: ids of contiguous streams, -1 on padding; a stream's first token has no predecessor.
    mask: which tokens are wanted.
    temperature: the sampling temperature, > 0.
    chunk: columns a loop step handles (default: what keeps its logits within CHUNK_ELEMENTS).

  Returns:
    (logp, entropy) in nats, float32 [B T], exactly 0 (gradient too) where not asked for.
  """
  if not temperature > 0:
    raise ValueError(f"temperature is {temperature}, expected > 0")
  rows, length = tokens.shape
  if chunk is None:
    chunk = CHUNK_ELEMENTS // (rows * unembedding.shape[1])
    chunk = max(MIN_COLUMNS, chunk - chunk % MIN_COLUMNS)
  chunk = min(chunk, length)
  wanted = mask & has_previous(sample)
  # Wanted positions of a row take consecutive slots; the others fall off the end.
  slot = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1
  slots = length + -length % chunk
  column = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], wanted.shape)
  take = jnp.zeros((rows, slots), jnp.int32)
  take = take.at[jnp.arange(rows)[:, None], jnp.where(wanted, slot, slots)].set(column, mode="drop")
  valid = jnp.arange(slots)[None, :] < wanted.sum(1, dtype=jnp.int32)[:, None]
  target = jnp.take_along_axis(tokens, take, axis=1)
  source = jnp.maximum(take - 1, 0)
  compact = _compact(temperature, chunk, hidden, unembedding, source, target, valid)
  slot = jnp.maximum(slot, 0)
  logp, entropy = (jnp.where(wanted, jnp.take_along_axis(x, slot, axis=1), 0.0) for x in compact)
  return logp, entropy


def has_previous(sample: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Whether the position before belongs to the same stream."""
  before = jnp.pad(sample[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  return (sample >= 0) & (sample == before)


def previous(x: Float[Array, "B T *K"], sample: Int[Array, "B T"]) -> Float[Array, "B T *K"]:
  """x of the position before, 0 at a stream's first: what the state *before* token t says of it."""
  inner = ((0, 0),) * (x.ndim - 2)
  there = has_previous(sample).reshape(*sample.shape, *(1,) * len(inner))
  return jnp.where(there, jnp.pad(x[:, :-1], ((0, 0), (1, 0), *inner)), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compact(temperature, chunk, hidden, unembedding, source, target, valid):
  return _compact_forward(temperature, chunk, hidden, unembedding, source, target, valid)[0]


def _columns(array, i, chunk):
  return jax.lax.dynamic_slice_in_dim(array, i * chunk, chunk, axis=1)


def _logits(temperature, hidden, unembedding, source, valid):
  """([B C D] hidden states at `source`, [B C V] float32 scaled logits); zero where not valid."""
  picked = jnp.take_along_axis(hidden, source[..., None], axis=1)
  picked = jnp.where(valid[..., None], picked, jnp.zeros((), picked.dtype))
  head = unembedding.astype(hidden.dtype)
  logits = jnp.einsum("bcd,dv->bcv", picked, head, preferred_element_type=jnp.float32)
  return picked, logits / np.float32(temperature)


def _chunks(valid, chunk):
  fullest = valid.sum(1, dtype=jnp.int32).max()
  return (fullest + chunk - 1) // chunk


def _compact_forward(temperature, chunk, hidden, unembedding, source, target, valid):
  def body(i, carry):
    logp, entropy, lse = carry
    take = functools.partial(_columns, i=i, chunk=chunk)
    _, logits = _logits(temperature, hidden, unembedding, take(source), take(valid))
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, take(target)[..., None], axis=-1)[..., 0]
    spread = norm - jnp.einsum("bcv,bcv->bc", jnp.exp(logits - norm[..., None]), logits)
    ok = take(valid)
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
      old, jnp.where(ok, new, 0.0), i * chunk, axis=1
    )
    return put(logp, jnp.minimum(chosen - norm, 0.0)), put(entropy, spread), put(lse, norm)

  zero = jnp.zeros(source.shape, jnp.float32)
  logp, entropy, lse = jax.lax.fori_loop(0, _chunks(valid, chunk), body, (zero, zero, zero))
  return (logp, entropy), (hidden, unembedding, source, target, valid, entropy, lse)


def _compact_backward(temperature, chunk, residuals, cotangents):
  """d logits = [g (onehot - p) - h p (log p + H)] / temperature, recomputed a chunk at a time."""
  hidden, unembedding, source, target, valid, entropy, lse = residuals
  g_logp, g_entropy = (jnp.where(valid, g, 0.0) for g in cotangents)
  rows = jnp.arange(source.shape[0])[:, None]

  def body(i, carry):
    d_hidden, d_head = carry
    take = functools.partial(_columns, i=i, chunk=chunk)
    picked, logits = _logits(temperature, hidden, unembedding, take(source), take(valid))
    log_p = logits - take(lse)[..., None]
    g, h = take(g_logp)[..., None], take(g_entropy)[..., None]
    hit = jnp.arange(logits.shape[-1])[None, None, :] == take(target)[..., None]
    d_logits = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (
      g + h * (log_p + take(entropy)[..., None])
    )
    d_logits = jnp.where(take(valid)[..., None], d_logits, 0.0) / np.float32(temperature)
    d_logits = d_logits.astype(hidden.dtype)
    d_head += jnp.einsum("bcd,bcv->dv", picked, d_logits, preferred_element_type=jnp.float32)
    head = unembedding.astype(hidden.dtype)
    d_picked = jnp.einsum("bcv,dv->bcd", d_logits, head, preferred_element_type=jnp.float32)
    return d_hidden.at[rows, take(source)].add(d_picked), d_head

  start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(unembedding.shape, jnp.float32)
  d_hidden, d_head = jax.lax.fori_loop(0, _chunks(valid, chunk), body, start)
  none = [np.zeros(x.shape, jax.dtypes.float0) for x in (source, target, valid)]
  return d_hidden.astype(hidden.dtype), d_head.astype(unembedding.dtype), *none


_compact.defvjp(_compact_forward, _compact_backward)
