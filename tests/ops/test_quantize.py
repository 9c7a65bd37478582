"""FP8 quantisation against a numpy loop, bit for bit, and its properties."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from agentrl_jax.ops.quantize import (
  FNUZ,
  FNUZ_OF_OCP,
  OCP,
  Quantization,
  block_amax,
  check,
  dequantize,
  grid,
  quantize,
  quantize_with,
  scales_of,
  to_fnuz,
)
from agentrl_jax.transfer.plan import scale_name
from tests.reference import quantize as reference

POWER_OF_TWO = Quantization(scale="power_of_two")
PER_TENSOR = Quantization(block=None)
KINDS = [OCP, POWER_OF_TWO, FNUZ, FNUZ_OF_OCP, PER_TENSOR, FNUZ._replace(scale="power_of_two")]
KINDS += [PER_TENSOR._replace(scale="power_of_two")]
E5M2 = Quantization("float8_e5m2", top=57344.0)
KINDS += [
  E5M2,
  E5M2._replace(block=None),
  OCP._replace(block=(1, 128)),
  E5M2._replace(block=(128, 1)),
]


def weights(shape, seed=0):
  """bfloat16 values over many magnitudes, with a block of zeros, signed zeros and tiny values."""
  rng = np.random.default_rng(seed)
  values = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
  values[rng.random(shape) < 0.1] *= 1e-3  # subnormal after scaling
  values[: min(128, shape[0]), : min(128, shape[1])] = 0.0
  values[-1, -1] = -0.0
  if shape[0] > 128:
    values[128:, :5] = 1e-20  # below the smallest scale's reach
  return values.astype(ml_dtypes.bfloat16)


def as_bytes(array):
  return np.asarray(array).view(np.uint8)


SHAPES = [(256, 384), (1, 300), (127, 128), (3, 5)]


@pytest.mark.parametrize(
  ("how", "shape"), [(how, (130, 257)) for how in KINDS] + [(OCP, shape) for shape in SHAPES]
)
def test_equals_a_numpy_loop_bit_for_bit(how, shape):  # W5
  values = weights(shape)
  coded, scales = quantize(jnp.asarray(values), how)
  want, want_scales = reference.quantize(values.astype(np.float32), *how)
  np.testing.assert_array_equal(np.asarray(scales).view(np.uint32), want_scales.view(np.uint32))
  np.testing.assert_array_equal(as_bytes(coded), want)
  assert np.shape(scales) == grid(shape, how)
  assert (np.asarray(scales) > 0).all()
  assert np.isfinite(reference.TABLES[how.dtype][as_bytes(coded)]).all()


@pytest.mark.parametrize("how", [OCP, FNUZ, E5M2])
def test_every_bfloat16_rounds_as_the_definition_says(how):
  """All finite bfloat16 values up to `top`, of both signs, with a scale of exactly one."""
  bits = np.arange(1 << 16, dtype=np.uint16)
  values = bits.view(ml_dtypes.bfloat16)
  values = values[np.abs(values.astype(np.float32)) <= 2 * how.top][None, :]
  how = how._replace(block=(1, values.shape[1]))
  coded = quantize_with(jnp.asarray(values), jnp.ones((1, 1), jnp.float32), how)
  clipped = np.clip(values.astype(np.float32), -how.top, how.top)
  np.testing.assert_array_equal(as_bytes(coded), reference.encode(clipped, how.dtype))


def test_the_reference_itself_is_the_published_format():
  """OCP 8-bit specification 1.0, table 1: 448, smallest normal 2^-6, smallest subnormal 2^-9."""
  ocp, fnuz, wide = (reference.TABLES[how.dtype] for how in (OCP, FNUZ, E5M2))
  assert (np.nanmax(ocp), ocp[0x08], ocp[0x01]) == (448.0, 2.0**-6, 2.0**-9)
  assert (np.nanmax(fnuz), fnuz[0x08], fnuz[0x01]) == (240.0, 2.0**-7, 2.0**-10)
  assert (np.nanmax(wide), wide[0x04], wide[0x01]) == (57344.0, 2.0**-14, 2.0**-16)
  for name, table in reference.TABLES.items():
    theirs = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
    theirs[np.isinf(theirs)] = np.nan  # of e5m2, never made
    np.testing.assert_array_equal(theirs, table)


def test_float32_weights_are_rounded_to_bfloat16_first():
  values = np.random.default_rng(1).normal(size=(128, 256)).astype(np.float32)
  direct = quantize(jnp.asarray(values))
  rounded = quantize(jnp.asarray(values.astype(ml_dtypes.bfloat16)))
  for a, b in zip(direct, rounded, strict=True):
    np.testing.assert_array_equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("how", [OCP, PER_TENSOR])
@pytest.mark.parametrize("cuts", [((0, 100, 256), (0, 300, 384)), ((0, 128, 256), (0, 1, 384))])
def test_a_block_cut_by_shards_gives_the_same_bytes(how, cuts):  # W11
  values = weights((256, 384), seed=2)
  whole, whole_scales = quantize(jnp.asarray(values), how)
  rows, columns = how.block or (1 << 30, 1 << 30)
  amax = np.zeros(grid(values.shape, how) or (1, 1), np.float32)
  boxes = [
    (r0, r1, c0, c1)
    for r0, r1 in zip(cuts[0], cuts[0][1:], strict=False)
    for c0, c1 in zip(cuts[1], cuts[1][1:], strict=False)
  ]
  for r0, r1, c0, c1 in boxes:
    part = np.asarray(block_amax(jnp.asarray(values[r0:r1, c0:c1]), how, (r0, c0)))
    part = part.reshape(part.shape or (1, 1))
    place = np.s_[r0 // rows : r0 // rows + len(part), c0 // columns : c0 // columns + len(part.T)]
    amax[place] = np.maximum(amax[place], part)
  scales = scales_of(jnp.asarray(amax.reshape(grid(values.shape, how))), how)
  np.testing.assert_array_equal(np.asarray(scales), np.asarray(whole_scales))
  for r0, r1, c0, c1 in boxes:
    given = scales
    if how.block:
      given = scales[r0 // rows : -(-r1 // rows), c0 // columns : -(-c1 // columns)]
    part = quantize_with(jnp.asarray(values[r0:r1, c0:c1]), given, how, (r0, c0))
    np.testing.assert_array_equal(as_bytes(part), as_bytes(whole)[r0:r1, c0:c1])


@pytest.mark.parametrize("seed", range(4))
def test_the_error_is_bounded(seed):  # W3
  values = np.random.default_rng(seed).normal(size=(256, 256)).astype(ml_dtypes.bfloat16)
  coded, scales = quantize(jnp.asarray(values))
  back = np.asarray(dequantize(coded, scales, OCP))
  wide = values.astype(np.float32)
  spread = np.repeat(np.repeat(np.asarray(scales), 128, 0), 128, 1)
  error = np.abs(back - wide)
  # Half a step: 2^-4 of the value for normals, half of the smallest subnormal 2^-9 below.
  bound = np.maximum(np.abs(wide) / 16, spread / 1024) * (1 + 1e-6)
  assert (error <= bound).all()
  relative = np.linalg.norm(back - wide) / np.linalg.norm(wide)
  assert 0.025 < relative < 0.028  # of normal weights


@pytest.mark.parametrize("how", [OCP, FNUZ, PER_TENSOR])
def test_quantising_again_changes_nothing(how):  # W4
  values = weights((256, 384), seed=3)
  coded, scales = quantize(jnp.asarray(values), how)
  back = dequantize(coded, scales, how)
  # Blocks whose amax is below the smallest scale's reach are scaled by 1e-12 / top both times.
  again, again_scales = quantize(back, how)
  np.testing.assert_array_equal(np.asarray(again_scales), np.asarray(scales))
  np.testing.assert_array_equal(as_bytes(again), as_bytes(coded))


def test_quantising_again_keeps_values_with_power_of_two_scales():  # W4
  coded, scales = quantize(jnp.asarray(weights((256, 384), seed=4)), POWER_OF_TWO)
  back = dequantize(coded, scales, POWER_OF_TWO)
  again = dequantize(*quantize(back, POWER_OF_TWO), POWER_OF_TWO)
  np.testing.assert_array_equal(np.asarray(again), np.asarray(back))
  fraction, _ = np.frexp(np.asarray(scales))
  assert (fraction == 0.5).all()


def test_dialects_convert_exactly():  # W6
  finite = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
  assert len(finite) == 254
  ocp = jnp.asarray(finite.view(ml_dtypes.float8_e4m3fn)[None, :])
  scales = jnp.asarray([[0.25]], jnp.float32)
  converted, doubled = to_fnuz(ocp, scales)
  how = OCP._replace(block=(1, 254))
  want = np.asarray(dequantize(ocp, scales, how))
  got = np.asarray(dequantize(converted, doubled, how))
  np.testing.assert_array_equal(got, want)  # -0 == 0
  assert 0x80 not in as_bytes(converted)


def test_fnuz_with_the_top_of_ocp_is_ocp_converted():  # W6
  values = jnp.asarray(weights((130, 257), seed=5))
  converted, doubled = to_fnuz(*quantize(values, OCP))
  direct, scales = quantize(values, FNUZ_OF_OCP)
  np.testing.assert_array_equal(as_bytes(direct), as_bytes(converted))
  np.testing.assert_array_equal(np.asarray(scales), np.asarray(doubled))
  other, _ = quantize(values, FNUZ)
  assert (as_bytes(other) != as_bytes(direct)).any()  # a different valid result


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", [OCP, POWER_OF_TWO, PER_TENSOR])
def test_a_weight_that_is_not_finite_shows_in_its_scale(bad, how):
  values = np.ones((256, 256), ml_dtypes.bfloat16)
  values[200, 3] = bad
  with jax.debug_nans(False):
    _, scales = quantize(jnp.asarray(values), how)
  finite = np.isfinite(np.asarray(scales))
  assert not finite.all()
  assert how.block is None or finite.tolist() == [[True, True], [False, True]]


def test_names_and_refusals():
  assert scale_name("a.weight", OCP) == "a.weight_scale_inv"
  assert scale_name("a.weight", PER_TENSOR) == "a.weight_scale"
  with pytest.raises(ValueError, match="dtype float8_e3m4 is not quantised to"):
    check(OCP._replace(dtype="float8_e3m4"))
  with pytest.raises(ValueError, match=r"top is 448.0, the largest float8_e4m3fnuz is 240"):
    check(FNUZ._replace(top=448.0))
