"""The layers that families share: norm, rotary embedding, attention projections and the gated MLP.

Weights are two-dimensional [in, out] so that every family's checkpoint map is a rename and a
transpose; inside a family they are stacked over layers, and here one layer's slice is seen. Axis
letters: B rows, T positions, D embed, N query heads, K key-value heads, H head dimension, F hidden
width of the MLP.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from agentrl_jax.models.model import Initializer, param

Matmul = Callable[[Array, Any], Array]  # (x [..., in], weight [in, out]) -> [..., out] in x's dtype
Norm = Callable[[Array, Array], Array]  # (x [..., D], scale [D]) -> [..., D] in x's dtype


def plain(weight: Any, dtype: Any) -> Array:
  """A weight as one array: of those that are held in another way (`precision.Stored`,
  `lora.Adapted`), what it stands for.
  """
  return weight.plain(dtype) if hasattr(weight, "plain") else weight.astype(dtype)


def matmul(x: Float[Array, "... I"], weight: Any) -> Float[Array, "... O"]:
  """The plain product, in the dtype of the activations."""
  return _product(x, plain(weight, x.dtype))


@jax.custom_vjp
def _product(x: Array, weight: Array) -> Array:
  return jnp.einsum("...i,io->...o", x, weight)


def _product_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
  """The usual gradients. Without the barrier XLA for CPU computes `grad` a second time, and copies
  `x` out of what the layers' scan kept, in the transposed order that the weight's product reads,
  element by element across memory: a third of a training step.
  """
  x, weight = kept
  x, grad = jax.lax.optimization_barrier((x, grad))
  leading = tuple(range(x.ndim - 1))
  return (
    jnp.einsum("...o,io->...i", grad, weight),
    jnp.tensordot(x, grad, axes=(leading, leading)),
  )


_product.defvjp(lambda x, weight: (_product(x, weight), (x, weight)), _product_backward)


def scaled_normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Normal with variance 1 / fan-in for [..., in, out] matrices."""
  return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)


def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  del key
  return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  del key
  return jnp.zeros(shape, dtype)


def rms_norm(
  x: Float[Array, "... D"], scale: Float[Array, "D"], epsilon: float
) -> Float[Array, "... D"]:
  """x / rms(x) * scale, with the mean square in float32 (Zhang & Sennrich 2019)."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
  normed = (wide * inverse).astype(x.dtype)
  return normed * jnp.broadcast_to(scale.astype(x.dtype), normed.shape)


def wide_norm(
  x: Float[Array, "... D"], scale: Float[Array, "D"], epsilon: float
) -> Float[Array, "... D"]:
  """x / rms(x) * scale, all of it in float32."""
  return rms_norm(x.astype(jnp.float32), scale.astype(jnp.float32), epsilon).astype(x.dtype)


def zero_centred_norm(
  x: Float[Array, "... D"], weight: Float[Array, "D"], epsilon: float
) -> Float[Array, "... D"]:
  """x / rms(x) * (1 + weight), all of it in float32."""
  return wide_norm(x, 1.0 + weight.astype(jnp.float32), epsilon)


@dataclasses.dataclass(frozen=True)
class Linear:
  """Positions are divided by `factor`."""

  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama
  3.1).
  """

  factor: float
  low_frequency: float
  high_frequency: float
  original_length: int


@dataclasses.dataclass(frozen=True)
class Yarn:
  """Pairs that turn more than `beta_fast` times in the original context are kept, those that turn
  less than `beta_slow` times divided by `factor`, those between interpolated over the pairs' index;
  cosine and sine are scaled by `attention_factor` (Peng et al. 2023, as transformers has it).
  """

  factor: float
  original_length: int
  attention_factor: float
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True  # the two bounds to whole pairs


RopeScaling = Linear | Llama3 | Yarn


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, "H/2"]:
  """Radians a position for each pair of head dimensions (Su et al. 2021), rescaled for longer
  contexts.

  Args:
    head_dim: the dimensions that are rotated, fewer than a head has in a partial rotary embedding.
  """
  frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if isinstance(scaling, Linear):
    frequency = frequency / scaling.factor
  if isinstance(scaling, Yarn):
    keep = 1 - _yarn_ramp(head_dim, theta, scaling)
    frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
  if isinstance(scaling, Llama3):
    turns = scaling.original_length * frequency / (2 * math.pi)  # within the original context
    span = scaling.high_frequency - scaling.low_frequency
    keep = np.clip((turns - scaling.low_frequency) / span, 0, 1)
    frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
  return frequency.astype(np.float32)


def _yarn_ramp(head_dim: int, theta: float, scaling: Yarn) -> Float[np.ndarray, "H/2"]:
  """0 for pairs to keep, 1 for those to stretch."""

  def pair(turns: float) -> float:
    """The index, a fraction, of the pair that turns so often in the original context."""
    length = scaling.original_length / (2 * math.pi * turns)
    return head_dim * math.log(length) / (2 * math.log(theta))

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  span = high - low or 0.001  # as transformers, where the bounds meet
  return np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)


@flax.struct.dataclass
class Rotation:
  """Cosine and sine of each position's angles, in float32; R dimensions of a head are rotated."""

  cos: Float[Array, "B T R/2"]
  sin: Float[Array, "B T R/2"]


