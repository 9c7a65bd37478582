"""Routed experts in FP8: each expert's rows as the plain FP8 product has them, on meshes too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import layers, matmul_fp8, moe, precision
from agentrl_jax.models.grouped_fp8 import grouped_product
from agentrl_jax.models.model import unstack
from agentrl_jax.models.precision import Amax, Fp8, Multiplied
from agentrl_jax.models.sharding import BATCH, make_mesh
from tests.models.test_dense import random_weights
from tests.models.test_moe_families import QWEN3

BLOCKS, TENSOR = Fp8(), Fp8(blocks=False)
DELAYED = Fp8(blocks=False, history=2)
NAMES = ["blocks", "tensor", "delayed"]
SIZES = (150, 0, 7, 33)  # of 200 rows; the first group has two blocks of rows
INPUTS, OUTPUTS = 200, 140


def operands(dtype=jnp.float32):
  """Rows, weights and what comes back, each group's of another magnitude."""
  rng = np.random.default_rng(0)
  x, grad = rng.normal(size=(200, INPUTS)), rng.normal(size=(200, OUTPUTS))
  weight = rng.normal(size=(4, INPUTS, OUTPUTS)) * np.array([1.0, 2.0, 0.1, 5.0])[:, None, None]
  return tuple(jnp.asarray(a, dtype) for a in (x, weight, grad))


def with_gradients(product, *primals):
  made, transpose = jax.vjp(product, *primals[:-1])
  return made, *transpose(primals[-1])


@functools.partial(jax.jit, static_argnums=0)
def grouped(how, x, weight, amax, grad):
  sizes = jnp.asarray(SIZES, jnp.int32)
  return with_gradients(
    lambda x, w, amax: grouped_product(x, Multiplied(w, how, amax), sizes), x, weight, amax, grad
  )


def one_by_one(how, x, weight, amax, grad):
  """The same by `matmul_fp8`, a group after another; zeros past the last."""
  made, onto_x, of_weight = np.zeros((200, OUTPUTS)), np.zeros(x.shape), np.zeros(weight.shape)
  start = 0
  for group, size in enumerate(SIZES):
    rows = slice(start, start := start + size)
    own = None if amax is None else Amax(amax.x, amax.weight[group], amax.gradient)
    if size:
      product = lambda x, w, own=own: matmul_fp8.matmul(x, Multiplied(w, how, own))  # noqa: E731
      found = with_gradients(product, x[rows], weight[group], grad[rows])
      made[rows], onto_x[rows], of_weight[group] = found
  return made, onto_x, of_weight


def alike(x, grad):
  """With the largest number first in each group, so that all have the scale of the whole."""
  firsts = np.cumsum([0, *SIZES[:-1]])[[0, 2, 3]]
  return x.at[firsts, 0].set(9.0), grad.at[firsts, 0].set(-7.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  "how", [BLOCKS, TENSOR, DELAYED, Fp8(gradient="float8_e4m3fn")], ids=[*NAMES, "e4m3"]
)
def test_each_group_is_multiplied_as_by_itself(how, dtype):
  """Float32 to the order in which numbers are added; gradients of weights in bfloat16, too."""
  x, weight, grad = operands(dtype)
  if how == TENSOR:
    x, grad = alike(x, grad)
  amax = Amax(*(jnp.full(shape, 2.5) for shape in ((2,), (4, 2), (2,)))) if how.history else None
  made, onto_x, of_weight, _ = grouped(how, x, weight, amax, grad)
  want = one_by_one(how, x, weight, amax, grad)
  tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
  for got, wanted in ((made, want[0]), (onto_x, want[1])):
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(
      np.asarray(got, np.float64), wanted, rtol=0, atol=tolerance * largest
    )
  scale = np.abs(want[2]).max(axis=(1, 2), keepdims=True) + 1e-9
  np.testing.assert_allclose(np.asarray(of_weight, np.float64) / scale, want[2] / scale,
                             atol=tolerance)  # fmt: skip
  assert (made[190:] == 0).all() and (onto_x[190:] == 0).all() and (of_weight[1] == 0).all()
  assert made.dtype == onto_x.dtype == of_weight.dtype == dtype


def test_a_history_has_a_weight_of_its_own_for_each_expert():
  """And leaves out what is no expert's: the largest numbers lie past the last group."""
  x, weight, grad = operands()
  x, grad = x.at[195].set(1e4), grad.at[195].set(1e4)
  amax = Amax(jnp.zeros(2), jnp.zeros((4, 2)), jnp.zeros(2))
  seen = precision.remembered({"w": amax}, {"w": grouped(DELAYED, x, weight, amax, grad)[3]})["w"]
  largest = lambda a, axis=None: np.abs(np.asarray(a.astype(jnp.bfloat16), np.float32)).max(axis)  # noqa: E731
  np.testing.assert_array_equal(seen.x, [largest(x[:190]), 0])
  np.testing.assert_array_equal(seen.gradient, [largest(grad[:190]), 0])
  np.testing.assert_array_equal(seen.weight[:, 0], largest(weight, (1, 2)))
  assert (seen.weight[:, 1] == 0).all()


