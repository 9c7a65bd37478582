"""BF16 to FP8 with a scale for each block, on the device that holds the values.

q = rne(clip(w / s, -top, top)) and s = max(amax, 1e-12) / top, so that q * s is near w. Everything
is computed from the bfloat16 rounding of the values: a product in training, a push and an exported
checkpoint then agree bit for bit. Blocks are counted in the whole tensor; a block that shards cut
is scaled by the largest of its fragments' amax, which gives the same bytes as quantising it whole.

The rounding is done on bit patterns: integer operations vectorise where XLA's own conversions to
FP8 and reductions of bfloat16 do not.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

Scale = Literal["float32", "power_of_two"]

_TINY = 1e-12  # smallest amax, so that a block of zeros has a scale


class _Format(NamedTuple):
  """An 8-bit float."""

  mantissa: int  # bits
  bias: int
  nan: int
  minus_zero: bool
  largest: float


# OCP 8-bit floating point specification 1.0; FNUZ: Noune et al. 2022, arXiv:2206.02915.
_FORMATS = {
  "float8_e4m3fn": _Format(mantissa=3, bias=7, nan=0x7F, minus_zero=True, largest=448.0),
  "float8_e4m3fnuz": _Format(mantissa=3, bias=8, nan=0x80, minus_zero=False, largest=240.0),
  "float8_e5m2": _Format(mantissa=2, bias=15, nan=0x7F, minus_zero=True, largest=57344.0),
}


class Quantization(NamedTuple):
  """How tensors are quantised. The dtype is the dialect.

  `block` None is one scale a tensor. `top` is the magnitude that the largest weight of a block
  gets: with FNUZ, 240 uses the whole range, and 224 gives the values of OCP with 448 exactly
  (scales doubled, all bytes but that of minus zero unchanged).
  """

  dtype: str = "float8_e4m3fn"
  block: tuple[int, int] | None = (128, 128)
  scale: Scale = "float32"
  top: float = 448.0


OCP = Quantization()
FNUZ = Quantization("float8_e4m3fnuz", top=240.0)
FNUZ_OF_OCP = Quantization("float8_e4m3fnuz", top=224.0)


def check(how: Quantization) -> Quantization:
  """`how`, if it is possible. Raises ValueError with the field that is not."""
  if how.dtype not in _FORMATS:
    raise ValueError(f"dtype {how.dtype} is not quantised to, expected one of {sorted(_FORMATS)}")
  if not 0 < how.top <= _FORMATS[how.dtype].largest:
    raise ValueError(f"top is {how.top}, the largest {how.dtype} is {_FORMATS[how.dtype].largest}")
  if how.block is not None and min(how.block) < 1:
    raise ValueError(f"block is {how.block}, expected two sizes of at least 1")
  if how.scale not in ("float32", "power_of_two"):
    raise ValueError(f"scale is {how.scale!r}, expected 'float32' or 'power_of_two'")
  return how


def grid(shape: Sequence[int], how: Quantization) -> tuple[int, ...]:
  """The shape of the scales of a tensor; blocks at its edges are smaller. () for one scale."""
  if how.block is None:
    return ()
  return tuple(-(-n // b) for n, b in zip(shape, how.block, strict=True))


def quantize(
  values: Float[Array, "N K"], how: Quantization = OCP
) -> tuple[Float[Array, "N K"], Float[Array, "..."]]:
  """A whole tensor as (FP8 values, float32 scales of shape `grid`). Jitted where `values` lie.

  A value that is not finite makes its block's scale not finite.
  """
  return _quantize(values, check(how))


def finite(values: Float[Array, "..."]) -> Float[Array, "..."]:
  """Infinities as the largest bfloat16 number, so that they saturate when quantised; NaN stays."""
  largest = float(jnp.finfo(jnp.bfloat16).max)
  return jnp.clip(values, -largest, largest)


@functools.partial(jax.jit, static_argnames=("how", "origin"))
def block_amax(
  values: Float[Array, "N K"], how: Quantization, origin: tuple[int, int] = (0, 0)
) -> Float[Array, "..."]:
  """Largest magnitude of each block that a fragment touches, after rounding to bfloat16.

  Args:
    origin: of the fragment in the tensor that blocks are counted in.
  Returns:
    [n, k] for the blocks origin // block ... (or a scalar); NaN where a value is NaN.
  """
  bits = _magnitude_bits(_bfloat16(values))
  if how.block is None:
    rows = _fold(bits.reshape(1, *bits.shape))
    return _from_magnitude_bits(rows.max(initial=0))
  padded = _pad(bits, how.block, origin)
  (n, k), (rows, columns) = padded.shape, how.block
  by_row = _fold(padded.reshape(n // rows, rows, k))
  return _from_magnitude_bits(by_row.reshape(n // rows, k // columns, columns).max(-1))


@functools.partial(jax.jit, static_argnames=("how",))
def scales_of(amax: Float[Array, "..."], how: Quantization) -> Float[Array, "..."]:
  """float32 scales; powers of two are rounded up, so that nothing is clipped."""
  # `maximum` keeps NaN: a scale that is not finite marks a weight that is not.
  scale = _divide(jnp.maximum(amax, jnp.float32(_TINY)), jnp.float32(how.top))
  if how.scale == "float32":
    return scale
  bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
  up = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0x7F800000)
  return jnp.where(jnp.isfinite(scale), jax.lax.bitcast_convert_type(up, jnp.float32), scale)


@functools.partial(jax.jit, static_argnames=("how", "origin"))
def quantize_with(
  values: Float[Array, "N K"],
  scales: Float[Array, "..."],
  how: Quantization,
  origin: tuple[int, int] = (0, 0),
) -> Float[Array, "N K"]:
  """A fragment quantised with given scales, those of the blocks that it touches (see
  `block_amax`).
  """
  wide = _bfloat16(values).astype(jnp.float32)
  if how.block is None:
    return _as_float8(_encode(_divide(wide, scales), how), how)
  (n, k), (rows, columns) = values.shape, how.block
  before = (origin[0] % rows, origin[1] % columns)
  padded = _pad(wide, how.block, origin)
  # A scale for each column first: the division is then one loop along whole rows.
  by_column = jax.lax.optimization_barrier(jnp.repeat(scales, columns, axis=1))
  blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1])
  coded = _encode(_divide(blocks, by_column[:, None, :]), how).reshape(padded.shape)
  return _as_float8(coded[before[0] : before[0] + n, before[1] : before[1] + k], how)


@functools.partial(jax.jit, static_argnames=("how",))
def dequantize(
  values: Float[Array, "N K"], scales: Float[Array, "..."], how: Quantization
) -> Float[Array, "N K"]:
  """float32 values times the scale of their block."""
  wide = values.astype(jnp.float32)
  if how.block is None:
    return wide * scales
  n, k = values.shape
  spread = jnp.repeat(jnp.repeat(scales, how.block[0], 0)[:n], how.block[1], 1)[:, :k]
  return wide * spread


@jax.jit
def to_fnuz(
  values: Float[Array, "N K"], scales: Float[Array, "..."]
) -> tuple[Float[Array, "N K"], Float[Array, "..."]]:
  """An OCP tensor in the FNUZ dialect, equal in value: the same bits mean half as much there, and
  minus zero's are NaN.
  """
  bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
  bits = jnp.where(bits == 0x80, jnp.uint8(0), bits)
  return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fnuz), scales * jnp.float32(2)


@functools.partial(jax.jit, static_argnames=("how",))
def _quantize(values, how):
  scales = scales_of(block_amax(values, how), how)
  return quantize_with(values, scales, how), scales


def _divide(values: jax.Array, divisor: jax.Array) -> jax.Array:
  """values / divisor, correctly rounded.

  XLA turns a division by something broadcast into a product with its reciprocal, which rounds
  differently. Adding zero times the values leaves the divisor as it is and hides that.
  """
  return values / (divisor + values * jnp.float32(0))


def _bfloat16(values: jax.Array) -> jax.Array:
  return values if values.dtype == jnp.bfloat16 else values.astype(jnp.bfloat16)


def _magnitude_bits(values: jax.Array) -> jax.Array:
  """Integers in the order of |values|; NaN is the largest."""
  return jax.lax.bitcast_convert_type(values, jnp.uint16) & jnp.uint16(0x7FFF)


def _from_magnitude_bits(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _fold(bits: jax.Array) -> jax.Array:
  """Maximum over axis 1 of [blocks, rows, columns].

  Eight rows at a time as elementwise maxima, which XLA vectorises along the columns; the barrier
  keeps it from fusing them back into one reduction.
  """
  step = math.gcd(bits.shape[1], 8)
  if step > 1:
    rows = bits.reshape(bits.shape[0], bits.shape[1] // step, step, bits.shape[2])
    bits = jax.lax.optimization_barrier(
      functools.reduce(jnp.maximum, (rows[:, :, i] for i in range(step)))
    )
  return bits.max(1, initial=0)


def _pad(values: jax.Array, block: tuple[int, int], origin: tuple[int, int]) -> jax.Array:
  """Zeros around a fragment up to the edges of the blocks it touches."""
  widths = [
    (start % size, -(start % size + n) % size)
    for n, start, size in zip(values.shape, origin, block, strict=True)
  ]
  return jnp.pad(values, widths) if any(map(any, widths)) else values


def _encode(values: jax.Array, how: Quantization) -> UInt8[Array, "..."]:
  """The byte of each float32 after clipping, rounded to nearest, ties to even; NaN stays NaN."""
  form = _FORMATS[how.dtype]
  dropped = 23 - form.mantissa  # bits of the float32 mantissa
  # Adding this leaves subnormals, rounded, in the low bits: its unit is the smallest subnormal.
  magic = (127 + 24 - form.bias - form.mantissa) << 23
  smallest_normal = (127 + 1 - form.bias) << 23
  clipped = jnp.clip(values, jnp.float32(-how.top), jnp.float32(how.top))
  bits = jax.lax.bitcast_convert_type(clipped, jnp.uint32)
  size = bits & jnp.uint32(0x7FFFFFFF)
  sign = (bits >> 24) & jnp.uint32(0x80)
  odd = (size >> dropped) & jnp.uint32(1)
  rounded = (size + jnp.uint32((1 << dropped - 1) - 1) + odd) >> dropped
  normal = rounded - jnp.uint32((127 - form.bias) << form.mantissa)
  shifted = jax.lax.bitcast_convert_type(size, jnp.float32) + jax.lax.bitcast_convert_type(
    jnp.uint32(magic), jnp.float32
  )
  subnormal = jax.lax.bitcast_convert_type(shifted, jnp.uint32) - jnp.uint32(magic)
  small = jnp.where(size < smallest_normal, subnormal, normal)
  if not form.minus_zero:
    sign = jnp.where(small == 0, jnp.uint32(0), sign)
  coded = jnp.where(size > 0x7F800000, jnp.uint32(form.nan), sign | small)
  return coded.astype(jnp.uint8)


def _as_float8(coded: UInt8[Array, "..."], how: Quantization) -> jax.Array:
  return jax.lax.bitcast_convert_type(coded, jnp.dtype(how.dtype))
