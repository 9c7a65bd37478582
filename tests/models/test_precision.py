"""FP8 products: bit for bit against a numpy loop, their gradients, saturation, delayed scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import layers, llama, matmul_fp8, moe, precision
from agentrl_jax.models.model import is_spec, parameter_path, unstack
from agentrl_jax.models.precision import Amax, Fp8, Multiplied
from agentrl_jax.ops.quantize import Quantization, dequantize, quantize
from tests.models.test_dense import random_weights
from tests.models.test_moe_families import DEEPSEEK, QWEN3
from tests.reference import quantize as reference

TINY = llama.bind(
  llama.Config(
    vocab_size=64, embed=160, ffw=192, layers=2, heads=4, kv_heads=2, head_dim=40, max_position=64,
    tied=True,
  )
)  # fmt: skip
TENSOR = Fp8(blocks=False)
DELAYED = Fp8(blocks=False, history=3)
E4M3 = Fp8(gradient="float8_e4m3fn")


def operand(rng, rows, columns):
  """Values whose FP8 products sum exactly in float32 in any order, with scales that are powers of
  two: small whole numbers, and 448 once in each block of 128.
  """
  values = rng.integers(-8, 9, (rows, columns)).astype(np.float32)
  values[:, ::128] = 448.0 * rng.choice([-1, 1], values[:, ::128].shape)
  return values


def by_loop(left, right, block):
  """left @ right, one block of the sum after another, from FP8 bytes of a numpy loop."""
  table = reference.TABLES["float8_e4m3fn"].astype(np.float32)
  (a, a_scale), (b, b_scale) = (
    reference.quantize(x, "float8_e4m3fn", how, "float32", 448.0)
    for x, how in ((left, block and (1, block)), (right, block and (block, block)))
  )
  if block is None:
    return table[a] @ table[b] * a_scale * b_scale
  total = np.zeros((left.shape[0], right.shape[1]), np.float32)
  for m, n in np.ndindex(*total.shape):
    for k in range(a_scale.shape[1]):
      part = np.float32(0)
      for i in range(k * block, min((k + 1) * block, left.shape[1])):
        part += table[a[m, i]] * table[b[i, n]]
      total[m, n] += part * a_scale[m, k] * b_scale[k, n // block]
  return total


@pytest.mark.parametrize(("how", "block"), [(Fp8(), 128), (TENSOR, None)])
def test_a_product_equals_a_numpy_loop_bit_for_bit(how, block):
  rng = np.random.default_rng(0)
  left, right = operand(rng, 5, 300), operand(rng, 300, 140)
  # Of each block its own power of two, which scales must carry.
  if block:
    left[:, 128:256] *= 4
    right[:128, :128] /= 8
  made = matmul_fp8.matmul(jnp.asarray(left), Multiplied(jnp.asarray(right), how))
  np.testing.assert_array_equal(np.asarray(made), by_loop(left, right, block))


def test_random_operands_too_to_the_order_of_summation():
  rng = np.random.default_rng(1)
  left = np.asarray(jnp.asarray(rng.normal(size=(4, 200)), jnp.bfloat16).astype(jnp.float32))
  right = np.asarray(jnp.asarray(rng.normal(size=(200, 130)), jnp.bfloat16).astype(jnp.float32))
  made = matmul_fp8.matmul(jnp.asarray(left), Multiplied(jnp.asarray(right), Fp8()))
  np.testing.assert_allclose(np.asarray(made), by_loop(left, right, 128), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("how", [Fp8(), pytest.param(E4M3, marks=pytest.mark.slow), DELAYED])
def test_gradients_are_those_of_float32_but_for_rounding(how):
  """Each is exactly the product of the rounded operands, and rounding moves a product of normal
  numbers by its two operands' relative errors: 0.027 of e4m3, 0.053 of e5m2.
  """
  rng = np.random.default_rng(2)
  x, weight, back = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((2, 70, 200), (200, 130), (2, 70, 130))
  )
  empty = Amax(*[jnp.zeros(3)] * 3) if how.history else None

  @jax.jit
  def both(x, weight):
    made, transpose = jax.vjp(
      lambda x, w: matmul_fp8.matmul(x, Multiplied(w, how, empty)), x, weight
    )
    return made, *transpose(back)

  got = both(x, weight)
  want = x @ weight, back @ weight.T, jnp.einsum("bti,bto->io", x, back)
  coarse = np.hypot(0.027, 0.053 if how.gradient == "float8_e5m2" else 0.027)
  for made, exact, error in zip(got, want, (np.hypot(0.027, 0.027), coarse, coarse), strict=True):
    relative = np.linalg.norm(made - exact) / np.linalg.norm(exact)
    assert 0.8 * error < relative < 1.15 * error

  def rounded(values, dtype, block):
    kind = Quantization(dtype, block if how.blocks else None, top=precision.LARGEST[dtype])
    return np.asarray(dequantize(*quantize(values, kind), kind), np.float64)

  rows, gradient = back.reshape(-1, 130), how.gradient
  onto_x = rounded(rows, gradient, (1, 128)) @ rounded(weight, "float8_e4m3fn", (128, 128)).T
  of_weight = rounded(x.reshape(-1, 200), "float8_e4m3fn", (128, 1)).T @ rounded(
    rows, gradient, (128, 1)
  )
  scale = np.abs(onto_x).max(), np.abs(of_weight).max()
  np.testing.assert_allclose(got[1].reshape(-1, 200), onto_x, atol=3e-6 * scale[0])
  np.testing.assert_allclose(got[2], of_weight, atol=3e-6 * scale[1])


@pytest.mark.parametrize(
  ("how", "dtype"),
  [
    (Fp8(), jnp.float32),
    pytest.param(Fp8(), jnp.bfloat16, marks=pytest.mark.slow),
    (DELAYED, jnp.bfloat16),
  ],
)
def test_what_is_too_large_saturates(how, dtype):
  """In the operands, in the product, and in what comes back; an infinity is the largest number."""
  rng = np.random.default_rng(3)
  x, weight = jnp.asarray(rng.normal(size=(3, 150))), jnp.asarray(rng.normal(size=(150, 40)))
  small = Amax(*[jnp.full(3, 1e-3)] * 3) if how.history else None  # far behind what comes

  @jax.jit
  def both(x, weight):
    made, transpose = jax.vjp(
      lambda x, w: matmul_fp8.matmul(x, Multiplied(w, how, small)), x, weight
    )
    return made, *transpose(jnp.full_like(made, 3e38))

  for huge in (1e38, 3e38):
    for found in both((x * huge).clip(-3e38, 3e38).astype(dtype), (weight * 1e30).astype(dtype)):
      assert np.isfinite(np.asarray(found, np.float32)).all()
  infinite = x.at[0, 0].set(jnp.inf).astype(dtype)
  for found in both(infinite, weight.astype(dtype)):
    assert np.isfinite(np.asarray(found, np.float32)).all()
  zeros = both(jnp.zeros((3, 150), dtype), jnp.zeros((150, 40), dtype))
  assert all((np.asarray(found, np.float32) == 0).all() for found in zeros)


def test_a_nan_is_not_hidden():
  with jax.debug_nans(False):
    for how in (Fp8(), TENSOR):
      made = matmul_fp8.matmul(jnp.full((1, 4), jnp.nan), Multiplied(jnp.ones((4, 4)), how))
      assert np.isnan(made).all()


def test_delayed_scales_are_of_the_steps_before():
  x, weight = jnp.full((2, 8), 3.0), jnp.full((8, 4), 0.5)

  def loss(history, x):
    return jnp.sum(matmul_fp8.matmul(x, Multiplied(weight, DELAYED, history["w"])))

  history = {"w": Amax(*[jnp.zeros(3)] * 3)}
  for step, size in enumerate((1.0, 2.0, 0.25)):
    seen = jax.grad(loss)(history, x * size)
    history = precision.remembered(history, seen)
    assert history["w"].x[0] == 3.0 * size and history["w"].weight[0] == 0.5
    assert history["w"].gradient[0] == 1.0
    assert (history["w"].x[step + 1 :] == 0).all()
  # 6 is the largest of three: 24 is cut to it, as it is not known yet.
  made = matmul_fp8.matmul(x * 8, Multiplied(weight, DELAYED, history["w"]))
  np.testing.assert_allclose(made, np.full((2, 4), 8 * 6 * 0.5), rtol=1e-6)
  history = precision.remembered(history, jax.grad(loss)(history, x * 8))
  np.testing.assert_array_equal(history["w"].x, [24.0, 0.75, 6.0])


PROJECTIONS = [f"attention.{name}" for name in ("query", "key", "value", "output")]
MLP = ["gate", "up", "down"]
EXPERTS = [f"layers.moe.experts.{name}" for name in MLP]
LATENT = [f"attention.{name}" for name in ("query_down", "query", "down", "up", "output")]


@pytest.mark.parametrize(
  ("model", "expected"),
  [
    (TINY, [f"layers.{name}" for name in (*PROJECTIONS, *(f"mlp.{n}" for n in MLP))]),
    (QWEN3, [*(f"layers.{name}" for name in PROJECTIONS), *EXPERTS]),
    (DEEPSEEK, [
      *(f"{stack}.{name}" for stack in ("dense_layers", "layers") for name in LATENT),
      *(f"dense_layers.mlp.{n}" for n in MLP), *(f"layers.moe.shared.{n}" for n in MLP), *EXPERTS,
    ]),
  ],
)  # fmt: skip
def test_only_listed_places_are_in_fp8(model, expected):
  """Never embedding, head, routers, norms and biases."""
  marked = precision.marked(model.abstract(), Fp8())
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    marked, is_leaf=lambda x: isinstance(x, Multiplied) or is_spec(x)
  )
  inside = {".".join(parameter_path(path)) for path, leaf in leaves if not is_spec(leaf)}
  assert inside == set(expected)


def test_a_model_in_fp8_and_its_master_weights():
  """Float32 masters get float32 gradients; what is stored as FP8 gives the same numbers."""
  weights = random_weights(TINY, 0)
  tokens = jnp.asarray(np.random.default_rng(4).integers(0, 64, (2, 12)), jnp.int32)
  sample, position = jnp.zeros_like(tokens), jnp.broadcast_to(jnp.arange(12), tokens.shape)
  how = Fp8()

  def run(weights, **options):
    return TINY.forward(weights, tokens, sample, position, **options)

  plain = run(weights)
  made = jax.jit(lambda w: run(precision.marked(w, how), matmul=matmul_fp8.matmul))(weights)
  error = np.linalg.norm(made - plain) / np.linalg.norm(plain)
  assert 0.02 < error < 0.2  # 0.04 a product of random numbers, seven a layer
  gradient = jax.jit(
    jax.grad(lambda w: jnp.sum(jnp.square(run(precision.marked(w, how), matmul=matmul_fp8.matmul))))
  )(weights)
  assert all(g.dtype == jnp.float32 and np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))

  held = precision.stored(unstack(weights), how)
  positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
  decoded, _ = jax.jit(lambda w, c: TINY.decode(w, c, tokens, positions, matmul=matmul_fp8.matmul))(
    held, TINY.init_cache(2, 16)
  )
  np.testing.assert_allclose(decoded, made, atol=2e-4)
  assert held.layers[0].mlp.up.values.dtype == jnp.float8_e4m3fn
  assert held.embedding.dtype == jnp.float32


def test_experts_are_stored_and_routers_are_not():
  weights = random_weights(QWEN3, 1)
  held = precision.stored(unstack(weights)).layers[0].moe
  assert held.experts.gate.values.dtype == jnp.float8_e4m3fn
  assert held.experts.gate.values.shape == weights.layers.moe.experts.gate.shape[1:]
  assert held.router.dtype == jnp.float32
  back = held.replace(experts=moe._ready(held.experts, jnp.float32))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 16)), jnp.float32)
  real = jnp.ones((1, 5), bool)
  got, want = (
    moe.moe(
      QWEN3.config.router, of, x, real, None, compute=moe.compute_experts, matmul=layers.matmul
    )[0]
    for of in (held, back)
  )
  np.testing.assert_array_equal(got, want)


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match="gradient is 'float16', expected one of"):
    Fp8(gradient="float16")
  with pytest.raises(ValueError, match="history is 4 with blocks"):
    Fp8(history=4)
  with pytest.raises(ValueError, match=r"places are \['moe.router'\], expected some of"):
    Fp8(places=("moe.router",))
