"""Steps with products in FP8: masters, gradients over micro-batches, histories, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.critic import on_policy
from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.products import Products
from agentrl_jax.learner.state import abstract_state, make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import sft
from agentrl_jax.models.precision import Fp8
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.learner.test_llama import MODEL
from tests.learner.toy import random_batch, toy_model
from tests.models.test_moe_families import QWEN3

SGD = optax.sgd(1.0)


def one_step(products, mesh, micro_rows, dtype=jnp.float32):
  """(log-probs before, update, metrics, state after)."""
  batch = random_batch(3, rows=16, vocabulary=32)
  state = make_state(MODEL, SGD, mesh, seed=1, products=products)
  evaluate = make_evaluate(MODEL, mesh, rows=micro_rows, dtype=dtype, products=products)
  policy = evaluate(state.weights, batch, None, state.beside)
  loss_batch = make_prepare(sft())(batch, Aux(old_logp=np.zeros(batch.tokens.shape, np.float32)))
  step = make_step(MODEL, SGD, sft(), mesh, micro_rows=micro_rows, dtype=dtype, products=products)
  before = jax.device_get(state.weights)
  after, metrics = jax.device_get(step(state, loss_batch))
  update = jax.tree.map(lambda a, b: a - b, after.weights, before)
  return np.asarray(policy.logp), update, metrics, after


def flat(tree):
  return np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)])


def test_a_step_in_fp8_is_a_float32_step_but_for_rounding():
  """In bfloat16 too: masters and their updates are float32."""
  mesh = make_mesh(data=1)
  logp, update, _, _ = one_step(Products(), mesh, 16)
  for products, dtype, error in (
    (Products(Fp8()), jnp.float32, 0.35),
    (Products(), jnp.bfloat16, 0.05),
  ):
    other_logp, other, metrics, after = one_step(products, mesh, 16, dtype)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(after.weights))
    assert 1e-4 < np.abs(other_logp - logp).max() < 0.3
    off = np.linalg.norm(flat(other) - flat(update)) / np.linalg.norm(flat(update))
    assert 1e-3 < off < error
    assert metrics["skipped"].total == 0


@pytest.mark.slow
def test_micro_batches_keep_the_largest_magnitude_of_the_step():
  delayed = Products(Fp8(blocks=False, history=2))
  once = one_step(delayed, make_mesh(data=1), 16)[3].beside.history
  cut = one_step(delayed, make_mesh(data=1), 4)[3].beside.history
  assert set(once) == {
    *(f"layers.attention.{n}" for n in ("query", "key", "value", "output")),
    *(f"layers.mlp.{n}" for n in ("gate", "up", "down")),
  }
  for name, amax in once.items():
    assert amax.x.shape == (2, 2) and (amax.x[:, 1] == 0).all()
    np.testing.assert_array_equal(amax.weight, cut[name].weight)
    # Other roundings move single numbers; a sum over the four would be several times as large.
    np.testing.assert_allclose(amax.x[:, 0], cut[name].x[:, 0], rtol=0.3)
    np.testing.assert_allclose(amax.gradient[:, 0], cut[name].gradient[:, 0], rtol=0.5)
  for name in ("query", "key", "value"):  # of the first layer no product came before
    first = [made[f"layers.attention.{name}"].x[0, 0] for made in (once, cut)]
    assert first[0] == first[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [Fp8(), Fp8(blocks=False, history=2)])
def test_sharded_equals_one_device(how):
  one = one_step(Products(how), make_mesh(data=1), 16)
  many = one_step(Products(how), make_mesh(data=2, fsdp=2, tensor=2), 4)
  np.testing.assert_allclose(one[0], many[0], atol=2e-2)
  # Blocks of tokens differ with the micro-batch, so gradients are of other roundings.
  off = np.linalg.norm(flat(one[1]) - flat(many[1])) / np.linalg.norm(flat(one[1]))
  assert off < 0.15


def test_weights_beside_a_critic_are_spread_as_without_one():
  mesh = make_mesh(fsdp=2)
  alone, beside = (abstract_state(MODEL, SGD, mesh, critic=made) for made in (None, on_policy))
  same = jax.tree.map(lambda a, b: a.sharding == b.sharding, alone.weights, beside.weights)
  assert all(jax.tree.leaves(same))
  assert not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(beside.weights))


@pytest.mark.parametrize(
  "how",
  [
    Fp8(blocks=False, history=2),
    pytest.param(Fp8(), marks=pytest.mark.slow),
    pytest.param(Fp8(blocks=False), marks=pytest.mark.slow),
  ],
  ids=["delayed", "blocks", "tensor"],
)
def test_a_mixture_learns_with_its_experts_in_fp8(how):
  """Steps on one batch lower its loss as steps in float32 do, on an expert axis."""
  batch = random_batch(3, rows=8, vocabulary=32)
  loss_batch = make_prepare(sft())(batch, Aux(old_logp=np.zeros(batch.tokens.shape, np.float32)))
  optimizer, mesh = optax.adam(1e-2), make_mesh(expert=2)
  losses = {}
  for products in (Products(), Products(how)):
    state = make_state(QWEN3, optimizer, mesh, seed=1, products=products)
    step = make_step(QWEN3, optimizer, sft(), mesh, micro_rows=2, products=products)
    losses[products] = []
    for _ in range(6):
      state, metrics = step(state, loss_batch)
      losses[products].append(float(metrics["loss"].total))
    assert int(state.skipped) == 0
  exact, made = losses.values()
  assert made[-1] < made[0] - 0.5 * (exact[0] - exact[-1])
  assert exact[0] - exact[-1] > 0.5 and made[0] != exact[0]
  if how.history:
    history = jax.device_get(state.beside.history)
    for name in ("gate", "up", "down"):
      amax = history[f"layers.moe.experts.{name}"]
      assert amax.x.shape == (2, 2) and amax.weight.shape == (2, 4, 2)
      assert all((leaf > 0).all() for leaf in (amax.x, amax.weight, amax.gradient))


def test_a_model_without_such_products_is_refused():
  with pytest.raises(ValueError, match="toy has no product at"):
    abstract_state(toy_model(), SGD, make_mesh(data=1), products=Products(Fp8()))
