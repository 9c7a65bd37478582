"""The gated delta rule, an attention whose memory is one matrix a head, and the short convolution
before it (Yang et al. 2025, Gated Delta Networks, eq. 10).

  S_t = a_t S_(t-1) + k_t (b_t (v_t - (a_t S_(t-1))' k_t))'        o_t = S_t' q_t

Positions are taken in chunks: what those of a chunk write follows from one triangular system, so
that only the memory goes from chunk to chunk, and all else is matrix products. A sample begins with
an empty memory, or with that at the end of the stream it continues. Axis letters beside those of
`layers`: J key heads, R value heads of each (value head j*R + r reads key head j), P and V the
dimensions of a key and a value, C channels, X taps, M chunks, S and L positions of one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_CHUNK = 64  # positions
_NORM_EPSILON = 1e-6  # of a query's or key's squared length

Memory = Float[Array, "B J R P V"]  # float32


class _Links(NamedTuple):
  """Which positions a chunk's positions read, directly or through the memory before the chunk."""

  sees: Bool[Array, "M B S L"]  # in the chunk: itself, what precedes it in its sample and parent
  follows: Bool[Array, "M B S"]  # reads the memory at the end of the chunk before
  returns: Bool[Array, "M B S"]  # reads the memory at the end of the last parent that ended before
  ending: Int[Array, "M B"]  # position of the chunk where its last parent ends, -1 where none does


def delta_rule(
  query: Float[Array, "B T J P"],
  key: Float[Array, "B T J P"],
  value: Float[Array, "B T J R V"],
  log_decay: Float[Array, "B T J R"],
  strength: Float[Array, "B T J R"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  memory: Memory | None = None,
  *,
  chunk: int = _CHUNK,
) -> tuple[Float[Array, "B T J R V"], Memory]:
  """What each position reads, in float32, and the memory after the last one. Products are of high
  precision (three of bfloat16 on TPU), whatever the default is.

  Args:
    query, key: are normalised here, queries divided by the root of P.
    log_decay: of the memory from the position before, 0 or less: log a.
    strength: from 0 to 1, how much of what the memory holds for the key is replaced: b.
    sample: a stream's positions are contiguous; -1 is padding, which reads nothing and is read by
      nothing.
    parent: the stream that a sample continues, its own id where none. It lies directly before the
      first that continues it, and no other parent before the last that does.
    memory: before the row's first position, for the sample that stands there; empty where None.
  """
  rows, length = sample.shape
  chunk = min(chunk, length)
  missing = -length % chunk
  wide = [x.astype(jnp.float32) for x in (query, key, value, log_decay, strength)]
  wide[0], wide[1] = _unit(wide[0]) * query.shape[-1] ** -0.5, _unit(wide[1])
  parts = [_chunked(x, chunk, missing) for x in wide]
  links = _links(sample, parent, chunk, missing)
  if memory is None:
    memory = jnp.zeros((rows, *value.shape[2:4], key.shape[-1], value.shape[-1]), jnp.float32)

  def step(
    carry: tuple[Memory, Memory | None], inputs: tuple[_Links, tuple[Array, ...]]
  ) -> tuple[tuple[Memory, Memory | None], Array]:
    last, of_parent = carry
    return _read_and_write(*inputs, last, of_parent)

  kept = None if parent is None else jnp.zeros_like(memory)
  with jax.default_matmul_precision("high"):
    inner = _within(links, *parts)
    (memory, _), read = jax.lax.scan(step, (memory, kept), (links, (*parts, *inner)))
  read = jnp.moveaxis(read, 0, 1).reshape(rows, length + missing, *value.shape[2:])
  return read[:, :length], memory


def _unit(x: Float[Array, "... P"]) -> Float[Array, "... P"]:
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _NORM_EPSILON)


def _chunked(x: Array, chunk: int, missing: int, mode: str = "constant") -> Array:
  """[B T ...] -> [M B S ...], with `missing` positions more: zeros, or like the last one (edge)."""
  x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode=mode)
  return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _links(
  sample: Int[Array, "B T"], parent: Int[Array, "B T"] | None, chunk: int, missing: int
) -> _Links:
  # Positions made up at the end belong to the last sample, write nothing and let nothing decay.
  own = _chunked(sample, chunk, missing, "edge")
  continued = own if parent is None else _chunked(parent, chunk, missing, "edge")
  real = own >= 0
  keys = own[:, :, None, :]
  same = (own[..., None] == keys) | (continued[..., None] == keys)
  sees = same & real[..., None] & jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
  before = jnp.concatenate([own[:1, :, :1], own[:-1, :, -1:]])
  follows = real & ((own == before) | (continued == before))
  if parent is None:
    return _Links(sees, follows, jnp.zeros_like(follows), jnp.full(own.shape[:2], -1))
  ends = _chunked(_parent_ends(sample, parent), chunk, missing)
  place = jnp.where(ends, jnp.arange(chunk)[None, None], -1)
  ending = jnp.max(place, axis=-1)
  held = _last_parent(sample, parent)[:, chunk - 1 :: chunk]  # after each chunk but the last
  held = jnp.pad(held[:, : own.shape[0] - 1], ((0, 0), (1, 0)), constant_values=-1)
  returns = real & jnp.logical_not(follows) & (continued == held.T[..., None])
  return _Links(sees, follows, returns & (continued != own), ending)