@pytest.mark.parametrize("how", [BLOCKS, TENSOR, DELAYED], ids=NAMES)
def test_what_is_too_large_saturates_and_nan_stays(how):
  x, weight, grad = operands(jnp.bfloat16)
  small = Amax(*(jnp.full(s, 1e-3) for s in ((2,), (4, 2), (2,)))) if how.history else None
  huge = jnp.asarray(1e38, jnp.bfloat16)
  x = (x * huge).at[3, 5].set(jnp.inf)
  for found in grouped(how, x, weight * huge, small, (grad * huge).at[4, 1].set(-jnp.inf))[:3]:
    assert np.isfinite(np.asarray(found, np.float32)).all()
  with jax.debug_nans(False):
    made = np.asarray(grouped(how, x.at[160, 0].set(jnp.nan), weight, small, grad)[0], np.float32)
  assert np.isnan(made[160]).all() and (how.history or np.isnan(made).any())
  if how.blocks:
    assert np.isfinite(np.delete(made, 160, 0)).all()


def layer(how, width):
  """(weights of a layer of six experts, their histories)."""
  rng = np.random.default_rng(1)
  shapes = {"gate": (6, 128, width), "up": (6, 128, width), "down": (6, width, 128)}
  arrays = {n: jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for n, s in shapes.items()}
  empty = Amax(jnp.zeros(2), jnp.zeros((6, 2)), jnp.zeros(2)) if how.history else None
  return arrays, dict.fromkeys(shapes, empty)


def mixed(how, compute, arrays, history, x, expert, weight):
  experts = moe.Experts(**{n: Multiplied(arrays[n], how, history[n]) for n in arrays})
  return jnp.sum(jnp.sin(compute(experts, x, expert, weight)))


MESHES = [
  ({"expert": 3}, True),
  ({"expert": 2, "tensor": 2}, True),  # the width is cut where blocks end
  # The rows of an expert are not all beside each other: other blocks of them, in its gradient.
  ({"expert": 2, "fsdp": 2}, False),
  ({"data": 2, "expert": 4}, False),  # does not divide six experts: each device has them all
]


@pytest.mark.parametrize("how", [BLOCKS, TENSOR, DELAYED], ids=NAMES)
@pytest.mark.parametrize(("axes", "same_blocks"), MESHES, ids=str)
def test_experts_on_a_mesh_have_the_scales_of_one_device(how, axes, same_blocks):
  mesh = make_mesh(**axes)
  arrays, history = layer(how, 256)
  rng = np.random.default_rng(2)
  rows = (24, 10)
  x = jnp.asarray(rng.normal(size=(*rows, 128)), jnp.float32)
  expert = jnp.asarray(rng.integers(-1, 6, (*rows, 2)), jnp.int32)
  weight = jnp.asarray(rng.uniform(0.2, 1.0, (*rows, 2)), jnp.float32)

  def grad(compute, x):
    run = functools.partial(mixed, how, compute)
    return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(arrays, history, x, expert, weight)

  value, (of_weight, seen, onto_x) = grad(moe.compute_experts, x)
  placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*BATCH, None)))
  found, (its_weight, its_seen, its_x) = grad(moe.sharded_experts(mesh), placed)
  np.testing.assert_allclose(found, value, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), its_seen, seen)
  assert how.history == 0 or all((s.weight[:, 0] > 0).all() for s in its_seen.values())
  off = lambda a, b: np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)  # noqa: E731
  # The order of sums moves a few numbers to the next one of FP8.
  assert off(its_x, onto_x) < 2e-3
  for name in of_weight:
    limit = 2e-3 if same_blocks or not how.blocks else 0.06
    assert off(its_weight[name], of_weight[name]) < limit


def test_the_sampler_multiplies_stored_experts_as_the_learner_does():
  """To the last bit: quantising what is held again gives the same numbers."""
  weights = random_weights(QWEN3, 1)
  for how in (BLOCKS, TENSOR):
    held = precision.stored(unstack(weights), how).layers[1].moe
    learner = precision.marked(unstack(weights), how).layers[1].moe
    assert isinstance(learner.experts.up, Multiplied)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)), jnp.float32)
    got, want, plain = (
      moe.moe(
        QWEN3.config.router, w, x, jnp.ones((2, 5), bool), None,
        compute=moe.compute_experts, matmul=layers.matmul,
      )[0]
      for w in (held, learner, unstack(weights).layers[1].moe)
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)
    assert 1e-3 < np.abs(want - plain).max() / np.abs(plain).max() < 0.2
