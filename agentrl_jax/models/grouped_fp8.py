"""The grouped matmul with weights in FP8: of each group the product and the gradients that
`matmul_fp8` makes of its rows and its weight.

It is a loop over tiles on every platform, as `grouped` has it where there is no kernel. Axis
letters as there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.models.grouped import grouped_matmul, map_tiles, sum_tiles, zero_past_the_end
from agentrl_jax.models.matmul_fp8 import (
  BLOCK,
  Operand,
  clipped,
  newest,
  quantized,
  scaled_product,
  whole,
)
from agentrl_jax.models.precision import Amax, Fp8, Multiplied


class Spread(NamedTuple):
  """The mesh axes, in a `shard_map`, over which one scale an operand is found."""

  rows: tuple[str, ...] = ()
  weight: tuple[str, ...] = ()  # those that do not hold other groups


ON_ONE_DEVICE = Spread()


def grouped_product(
  x: Float[Array, "M I"],
  weight: Any,
  sizes: Int[Array, "G"],
  spread: Spread = ON_ONE_DEVICE,
) -> Float[Array, "M O"]:
  """`grouped_matmul`, in FP8 where the weight [G I O] is `Multiplied`.

  Blocks of rows, which the gradient of a weight sums over, are counted from the first row of a
  group. One scale an operand is one for all rows, and one for each group's weight.
  """
  if not isinstance(weight, Multiplied):
    return grouped_matmul(x, weight, sizes)
  return _product(weight.how, spread, x, weight.weight.astype(x.dtype), weight.amax, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
  how: Fp8, spread: Spread, x: Array, weight: Array, amax: Amax | None, sizes: Array
) -> Array:
  return _forward(how, spread, x, weight, amax, sizes)[0]


def _forward(
  how: Fp8, spread: Spread, x: Array, weight: Array, amax: Amax | None, sizes: Array
) -> tuple[Array, tuple[Any, ...]]:
  """Kept for the backward pass are the operands in FP8, with blocks the rows as they came."""
  if how.blocks:
    held = jax.vmap(lambda one: quantized(one, how, of_weight=True))(weight)
    coded, kept, seen = quantized(x, how), x, None
  else:
    of_weight = functools.partial(whole, dtype="float8_e4m3fn", axes=spread.weight)
    held, weight_now = jax.vmap(lambda one, before: of_weight(one, history=before))(
      weight, None if amax is None else amax.weight
    )
    rows, before = zero_past_the_end(x, sizes), None if amax is None else amax.x
    coded, now = whole(rows, "float8_e4m3fn", before, spread.rows)
    kept, seen = coded, None if amax is None else (now, weight_now)
  return _by_group(coded, held, sizes, x.dtype), (kept, held, sizes, amax, seen)


def _backward(
  how: Fp8, spread: Spread, saved: tuple[Any, ...], grad: Array
) -> tuple[Array, Array, Amax | None, None]:
  kept, held, sizes, amax, seen = saved
  rows, dtype = zero_past_the_end(grad, sizes), grad.dtype
  if how.blocks:
    coded, of_weight = quantized(rows, how, how.gradient), _of_weight_by_blocks(how)
    parts, block = (kept, rows), BLOCK
  else:
    before = None if amax is None else amax.gradient
    coded, now = whole(rows, how.gradient, before, spread.rows)
    of_weight, block = _of_weight_by_scales(kept.scale, coded.scale), None
    parts = kept.values, coded.values
    if amax is not None:
      amax = newest(
        amax, _once(seen[0], spread.rows), _once(seen[1], spread.weight), _once(now, spread.rows)
      )
  transposed = jax.vmap(lambda one: one.T)(held)
  total = sum_tiles(of_weight, parts, sizes, held.values.shape[1:], block)
  return _by_group(coded, transposed, sizes, dtype), clipped(total, dtype), amax, None


_product.defvjp(_forward, _backward)


def _by_group(coded: Operand, held: Operand, sizes: Array, dtype: Any) -> Array:
  """Rows [M K] with the weight [G K N] of their group."""
  by_row = coded.scale.ndim > 0

  def product(part: Operand, group: Array) -> Array:
    left = part if by_row else part._replace(scale=coded.scale)
    return scaled_product(left, Operand(held.values[group], held.scale[group]), dtype)

  rows = coded if by_row else coded._replace(scale=None)
  return map_tiles(product, rows, sizes, held.values.shape[2], dtype)


def _of_weight_by_blocks(how: Fp8):
  """(x [128 I], gradient [128 O]) -> [I O], where the 128 are one block."""

  def product(part: tuple[Array, Array]) -> Array:
    x, grad = part
    right = quantized(grad.T, how, how.gradient).T
    return scaled_product(quantized(x.T, how), right, jnp.float32)

  return product


def _of_weight_by_scales(x_scale: Array, grad_scale: Array):
  """The same of any number of rows in FP8."""

  def product(part: tuple[Array, Array]) -> Array:
    x, grad = part
    return scaled_product(Operand(x.T, x_scale), Operand(grad, grad_scale), jnp.float32)

  return product


def _once(value: Array, axes: tuple[str, ...]) -> Array:
  """0 on all devices of the axes but one: `shard_map` adds up what comes back to a copy on each."""
  if not axes:
    return value
  return jnp.where(jax.lax.axis_index(axes) == 0, value, 0.0)