def rotation(
  position: Int[Array, "B T"], rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> Rotation:
  """Of the first `rotary_dim` dimensions of each head."""
  frequencies = rope_frequencies(rotary_dim, theta, scaling)
  angle = jnp.einsum("bt,h->bth", position.astype(jnp.float32), jnp.asarray(frequencies))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if isinstance(scaling, Yarn):
    cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
  # Without the barrier XLA computes them again inside the fusions of every layer.
  return Rotation(*jax.lax.optimization_barrier((cos, sin)))


def rotate(x: Float[Array, "B T N H"], by: Rotation) -> Float[Array, "B T N H"]:
  """Rotates the pairs (i, i + R/2) of each head's first R dimensions, as Hugging Face checkpoints
  expect.
  """
  half = by.cos.shape[-1]
  first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
  cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
  turned = [first * cos - second * sin, second * cos + first * sin, rest]
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@flax.struct.dataclass
class Attention:
  """Projections of grouped-query attention; what a family does not have is None.

  Biases are added to the projections of queries, keys and values (none to the output's); the norms'
  scales, one for all heads of a layer, belong to each head's query and key before the rotation.
  """

  query: Float[Array, "D N*H"]
  key: Float[Array, "D K*H"]
  value: Float[Array, "D K*H"]
  output: Float[Array, "N*H D"]
  query_bias: Float[Array, "N*H"] | None = None
  key_bias: Float[Array, "K*H"] | None = None
  value_bias: Float[Array, "K*H"] | None = None
  query_norm: Float[Array, "H"] | None = None
  key_norm: Float[Array, "H"] | None = None

  @classmethod
  def abstract(
    cls,
    layers: int,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    norm: Initializer | None = None,
  ) -> "Attention":
    """Specs of stacked layers.

    Args:
      bias: whether queries, keys and values have one.
      norm: what the scales of the query and key norms start from; None for a family without them.
    """

    def spec(inputs: int, outputs: int, axes: tuple[str, str]) -> Any:
      return param((layers, inputs, outputs), ("layers", *axes), scaled_normal)

    def added(size: int, axis: str) -> Any:
      return param((layers, size), ("layers", axis), zeros) if bias else None

    scale = None if norm is None else param((layers, head_dim), ("layers", None), norm)
    return cls(
      query=spec(embed, heads * head_dim, ("embed", "heads")),
      key=spec(embed, kv_heads * head_dim, ("embed", "kv_heads")),
      value=spec(embed, kv_heads * head_dim, ("embed", "kv_heads")),
      output=spec(heads * head_dim, embed, ("heads", "embed")),
      query_bias=added(heads * head_dim, "heads"),
      key_bias=added(kv_heads * head_dim, "kv_heads"),
      value_bias=added(kv_heads * head_dim, "kv_heads"),
      query_norm=scale,
      key_norm=scale,
    )


# Mixes values over positions and returns what the caller must keep, such as an updated cache:
# (query [B T N H], key [B T K H], value [B T K H]) -> ([B T N H], kept)
Mix = Callable[[Array, Array, Array], tuple[Array, Any]]


def attention(
  weights: Attention,
  x: Float[Array, "B T D"],
  by: Rotation,
  mix: Mix,
  *,
  head_dim: int,
  matmul: Matmul,
  norm: Norm,
) -> tuple[Float[Array, "B T D"], Any]:
  """Projects, adds biases, normalises and rotates queries and keys, mixes, projects back.

  Args:
    weights: biases and norms that are None are left out.
    by: rotates the first R dimensions of each head, H or fewer.
    mix: attention itself, over a packed row or a cache; scores are scaled there.
    norm: with `weights.query_norm` and `weights.key_norm` over each head.

  Returns:
    the output projection, without a residual, and what `mix` kept.
  """

  def project(weight: Array, bias: Array | None) -> Array:
    made = matmul(x, weight)
    if bias is not None:
      made = made + jnp.broadcast_to(bias.astype(made.dtype), made.shape)
    return made.reshape(*made.shape[:-1], -1, head_dim)

  query = project(weights.query, weights.query_bias)
  key = project(weights.key, weights.key_bias)
  if weights.query_norm is not None and weights.key_norm is not None:
    query, key = norm(query, weights.query_norm), norm(key, weights.key_norm)
  value = project(weights.value, weights.value_bias)
  mixed, kept = mix(rotate(query, by), rotate(key, by), value)
  return matmul(mixed.reshape(*x.shape[:-1], -1), weights.output), kept


@flax.struct.dataclass
class MLP:
  """Gated MLP: down(activation(gate x) * up x) (Shazeer 2020)."""

  gate: Float[Array, "D F"]
  up: Float[Array, "D F"]
  down: Float[Array, "F D"]

  @classmethod
  def abstract(cls, layers: int, embed: int, ffw: int) -> "MLP":
    wide = param((layers, embed, ffw), ("layers", "embed", "ffw"), scaled_normal)
    down = param((layers, ffw, embed), ("layers", "ffw", "embed"), scaled_normal)
    return cls(gate=wide, up=wide, down=down)


def mlp(
  weights: MLP,
  x: Float[Array, "B T D"],
  *,
  matmul: Matmul,
  activation: Callable[[Array], Array] = jax.nn.silu,
  limit: float | None = None,
) -> Float[Array, "B T D"]:
  """`limit` as of `clamped`. For the backward pass the two products are kept, and what is computed
  of each element is computed again.
  """

  @jax.checkpoint
  def down(gate: Array, up: Array, weight: Any) -> Array:
    gate, up = clamped(gate, up, limit)
    return matmul(activation(gate) * up, weight)

  return down(matmul(x, weights.gate), matmul(x, weights.up), weights.down)


def clamped(gate: Array, up: Array, limit: float | None) -> tuple[Array, Array]:
  """What an MLP activates and multiplies: at most `limit` where given, `up` at least -limit."""
  if limit is None:
    return gate, up
  return jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
