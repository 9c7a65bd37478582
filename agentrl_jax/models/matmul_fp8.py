"""Products with weights in FP8.

Both operands of a product are rounded to 8 bits with a scale for each block or for the whole, and
summed in float32: e4m3 forward, e5m2 or e4m3 for what comes back (Micikevicius et al. 2022; blocks
as DeepSeek-AI 2024, section 3.3). A number too large for its format becomes the largest there is,
never infinite or NaN; a NaN stays one.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models import layers
from agentrl_jax.models.precision import LARGEST, Amax, Fp8, Multiplied, Stored
from agentrl_jax.ops.quantize import (
  OCP,
  Quantization,
  block_amax,
  finite,
  quantize,
  quantize_with,
  scales_of,
)

BLOCK = 128
_ROWS = (1, BLOCK)  # a block along a row: of what is summed over in the product
_FLOAT32 = float(jnp.finfo(jnp.float32).max)


def matmul(x: Float[Array, "... I"], weight: Any) -> Float[Array, "... O"]:
  """A `layers.Matmul`: FP8 with weights that are `Multiplied`, or `Stored` for that (forward only,
  by dynamic scales); in the dtype of the activations with all others.
  """
  if isinstance(weight, Multiplied):
    return _product(weight.how, x, weight.weight.astype(x.dtype), weight.amax)
  if isinstance(weight, Stored) and weight.products is not None:
    rows = x.reshape(-1, x.shape[-1])
    left, right = quantized(rows, weight.products), Operand(weight.values, weight.scales)
    return scaled_product(left, right, x.dtype).reshape(*x.shape[:-1], -1)
  return layers.matmul(x, weight)


class Operand(NamedTuple):
  """A matrix in FP8; one scale for all of it, or those of its blocks."""

  values: Array
  scale: Array

  @property
  def T(self) -> "Operand":
    return Operand(self.values.T, self.scale.T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: Fp8, x: Array, weight: Array, amax: Amax | None) -> Array:
  return _forward(how, x, weight, amax)[0]


def _forward(how: Fp8, x: Array, weight: Array, amax: Amax | None) -> tuple[Array, tuple[Any, ...]]:
  """Kept for the backward pass are operands in FP8 only."""
  rows = x.reshape(-1, x.shape[-1])
  seen = None
  if how.blocks:
    held = quantized(weight, how, of_weight=True)
    made = scaled_product(quantized(rows, how), held, x.dtype)
    kept = quantized(rows.T, how)  # the weight's gradient sums over tokens
  else:
    coded, x_now = whole(rows, "float8_e4m3fn", None if amax is None else amax.x)
    held, weight_now = whole(weight, "float8_e4m3fn", None if amax is None else amax.weight)
    made = scaled_product(coded, held, x.dtype)
    kept = coded.T
    seen = None if amax is None else (x_now, weight_now)
  return made.reshape(*x.shape[:-1], -1), (kept, held, amax, seen)


def _backward(how: Fp8, saved: tuple[Any, ...], grad: Array) -> tuple[Array, Array, Amax | None]:
  kept, held, amax, seen = saved
  rows = grad.reshape(-1, grad.shape[-1])
  if how.blocks:
    backward, tokens = quantized(rows, how, how.gradient), quantized(rows.T, how, how.gradient)
    onto_x = scaled_product(backward, held.T, grad.dtype)
    of_weight = scaled_product(kept, tokens.T, grad.dtype)
  else:
    coded, now = whole(rows, how.gradient, None if amax is None else amax.gradient)
    onto_x = scaled_product(coded, held.T, grad.dtype)
    of_weight = scaled_product(kept, coded, grad.dtype)
    amax = None if amax is None else newest(amax, seen[0], seen[1], now)
  return onto_x.reshape(*grad.shape[:-1], -1), of_weight, amax


_product.defvjp(_forward, _backward)


def newest(amax: Amax, x: Array, weight: Array, gradient: Array) -> Amax:
  """The step's magnitudes in place of a gradient of the history: nothing learns from that."""
  now = Amax(x, weight, gradient)
  return jax.tree.map(lambda old, new: jnp.zeros_like(old).at[..., 0].set(new), amax, now)


def quantized(
  values: Float[Array, "M K"], how: Fp8, dtype: str = "float8_e4m3fn", *, of_weight: bool = False
) -> Operand:
  """Rows in FP8 with scales of what there is now."""
  block = None if not how.blocks else (OCP.block if of_weight else _ROWS)
  return Operand(*quantize(finite(values), Quantization(dtype, block, top=LARGEST[dtype])))


def whole(
  values: Float[Array, "M K"],
  dtype: str,
  history: Float[Array, "H"] | None,
  axes: tuple[str, ...] = (),
) -> tuple[Operand, Array]:
  """Values with one scale, and their largest magnitude now; the scale is of the history once there
  is one. In a `shard_map`, `axes` are those of the mesh that the values are spread over.
  """
  how = Quantization(dtype, None, top=LARGEST[dtype])
  values = finite(values)
  now = block_amax(values, how)
  used = now = jax.lax.pmax(now, axes) if axes else now
  if history is not None:
    before = jnp.max(history)
    used = jnp.where(before > 0, before, now)
  scale = scales_of(used, how)
  return Operand(quantize_with(values, scale, how), scale), now


def scaled_product(left: Operand, right: Operand, dtype: Any) -> Array:
  """left [M K] @ right [K N] in `dtype`, where scales are of the whole, or of left's [1 x 128]
  ([M, K / 128]) and right's [128 x 128] or [128 x 1].
  """
  if left.scale.ndim == 0:
    made = _saturated(_saturated(_dot(left.values, right.values) * left.scale) * right.scale)
  else:
    columns = _by_column(right.scale, right.values.shape[1])
    made = _blocks(left.values, left.scale, right.values, columns)
  return clipped(made, dtype)


def clipped(x: Array, dtype: Any) -> Array:
  """x in another dtype, at most the largest number of it."""
  largest = float(jnp.finfo(dtype).max)
  return jnp.clip(x, -largest, largest).astype(dtype)


def _blocks(left: Array, left_scale: Array, right: Array, right_scale: Array) -> Array:
  """Block after block of what is summed over, each scaled before it is added."""
  count = left_scale.shape[1]
  extra = count * BLOCK - left.shape[1]
  left, right = jnp.pad(left, ((0, 0), (0, extra))), jnp.pad(right, ((0, extra), (0, 0)))
  part_of = jax.lax.dynamic_slice_in_dim

  def add(number: Array, total: Array) -> Array:
    at = number * BLOCK
    part = _dot(part_of(left, at, BLOCK, 1), part_of(right, at, BLOCK, 0))
    part = _saturated(part * part_of(left_scale, number, 1, 1))
    return total + _saturated(part * part_of(right_scale, number, 1, 0))

  start = jnp.zeros((left.shape[0], right.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, count, add, start)


def _by_column(scale: Float[Array, "K/128 ..."], columns: int) -> Float[Array, "K/128 N"]:
  return scale if scale.shape[1] == columns else jnp.repeat(scale, BLOCK, 1)[:, :columns]


def _dot(left: Array, right: Array) -> Float[Array, "M N"]:
  axes = (((1,), (0,)), ((), ()))
  return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _saturated(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
  return jnp.clip(x, -_FLOAT32, _FLOAT32)
