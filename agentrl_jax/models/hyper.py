"""Manifold-constrained hyper-connections: a residual of several streams, collapsed into one before
each half of a layer and mixed by a doubly stochastic matrix past it (Xie et al. 2026, as
transformers has them for DeepSeek V4).

Axis letters: S streams, M = (2 + S) * S numbers of one position that say how streams are mixed.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models import layers
from agentrl_jax.models.model import param


@flax.struct.dataclass
class Connection:
  """A map from all streams, normalised together, to the numbers that mix them; in float32.

  Of a layer's half these are S weights in, S weights out and S x S across (M numbers, with a scale
  for each of the three); of the model's end S weights in, with one scale.
  """

  mixing: Float[Array, "S*D M"]
  mixing_bias: Float[Array, "M"]
  mixing_scale: Float[Array, "3"]

  @classmethod
  def abstract(cls, depth: int, embed: int, streams: int) -> "Connection":
    """Specs of `depth` layers' halves."""
    width = (2 + streams) * streams
    return cls(
      mixing=param((depth, streams * embed, width), ("layers", None, None), layers.scaled_normal),
      mixing_bias=param((depth, width), ("layers", None), layers.zeros),
      mixing_scale=param((depth, 3), ("layers", None), layers.ones),
    )

  @classmethod
  def abstract_end(cls, embed: int, streams: int) -> "Connection":
    """Specs of the model's end."""
    return cls(
      mixing=param((streams * embed, streams), (None, None), layers.scaled_normal),
      mixing_bias=param((streams,), (None,), layers.zeros),
      mixing_scale=param((1,), (None,), layers.ones),
    )


class Constants(NamedTuple):
  steps: int  # of normalising rows and columns by turns
  epsilon: float  # added to weights and sums
  norm_epsilon: float


class Ways(NamedTuple):
  """How streams go on after a half of a layer, in float32."""

  out: Float[Array, "B T S"]  # what the half made, into each stream
  across: Float[Array, "B T S S"]  # from each stream (rows) into each (columns)


def enter(
  weights: Connection, x: Float[Array, "B T S D"], constants: Constants
) -> tuple[Float[Array, "B T D"], Ways]:
  """The streams as the one input of a layer's half, and how they go on."""
  streams = x.shape[2]
  numbers = _numbers(weights, x, constants.norm_epsilon)
  scale, bias = (
    jnp.split(part, [streams, 2 * streams])
    for part in (_spread(weights.mixing_scale, streams), weights.mixing_bias.astype(jnp.float32))
  )
  into, out, across = (
    number * factor[None, None] + shift[None, None]
    for number, factor, shift in zip(
      jnp.split(numbers, [streams, 2 * streams], axis=-1), scale, bias, strict=True
    )
  )
  square = jax.nn.softmax(across.reshape(*across.shape[:2], streams, streams), axis=-1)
  ways = Ways(2 * jax.nn.sigmoid(out), _doubly_stochastic(square + constants.epsilon, constants))
  return _collapsed(x, jax.nn.sigmoid(into) + constants.epsilon), ways


def leave(
  x: Float[Array, "B T S D"], made: Float[Array, "B T D"], ways: Ways
) -> Float[Array, "B T S D"]:
  """The streams after the half that made `made` of them."""
  added = ways.out.astype(x.dtype)[..., None] * made[:, :, None]
  return added + jnp.einsum("btij,btid->btjd", ways.across.astype(x.dtype), x)


def end(
  weights: Connection, x: Float[Array, "B T S D"], constants: Constants
) -> Float[Array, "B T D"]:
  """The streams as one, after the last layer."""
  numbers = _numbers(weights, x, constants.norm_epsilon)
  scaled = numbers * weights.mixing_scale.astype(jnp.float32)[None, None]
  into = jax.nn.sigmoid(scaled + weights.mixing_bias.astype(jnp.float32)[None, None])
  return _collapsed(x, into + constants.epsilon)


def _numbers(
  weights: Connection, x: Float[Array, "B T S D"], epsilon: float
) -> Float[Array, "B T M"]:
  """Of the streams normalised together; the norm is divided out after the product."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=(-2, -1)) + epsilon)
  matrix = layers.plain(weights.mixing, jnp.float32).reshape(*x.shape[2:], -1)
  return jnp.einsum("btsd,sdm->btm", wide, matrix) * inverse[..., None]


def _spread(scale: Float[Array, "3"], streams: int) -> Float[Array, "M"]:
  """Each of the three over its numbers."""
  counts = (streams, streams, streams * streams)
  wide = scale.astype(jnp.float32)
  return jnp.concatenate([jnp.broadcast_to(wide[i], (n,)) for i, n in enumerate(counts)])


def _collapsed(x: Float[Array, "B T S D"], into: Float[Array, "B T S"]) -> Float[Array, "B T D"]:
  return jnp.sum(into[..., None] * x.astype(jnp.float32), axis=2).astype(x.dtype)


def _doubly_stochastic(
  square: Float[Array, "B T S S"], constants: Constants
) -> Float[Array, "B T S S"]:
  """Columns, then rows and columns by turns, divided by their sums (Sinkhorn & Knopp 1967)."""

  def divided(square: Array, axis: int) -> Array:
    return square / (jnp.sum(square, axis=axis, keepdims=True) + constants.epsilon)

  def step(square: Array, _: Any) -> tuple[Array, None]:
    return divided(divided(square, -1), -2), None

  square, _ = jax.lax.scan(step, divided(square, -2), None, length=constants.steps - 1)
  return square