def _parent_ends(sample: Int[Array, "B T"], parent: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Positions after which a sample goes on that continues the stream they end."""
  goes_on = (sample[:, :-1] == parent[:, 1:]) & (sample[:, :-1] != sample[:, 1:])
  return jnp.pad(goes_on & (sample[:, :-1] >= 0), ((0, 0), (0, 1)))


def _last_end(sample: Int[Array, "B T"], parent: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """The last position, up to each, at which a parent ends; -1 where none does."""
  index = jnp.arange(sample.shape[1])[None]
  return jax.lax.cummax(jnp.where(_parent_ends(sample, parent), index, -1), axis=1)


def _last_parent(sample: Int[Array, "B T"], parent: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """The id of the last parent that has ended, up to each position; -1 where none has."""
  last = _last_end(sample, parent)
  return jnp.where(last >= 0, jnp.take_along_axis(sample, jnp.maximum(last, 0), axis=1), -1)


def _within(
  links: _Links,
  query: Float[Array, "M B S J P"],
  key: Float[Array, "M B S J P"],
  value: Float[Array, "M B S J R V"],
  log_decay: Float[Array, "M B S J R"],
  strength: Float[Array, "M B S J R"],
) -> tuple[Array, Array, Array, Array]:
  """What needs no memory, of all chunks at once.

  Returns:
    the logarithm of each position's decay since its sample's first one in the chunk, or its
    parent's [M B S J R]; and, all [M B J R S L], the decay from one position of the chunk to
    another that sees it, how much of what the one writes the other reads, and the inverse of the
    system whose solution is what they write.
  """
  del value
  size = query.shape[2]
  below = jnp.tril(jnp.ones((size, size), bool), -1)
  sees = links.sees[:, :, None, None]
  each = jnp.where(sees, jnp.moveaxis(log_decay, 2, -1)[..., None, :], 0.0)
  # Sums over what lies between two positions: differences of sums from the start would cancel.
  span = jnp.einsum(
    "mbjrsl,lk->mbjrsk", each, below.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
  between = jnp.where(sees, jnp.exp(span), 0.0)
  decay = jnp.moveaxis(jnp.sum(each, axis=-1), -1, 2)
  reads = jnp.einsum("mbsjp,mbljp->mbjsl", query, key)[:, :, :, None] * between
  alike = jnp.einsum("mbsjp,mbljp->mbjsl", key, key)[:, :, :, None] * between
  system = jnp.where(
    below[None, None, None, None], alike * jnp.moveaxis(strength, 2, -1)[..., None], 0.0
  )
  return decay, between, reads, _inverse(system)


@jax.custom_vjp
def _inverse(below: Float[Array, "... S S"]) -> Float[Array, "... S S"]:
  """Of 1 + `below`, which is zero on and above the diagonal.

  Blocks on the diagonal double: of [[a, 0], [c, b]], with the inverses of a and b known, the
  inverse has -b^-1 c a^-1 in the corner. As exact as a triangular solve, with which XLA did not
  compile the rule of 256 positions for a GPU within 20 CPU-seconds; with this it takes 4. A loop,
  as each product takes XLA 10 s to compile for a TPU.
  """
  size = below.shape[-1]
  place = jnp.arange(size)
  matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  def double(power: Int[Array, ""], inverse: Float[Array, "... S S"]) -> Float[Array, "... S S"]:
    of = place >> power  # the block of a position
    corner = ((of >> 1)[:, None] == (of >> 1)[None]) & (of[:, None] > of[None])
    corners = jnp.where(corner, below, 0.0)
    return inverse - matmul(matmul(inverse, corners), inverse)

  inverse = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
  return jax.lax.fori_loop(0, (size - 1).bit_length(), double, inverse)


def _inverse_forward(below: Float[Array, "... S S"]) -> tuple[Array, Array]:
  inverse = _inverse(below)
  return inverse, inverse


def _inverse_backward(
  inverse: Float[Array, "... S S"], gradient: Float[Array, "... S S"]
) -> tuple[Float[Array, "... S S"]]:
  """d(m^-1) = -m^-1 dm m^-1, of the entries below the diagonal."""
  transposed = jnp.swapaxes(inverse, -1, -2)
  matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  return (jnp.tril(-matmul(matmul(transposed, gradient), transposed), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _read_and_write(
  links: _Links, parts: tuple[Array, ...], last: Memory, of_parent: Memory | None
) -> tuple[tuple[Memory, Memory | None], Float[Array, "B S J R V"]]:
  """One chunk: (the memories after it, what its positions read)."""
  query, key, value, _, strength, decay, between, reads, inverse = parts

  def recall(x: Float[Array, "B S J P"]) -> Float[Array, "B S J R V"]:
    """What the memories from before the chunk hold for x."""
    found = _where(links.follows, jnp.einsum("bsjp,bjrpv->bsjrv", x, last))
    if of_parent is not None:
      found += _where(links.returns, jnp.einsum("bsjp,bjrpv->bsjrv", x, of_parent))
    return found * jnp.exp(decay)[..., None]

  wanted = strength[..., None] * (value - recall(key))
  written = jnp.einsum("bjrsl,bljrv->bsjrv", inverse, wanted)
  read = recall(query) + jnp.einsum("bjrsl,bljrv->bsjrv", reads, written)

  def memory_at(place: Int[Array, "B"]) -> Memory:
    """After the position `place` of the chunk."""

    def at(x: Array, axis: int = 1) -> Array:
      index = place.reshape(-1, *[1] * (x.ndim - 1))
      return jnp.take_along_axis(x, index, axis=axis).squeeze(axis)

    fresh = jnp.einsum("bljp,bjrl,bljrv->bjrpv", key, at(between, 3), written)
    old = _where(at(links.follows), last)
    if of_parent is not None:
      old += _where(at(links.returns), of_parent)
    return fresh + old * jnp.exp(at(decay))[..., None, None]

  after = memory_at(jnp.full(len(last), query.shape[1] - 1))
  if of_parent is not None:
    ended = memory_at(jnp.maximum(links.ending, 0))
    of_parent = _where(links.ending >= 0, ended, of_parent)
  return (after, of_parent), read


def _where(mask: Bool[Array, "..."], x: Array, other: Array | None = None) -> Array:
  """x where the mask of its leading axes holds, else the other, zero by default."""
  mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
  return jnp.where(mask, x, jnp.zeros_like(x) if other is None else other)


def convolve(
  x: Float[Array, "B T C"],
  taps: Float[Array, "X 1 C"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T C"]:
  """Each channel's sum over a position and the X - 1 before it of its sample, or of the stream that
  the sample continues; the last tap is the position's own. Arguments as of `delta_rule`.
  """
  count = taps.shape[0]
  own = taps.astype(jnp.float32)[:, None]
  made = x.astype(jnp.float32) * own[-1]
  for back in range(1, count):
    earlier = _back(x, back)
    of_sample = (_back(sample, back, -1) == sample) & (sample >= 0)
    if parent is not None:
      index, of_parent = _back_in_parent(sample, parent, back)
      far = jnp.take_along_axis(x, index[..., None], axis=1)
      earlier = _where(of_sample, earlier, far)
      of_sample |= of_parent
    made += _where(of_sample, earlier).astype(jnp.float32) * own[count - 1 - back]
  return made.astype(x.dtype)


def _back(x: Array, back: int, fill: int = 0) -> Array:
  """x [B T ...] of `back` positions before."""
  padding = ((0, 0), (back, 0), *[(0, 0)] * (x.ndim - 2))
  return jnp.pad(x, padding, constant_values=fill)[:, : x.shape[1]]


def _back_in_parent(
  sample: Int[Array, "B T"], parent: Int[Array, "B T"], back: int
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
  """Where the position `back` before lies if it is the parent's, and whether it is one of it."""
  index = jnp.arange(sample.shape[1])[None]
  starts = jnp.where(_back(sample, 1, -1) != sample, index, 0)
  into = index - jax.lax.cummax(starts, axis=1)  # positions into the sample
  place = _last_end(sample, parent) - (back - into - 1)
  inside = jnp.maximum(place, 0)
  found = jnp.take_along_axis(sample, inside, axis=1)
  valid = (place >= 0) & (into < back) & (parent != sample) & (found == parent) & (sample >= 0)
  return inside, valid


def convolve_on(
  x: Float[Array, "B N C"], taps: Float[Array, "X 1 C"], before: Float[Array, "B C X-1"]
) -> tuple[Float[Array, "B N C"], Float[Array, "B C X-1+N"]]:
  """`convolve` of positions that follow `before`, all of one sample; and both, end to end."""
  whole = jnp.concatenate([before, jnp.swapaxes(x, 1, 2).astype(before.dtype)], axis=-1)
  own = jnp.swapaxes(taps.astype(jnp.float32), 1, 2)[:, None]
  wide, length = whole.astype(jnp.float32), x.shape[1]
  made = own[0] * wide[:, :, :length]
  for i in range(1, len(own)):
    made += own[i] * wide[:, :, i : i + length]
  return jnp.swapaxes(made, 1, 2).astype(x.dtype), whole
