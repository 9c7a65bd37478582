"""Hidden states and an unembedding become log-probs and entropies, without a [B, T, V] array unless
a small one.

The only next-token shift of the code base is here. Only positions that are asked for cost anything,
as they move to the front of their row and the loop over columns ends where the fullest row ends.

On a mesh the head is gathered once for all columns, as a layer's weights are, and its gradient is
summed over devices once, after the loop.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

# Logits of a chunk on a device. Each chunk reads the whole head and its gradient's sum, so that an
# accelerator, whose memory is slow beside its products, wants large ones; a CPU wants its cache
# and little that is computed beyond the end of the fullest row.
CHUNK_ELEMENTS = {"cpu": 1 << 19}  # float32: 2 MiB
CHUNK_ELEMENTS_OF_ACCELERATORS = 1 << 26
MIN_POSITIONS = 128  # of a chunk, however large the vocabulary is
MIN_COLUMNS = 16
# All logits of a device are kept for the backward pass if they are no more than this: it begins
# with them, so that costs no memory at the peak. Of more it computes them again.
KEPT_ELEMENTS = 1 << 24  # float32: 64 MiB
_ANY = PartitionSpec.UNCONSTRAINED  # the vocabulary lies as the head's does


def token_logprobs(
  hidden: Float[Array, "B T D"],
  unembedding: Float[Array, "D V"],
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  temperature: float = 1.0,
  chunk: int | None = None,
  spread: NamedSharding | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Log-prob of each masked token and the entropy of the distribution it was drawn from.

  The distribution of `tokens[b, t]` is softmax(hidden[b, t - 1] @ unembedding / temperature), over
  the whole vocabulary, in float32.

  Args:
    hidden: final hidden states, after the last norm.
    unembedding: output head; may be sharded over D and V.
    tokens: the token streams.
    sample: ids of contiguous streams, -1 on padding; a stream's first token has no predecessor.
    mask: which tokens are wanted.
    temperature: the sampling temperature, > 0.
    chunk: columns a loop step handles (default: what keeps its logits within CHUNK_ELEMENTS on each
      device, by the platform of the mesh, or MIN_POSITIONS).
    spread: how the [B T] arrays lie on a mesh: rows over some of its axes, positions over others.
      None on one device.

  Returns:
    (logp, entropy) in nats, float32 [B T], exactly 0 (gradient too) where not asked for.
  """
  if not temperature > 0:
    raise ValueError(f"temperature is {temperature}, expected > 0")
  rows, length = tokens.shape
  parts = _parts(spread)
  if chunk is None:
    unit = MIN_COLUMNS * parts.columns
    devices = None if spread is None else spread.mesh.devices
    platform = "cpu" if devices is None else devices.flat[0].platform
    elements = CHUNK_ELEMENTS.get(platform, CHUNK_ELEMENTS_OF_ACCELERATORS)
    positions = max(MIN_POSITIONS, elements // unembedding.shape[1])
    chunk = positions * parts.rows * parts.columns // rows
    chunk = max(unit, chunk - chunk % unit)
  chunk = min(chunk, length)
  if rows % parts.rows or chunk % parts.columns:
    raise ValueError(
      f"{rows} rows in chunks of {chunk} columns, expected multiples of the {parts.rows} x "
      f"{parts.columns} devices they are spread over"
    )
  wanted = mask & has_previous(sample)
  # Wanted positions of a row take consecutive slots; the others fall off the end.
  slot = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1
  slots = length + -length % chunk
  column = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], wanted.shape)
  take = jax.vmap(lambda into, where, what: into.at[where].set(what, mode="drop"))(
    jnp.zeros((rows, slots), jnp.int32), jnp.where(wanted, slot, slots), column
  )
  valid = jnp.arange(slots)[None, :] < wanted.sum(1, dtype=jnp.int32)[:, None]
  target = jnp.take_along_axis(tokens, take, axis=1)
  source = jnp.maximum(take - 1, 0)
  # The slot of the token after, if that is wanted: where a hidden state's gradient is found.
  after = jnp.pad(jnp.where(wanted, slot, -1)[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
  places = source, target, valid, after
  compact = _compact(temperature, chunk, parts, hidden, unembedding, *places)
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


@dataclasses.dataclass(frozen=True)
class _Parts:
  """How rows [B] and the columns of a chunk [C] are cut: R and S parts, each on devices of its own.

  Arrays of all parts keep R and S as axes, so that what is a sum over rows and columns can stay a
  sum for each part until the loop has ended.
  """

  rows: int = 1
  columns: int = 1
  spread: NamedSharding | None = None

  def place(self, x: Array, *axes: Any) -> Array:
    """x with its first axes over these axes of the mesh, the others whole."""
    if self.spread is None:
      return x
    sharding = NamedSharding(self.spread.mesh, PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, sharding)

  @property
  def axes(self) -> tuple[Any, Any]:
    """Mesh axes of rows and of columns."""
    named = () if self.spread is None else tuple(self.spread.spec)
    rows, columns, *_ = *named, None, None
    return rows, columns

  def cut(self, x: Array) -> Array:
    """[B C ...] to [R b S c ...]."""
    rows, columns = self.axes
    shape = self.rows, -1, self.columns, x.shape[1] // self.columns, *x.shape[2:]
    return self.place(x.reshape(shape), rows, None, columns)

  def join(self, x: Array) -> Array:
    """[R b S c ...] to [B C ...], the columns everywhere."""
    rows, columns = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
    return self.place(x.reshape(rows, columns, *x.shape[4:]), self.axes[0])


def _parts(spread: NamedSharding | None) -> _Parts:
  if spread is None or spread.mesh.size == 1:
    return _Parts()

  def count(axes: Any) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(spread.mesh.shape[name] for name in names)

  rows, columns = _Parts(spread=spread).axes
  return _Parts(count(rows), count(columns), spread)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _compact(temperature, chunk, parts, hidden, unembedding, source, target, valid, after):
  del after
  places = source, target, valid
  return _over_compact(temperature, chunk, parts, hidden, unembedding, *places, keep=False)[0]


def _columns(array, i, chunk):
  return jax.lax.dynamic_slice_in_dim(array, i * chunk, chunk, axis=1)


def _gathered(parts, hidden, unembedding):
  """(each row's hidden states, the head in their dtype) where the loop over columns reads them."""
  head = parts.place(unembedding.astype(hidden.dtype), None, _ANY)
  return parts.place(hidden, parts.axes[0]), head


def _picked(parts, hidden, source, valid):
  """[R b S c D] hidden states at `source`, zero where not valid."""
  picked = jnp.take_along_axis(hidden, source[..., None], axis=1)
  return parts.cut(jnp.where(valid[..., None], picked, jnp.zeros((), picked.dtype)))


def _logits(temperature, picked, head):
  """[R b S c V] float32, scaled."""
  logits = jnp.einsum("rbscd,dv->rbscv", picked, head, preferred_element_type=jnp.float32)
  return logits / np.float32(temperature)


def _over_chunks(valid, chunk, body, start):
  """Runs `body` for each chunk of columns until the fullest row ends."""
  fullest = valid.sum(1, dtype=jnp.int32).max()
  most = -(-valid.shape[1] // chunk)
  with jax.named_scope(f"at_most_{most}_iterations"):  # read by `jaxpr_cost`
    return jax.lax.fori_loop(0, (fullest + chunk - 1) // chunk, body, start)


def _over_compact(temperature, chunk, parts, hidden, unembedding, source, target, valid, *, keep):
  """((log-probs, entropies), log of the partition function, logits of all chunks or None)."""
  states, head = _gathered(parts, hidden, unembedding)

  def body(i, carry):
    of_slots, kept = carry
    take = functools.partial(_columns, i=i, chunk=chunk)
    logits = _logits(temperature, _picked(parts, states, take(source), take(valid)), head)
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, parts.cut(take(target))[..., None], axis=-1)[..., 0]
    spread = norm - jnp.einsum("rbscv,rbscv->rbsc", jnp.exp(logits - norm[..., None]), logits)
    ok = take(valid)
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
      old, jnp.where(ok, parts.join(new), 0.0), i * chunk, axis=1
    )
    if kept is not None:
      kept = jax.lax.dynamic_update_index_in_dim(kept, logits, i, 0)
    return tuple(map(put, of_slots, (jnp.minimum(chosen - norm, 0.0), spread, norm))), kept

  zero = jnp.zeros(source.shape, jnp.float32)
  kept = None
  if keep:
    rows, slots = source.shape
    cut = parts.rows, rows // parts.rows, parts.columns, chunk // parts.columns
    kept = jnp.zeros((slots // chunk, *cut, head.shape[1]), jnp.float32)
    kept = parts.place(kept, None, parts.axes[0], None, parts.axes[1], None, _ANY)
  (logp, entropy, lse), kept = _over_chunks(valid, chunk, body, ((zero, zero, zero), kept))
  return (logp, entropy), lse, kept


def _compact_forward(temperature, chunk, parts, hidden, unembedding, source, target, valid, after):
  on_a_device = source.size * unembedding.shape[1] // (parts.rows * parts.columns)
  places = source, target, valid
  (logp, entropy), lse, kept = _over_compact(
    temperature, chunk, parts, hidden, unembedding, *places, keep=on_a_device <= KEPT_ELEMENTS
  )
  return (logp, entropy), (hidden, unembedding, *places, after, entropy, lse, kept)


def _compact_backward(temperature, chunk, parts, residuals, cotangents):
  """d logits = [g (onehot - p) - h p (log p + H)] / temperature, a chunk at a time."""
  hidden, unembedding, source, target, valid, after, entropy, lse, kept = residuals
  g_logp, g_entropy = (jnp.where(valid, g, 0.0) for g in cotangents)
  states, head = _gathered(parts, hidden, unembedding)

  def body(i, carry):
    d_states, d_head = carry
    take = functools.partial(_columns, i=i, chunk=chunk)
    each = lambda x: parts.cut(take(x))[..., None]  # noqa: E731
    picked = _picked(parts, states, take(source), take(valid))
    logits = _logits(temperature, picked, head) if kept is None else kept[i]
    log_p = logits - each(lse)
    g, h = each(g_logp), each(g_entropy)
    hit = jnp.arange(logits.shape[-1])[None, None, None, None] == each(target)
    d_logits = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + h * (log_p + each(entropy)))
    d_logits = jnp.where(each(valid), d_logits, 0.0) / np.float32(temperature)
    d_logits = d_logits.astype(hidden.dtype)
    d_head += jnp.einsum("rbscd,rbscv->rsdv", picked, d_logits, preferred_element_type=jnp.float32)
    d_picked = jnp.einsum("rbscv,dv->rbscd", d_logits, head, preferred_element_type=jnp.float32)
    d_picked = parts.join(d_picked.astype(hidden.dtype))
    return jax.lax.dynamic_update_slice_in_dim(d_states, d_picked, i * chunk, axis=1), d_head

  of_slots = parts.place(jnp.zeros((*source.shape, hidden.shape[2]), hidden.dtype), parts.axes[0])
  of_parts = jnp.zeros((parts.rows, parts.columns, *unembedding.shape), jnp.float32)
  start = of_slots, parts.place(of_parts, *parts.axes, None, _ANY)
  of_slots, of_parts = _over_chunks(valid, chunk, body, start)
  # A hidden state is read for one token at most: a gather, where a scatter would be slow.
  d_hidden = jnp.take_along_axis(of_slots, jnp.maximum(after, 0)[..., None], axis=1)
  d_hidden = jnp.where((after >= 0)[..., None], d_hidden, jnp.zeros((), hidden.dtype))
  d_head = of_parts.sum((0, 1)).astype(unembedding.dtype)
  none = [np.zeros(x.shape, jax.dtypes.float0) for x in (source, target, valid, after)]
  return d_hidden, d_head, *none


_compact.defvjp(_compact_forward, _compact_backward)
