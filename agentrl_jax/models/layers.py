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

from agentrl_jax.models.model import param

Matmul = Callable[[Array, Any], Array]  # (x [..., in], weight [in, out]) -> [..., out] in x's dtype


def matmul(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
  """The plain product, in the dtype of the activations."""
  return _product(x, weight.astype(x.dtype))


@jax.custom_vjp
def _product(x: Array, weight: Array) -> Array:
  return jnp.einsum("...i,io->...o", x, weight)


def _product_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
  """The usual gradients. Without the barrier XLA for CPU computes `grad` a second time in the
  transposed order that the weight's product reads, element by element across memory: a third of a
  training step.
  """
  x, weight = kept
  grad = jax.lax.optimization_barrier(grad)
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


def rms_norm(
  x: Float[Array, "... D"], scale: Float[Array, "D"], epsilon: float
) -> Float[Array, "... D"]:
  """x / rms(x) * scale, with the mean square in float32 (Zhang & Sennrich 2019)."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
  normed = (wide * inverse).astype(x.dtype)
  return normed * jnp.broadcast_to(scale.astype(x.dtype), normed.shape)


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


RopeScaling = Linear | Llama3


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, "H/2"]:
  """Radians a position for each pair of head dimensions (Su et al. 2021), rescaled for longer
  contexts.
  """
  frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if isinstance(scaling, Linear):
    frequency = frequency / scaling.factor
  if isinstance(scaling, Llama3):
    turns = scaling.original_length * frequency / (2 * math.pi)  # within the original context
    span = scaling.high_frequency - scaling.low_frequency
    keep = np.clip((turns - scaling.low_frequency) / span, 0, 1)
    frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
  return frequency.astype(np.float32)


@flax.struct.dataclass
class Rotation:
  """Cosine and sine of each position's angles, in float32."""

  cos: Float[Array, "B T H/2"]
  sin: Float[Array, "B T H/2"]


def rotation(position: Int[Array, "B T"], frequencies: Float[np.ndarray, "H/2"]) -> Rotation:
  angle = jnp.einsum("bt,h->bth", position.astype(jnp.float32), jnp.asarray(frequencies))
  # Without the barrier XLA computes them again inside the fusions of every layer.
  return Rotation(*jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle))))


def rotate(x: Float[Array, "B T N H"], by: Rotation) -> Float[Array, "B T N H"]:
  """Rotates the pairs (i, i + H/2) of each head, as Hugging Face checkpoints expect."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@flax.struct.dataclass
class Attention:
  """Projections of grouped-query attention."""

  query: Float[Array, "D N*H"]
  key: Float[Array, "D K*H"]
  value: Float[Array, "D K*H"]
  output: Float[Array, "N*H D"]

  @classmethod
  def abstract(
    cls, layers: int, embed: int, heads: int, kv_heads: int, head_dim: int
  ) -> "Attention":
    def spec(inputs: int, outputs: int, axes: tuple[str, str]) -> Any:
      return param((layers, inputs, outputs), ("layers", *axes), scaled_normal)

    return cls(
      query=spec(embed, heads * head_dim, ("embed", "heads")),
      key=spec(embed, kv_heads * head_dim, ("embed", "kv_heads")),
      value=spec(embed, kv_heads * head_dim, ("embed", "kv_heads")),
      output=spec(heads * head_dim, embed, ("heads", "embed")),
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
) -> tuple[Float[Array, "B T D"], Any]:
  """Projects, rotates queries and keys, mixes, projects back."""

  def split(projected: Array) -> Array:
    return projected.reshape(*projected.shape[:-1], -1, head_dim)

  query = rotate(split(matmul(x, weights.query)), by)
  key = rotate(split(matmul(x, weights.key)), by)
  mixed, kept = mix(query, key, split(matmul(x, weights.value)))
  return matmul(mixed.reshape(*x.shape[:-1], -1), weights.output), kept


@flax.struct.dataclass
class MLP:
  """Gated MLP: down(silu(gate x) * up x) (Shazeer 2020)."""

  gate: Float[Array, "D F"]
  up: Float[Array, "D F"]
  down: Float[Array, "F D"]

  @classmethod
  def abstract(cls, layers: int, embed: int, ffw: int) -> "MLP":
    wide = param((layers, embed, ffw), ("layers", "embed", "ffw"), scaled_normal)
    down = param((layers, ffw, embed), ("layers", "ffw", "embed"), scaled_normal)
    return cls(gate=wide, up=wide, down=down)


def mlp(weights: MLP, x: Float[Array, "B T D"], *, matmul: Matmul) -> Float[Array, "B T D"]:
  return matmul(jax.nn.silu(matmul(x, weights.gate)) * matmul(x, weights.up), weights.down)
