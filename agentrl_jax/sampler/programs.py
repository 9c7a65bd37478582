"""The sampler's device programs: copy a prefix, prefill, decode, each of which gets the cache
donated; and the whole distribution of one next token, with a cache of its own.

A program works on a view of the cache: the rows it needs, cut to the indices it can reach. The view
of all rows and indices is the cache itself. Only sampled positions are multiplied with the head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from agentrl_jax.models.model import Cache, Model, Weights
from agentrl_jax.sampler.placement import NO_FP8, SamplerFp8, cache_dtype, expert_options
from agentrl_jax.sampler.sampling import sample, uniforms

NOTHING = -1  # in place of a sampled id, after the end of a row's turn


@flax.struct.dataclass
class RowState:
  """What decoding must know of each row of a view; `remaining` 0 marks a row without a request."""

  token: Int[Array, "R"]  # the stream's last token, not yet in the cache
  position: Int[Array, "R"]  # its index in the stream
  remaining: Int[Array, "R"]  # tokens it may still sample
  temperature: Float[Array, "R"]
  key: UInt32[Array, "R 2"]  # of the request's randomness
  stop: Int[Array, "R"]  # row of the table of stop sets


class Programs(NamedTuple):
  """Jitted functions; `whole` (static) says that the view is all rows in order, not a gathering.

  copy(cache, source [R], target [R], *, length) -> cache
  prefill(weights, cache, rows [R], tokens [R N], position [R N], *, length, whole) -> cache
  decode(weights, cache, rows [R], state, stop_table [S V], steps, quota, *, length, whole)
    -> (cache, ids [R M], logp [R M]): NOTHING and 0 where a row sampled nothing
  distribution(weights, tokens [1 N]) -> logp [V], compiled for each N
  """

  copy: Callable[..., Cache]
  prefill: Callable[..., Cache]
  decode: Callable[..., tuple[Cache, Int[Array, "R M"], Float[Array, "R M"]]]
  distribution: Callable[..., Float[Array, "V"]]


@functools.cache
def make_programs(
  model: Model, *, dtype: Any, max_steps: int, sharding: Any, fp8: SamplerFp8 = NO_FP8
) -> Programs:
  """Programs for one model; `max_steps` (M) bounds a decode call, `sharding` is the cache's.

  Engines with equal arguments share what is compiled.
  """
  axes = length_axes(model, cache_dtype(dtype, fp8))
  jit = functools.partial(jax.jit, donate_argnames=("cache",), static_argnames=("length", "whole"))

  def copy(cache, source, target, *, length):
    moved = _view(cache, axes, source, length, False)
    return _put(cache, axes, target, moved, length, False)

  def prefill(weights, cache, rows, tokens, position, *, length, whole):
    view = _view(cache, axes, rows, length, whole)
    options = {**fp8.options, **expert_options(model, sharding, tokens.shape[0])}
    _, view = model.decode(weights, view, tokens, position, dtype=dtype, **options)
    return _put(cache, axes, rows, view, length, whole)

  def decode(weights, cache, rows, state, stop_table, steps, quota, *, length, whole):
    view = _view(cache, axes, rows, length, whole)
    options = {**fp8.options, **expert_options(model, sharding, state.token.shape[0])}
    forward = functools.partial(_logits, model, weights, dtype=dtype, **options)
    view, ids, logp = _decode_loop(forward, max_steps, view, state, stop_table, steps, quota)
    return _put(cache, axes, rows, view, length, whole), ids, logp

  def distribution(weights, tokens):
    position = jnp.arange(tokens.shape[1])[None]
    empty = model.init_cache(1, tokens.shape[1], cache_dtype(dtype, fp8))
    options = {**fp8.options, **expert_options(model, sharding, 1)}
    hidden, _ = model.decode(weights, empty, tokens, position, dtype=dtype, **options)
    return jax.nn.log_softmax(_project(model, weights, hidden[:, -1])[0])

  return Programs(
    jax.jit(copy, donate_argnames=("cache",), static_argnames="length", out_shardings=sharding),
    jit(prefill, out_shardings=sharding),
    jit(decode, out_shardings=(sharding, None, None)),
    jax.jit(distribution),
  )


def _logits(
  model: Model, weights: Weights, view: Cache, token: Array, position: Array, **options: Any
) -> tuple[Float[Array, "R V"], Cache]:
  hidden, view = model.decode(weights, view, token[:, None], position[:, None], **options)
  return _project(model, weights, hidden[:, 0]), view


def _project(model: Model, weights: Weights, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
  head = model.unembedding(weights).astype(hidden.dtype)
  return jnp.einsum("rd,dv->rv", hidden, head, preferred_element_type=jnp.float32)


def _decode_loop(
  forward: Callable[..., tuple[Array, Cache]],
  max_steps: int,
  view: Cache,
  state: RowState,
  stop_table: Bool[Array, "S V"],
  steps: Int[Array, ""],
  quota: Int[Array, ""],
) -> tuple[Cache, Int[Array, "R M"], Float[Array, "R M"]]:
  """Samples until `steps` are done, `quota` rows have finished, or no row is left."""
  live = state.remaining > 0
  started = jnp.sum(live)

  def unfinished(carry):
    step, _, _, live, _, _ = carry
    count = jnp.sum(live)
    return (step < steps) & (count > 0) & (started - count < quota)

  def body(carry):
    step, view, token, live, ids, logp = carry
    position = state.position + step
    logits, view = forward(view, token, jnp.where(live, position, -1))
    # The draw depends on the token's index in its stream: a turn cut in two is the same turn.
    uniform = uniforms(state.key, position + 1)
    token, token_logp = sample(logits, state.temperature, uniform)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=step, axis=1)
    ids = put(ids, jnp.where(live, token, NOTHING)[:, None])
    logp = put(logp, jnp.where(live, token_logp, 0.0)[:, None])
    live = live & ~stop_table[state.stop, token] & (step + 1 < state.remaining)
    return step + 1, view, token, live, ids, logp

  shape = (state.token.shape[0], max_steps)
  empty = jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32)
  start = (jnp.zeros((), jnp.int32), view, state.token, live, *empty)
  _, view, _, _, ids, logp = jax.lax.while_loop(unfinished, body, start)
  return view, ids, logp


def length_axes(model: Model, dtype: Any) -> Any:
  """The axis of each cache array that grows with the length, -1 for one that is of a whole row;
  rows are axis 0.
  """
  shorter, longer = (jax.eval_shape(lambda n=n: model.init_cache(1, n, dtype)) for n in (1, 2))

  def growing(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
    sizes = enumerate(zip(a.shape, b.shape, strict=True))
    return next((axis for axis, (one, other) in sizes if one != other), -1)

  return jax.tree.map(growing, shorter, longer)


def _view(cache: Cache, axes: Any, rows: Int[Array, "R"], length: int, whole: bool) -> Cache:
  def take(array, axis):
    array = array if axis < 0 else jax.lax.slice_in_dim(array, 0, length, axis=axis)
    return array if whole else array.at[rows].get(mode="promise_in_bounds")

  return jax.tree.map(take, cache, axes)


def _put(
  cache: Cache, axes: Any, rows: Int[Array, "R"], view: Cache, length: int, whole: bool
) -> Cache:
  """The cache with the view's rows and indices replaced; no row is in a view twice."""

  def write(array, part, axis):
    if whole and axis < 0:
      return part
    if whole:
      return jax.lax.dynamic_update_slice_in_dim(array, part, 0, axis=axis)
    index = (rows, *(slice(length if i == axis else None) for i in range(1, array.ndim)))
    return array.at[index].set(part, mode="promise_in_bounds", unique_indices=True)

  return jax.tree.map(write, cache, view, axes)
