"""The learner on mixtures of experts: meshes, micro-batches, router losses, corrections, replay."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.losses.routers import Routers, router_loss, with_router_loss
from agentrl_jax.models import llama, moe, moe_decoder, qwen3_moe
from agentrl_jax.models.glm4_moe import bind as glm4
from agentrl_jax.models.model import cast
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.minibatches import minibatches
from agentrl_jax.orchestrate.run import algorithm_of
from agentrl_jax.types import Aux, LossBatch, PolicyEval
from tests.learner.toy import random_batch
from tests.reference import moe as loops

SIZES: dict[str, Any] = {
  "vocab_size": 32, "embed": 16, "ffw": 24, "heads": 4, "kv_heads": 2, "head_dim": 4,
  "max_position": 64, "experts": 4, "expert_ffw": 12,
}  # fmt: skip
QWEN3 = qwen3_moe.bind(
  qwen3_moe.config(**SIZES, layers=2, experts_per_token=2, normalized=True, load_balance=0.001)
)
GLM4 = glm4(
  moe_decoder.Config(
    **SIZES, layers=3, dense_layers=1, shared_ffw=12, rotary_dim=2, query_key_norm=True,
    router=moe.Sigmoid(2, normalized=True, groups=2, groups_kept=1, scale=1.5),
  )
)  # fmt: skip
SGD = optax.sgd(1.0)
BALANCED = with_router_loss(grpo(), load_balance=0.3, z=0.05)


def batch_of(seed=3, rows=16):
  return random_batch(seed, rows=rows, vocabulary=32)


def one_step(model, mesh, rows, batch, *, optimizer=SGD, algorithm=BALANCED, **options):
  """(what evaluate found, weights before, weights after, metrics) of a step off-policy."""
  state = make_state(model, optimizer, mesh, seed=1)
  before = jax.device_get(state.weights)
  old = make_evaluate(model, mesh, rows=rows)(state.weights, batch)
  noise = np.random.default_rng(0).normal(0, 0.1, batch.tokens.shape).astype(np.float32)
  old_logp = np.where(batch.action, np.asarray(old.logp) + noise, 0.0).astype(np.float32)
  aux = Aux(old_logp=old_logp, routers=jax.device_get(old.routers))  # pyright: ignore
  loss_batch = make_prepare(algorithm)(batch, aux)
  step = make_step(model, optimizer, algorithm, mesh, micro_rows=rows, **options)
  state, metrics = step(state, loss_batch)
  return jax.device_get((old, before, state.weights, metrics))


def assert_close(ours, theirs):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6, rtol=1e-4), ours, theirs)


@pytest.mark.parametrize(
  ("model", "axes"),
  [
    (QWEN3, {"data": 2, "expert": 4}),
    pytest.param(QWEN3, {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param(QWEN3, {"fsdp": 8}, marks=pytest.mark.slow),
    pytest.param(GLM4, {"fsdp": 2, "expert": 4}, marks=pytest.mark.slow),
  ],
  ids=lambda x: str(x) if isinstance(x, dict) else x.family,
)
def test_a_step_on_eight_devices_equals_one(model, axes):
  """Log-probs, sums of routers, new weights and metrics, with experts over their axis."""
  batch = batch_of()
  one = one_step(model, make_mesh(data=1), 16, batch)
  many = one_step(model, make_mesh(**axes), 16 // (8 // axes.get("tensor", 1)), batch)
  assert_close(many, one)
  assert np.abs(one[2].layers.moe.router - one[1].layers.moe.router).max() > 1e-3


def test_micro_batches_add_up():
  """Each expert's share is that of the whole batch, whatever part is differentiated at a time."""
  batch = batch_of()
  whole, parts = (one_step(QWEN3, make_mesh(data=1), rows, batch) for rows in (16, 4))
  assert_close(parts, whole)
  metrics = whole[3]
  assert metrics["router_load_balance"].count == metrics["router_z"].count == 1
  sums = whole[0].routers
  assert sums.tokens.tolist() == [np.sum(batch.sample >= 0)] * 2
  assert sums.assigned.sum(-1).tolist() == [2 * np.sum(batch.sample >= 0)] * 2
  by_hand = [4 * (a * p).sum() for a, p in zip(sums.assigned, sums.probability, strict=True)]
  by_hand = np.mean(by_hand) / sums.tokens[0] ** 2
  np.testing.assert_allclose(metrics["router_load_balance"].total, by_hand, rtol=1e-5)
  plain = one_step(QWEN3, make_mesh(data=1), 16, batch, algorithm=grpo())[3]
  expected = plain["loss"].total + 0.3 * by_hand + 0.05 * metrics["router_z"].total
  np.testing.assert_allclose(metrics["loss"].total, expected, rtol=1e-5)


def test_gradient_equals_numerical_one_of_loops():
  """By central differences of a loss in float64 loops, at fixed choices, for one layer's router."""
  rng = np.random.default_rng(0)
  x, router = rng.normal(size=(20, 6)), rng.normal(size=(6, 4))
  chosen = [set(np.argsort(-row)[:2].tolist()) for row in x @ router]

  def by_loops(weights):
    balance, z = loops.router_losses(x @ weights, chosen)
    return 0.7 * balance + 0.2 * z

  def ours(weights):
    choice, layer = moe.Softmax(2, normalized=True), jnp.asarray(x, jnp.float32)[None]
    logits = jnp.einsum("btd,de->bte", layer, weights)
    made = moe.choose(choice, logits, None)
    real = jnp.ones((1, 20), bool)
    sums = jax.tree.map(lambda a: a[None], moe.sums_of(made.probability, logits, made.expert, real))
    whole = jax.lax.stop_gradient(sums)  # in a run of another program, so a constant there
    policy = PolicyEval(None, None, routers=sums)  # pyright: ignore
    batch = LossBatch(None, Aux(None, routers=whole), None, None)  # pyright: ignore
    return router_loss(load_balance=0.7, z=0.2)(policy, batch)[0]

  value, gradient = jax.value_and_grad(ours)(jnp.asarray(router, jnp.float32))
  np.testing.assert_allclose(value, by_loops(router), rtol=1e-5)
  for index in np.ndindex(*router.shape):
    change = np.zeros_like(router)
    change[index] = 1e-5
    slope = (by_loops(router + change) - by_loops(router - change)) / 2e-5
    np.testing.assert_allclose(gradient[index], slope, atol=1e-5, rtol=1e-4)


def test_corrections_move_by_the_load_alone():
  """Not by gradients, moments or decay; and towards experts that fewer tokens chose."""
  batch, optimizer = batch_of(), adamw(0.1, weight_decay=0.5)
  options = {"optimizer": optimizer, "algorithm": grpo()}
  old, before, still, _ = one_step(GLM4, make_mesh(data=1), 16, batch, **options)
  np.testing.assert_array_equal(still.layers.moe.correction, before.layers.moe.correction)
  moved = one_step(GLM4, make_mesh(data=1), 4, batch, correction_rate=0.01, **options)[2]
  load = old.routers.assigned
  expected = 0.01 * np.sign(load.mean(-1, keepdims=True) - load)
  change = moved.layers.moe.correction - before.layers.moe.correction
  np.testing.assert_allclose(change, expected, atol=1e-7)
  assert np.abs(expected).max() > 0
  kept = cast(before, jnp.bfloat16).layers.moe
  assert kept.correction.dtype == jnp.float32 and kept.router.dtype == jnp.bfloat16
  with pytest.raises(ValueError, match="no router of qwen3_moe has a correction"):
    make_step(QWEN3, SGD, grpo(), make_mesh(data=1), micro_rows=1, correction_rate=0.1)


@pytest.mark.parametrize(
  "axes", [pytest.param({"data": 1}, marks=pytest.mark.slow), {"data": 2, "expert": 4}], ids=str
)
def test_routing_that_the_batch_tells_is_replayed(axes):
  """The model's own changes nothing; another is obeyed, in evaluation and in the step."""
  batch, mesh = batch_of(), make_mesh(**axes)
  rows = 16 // mesh.size
  free = one_step(QWEN3, mesh, rows, batch)
  _, routing = QWEN3.forward_routed(free[1], batch.tokens, batch.sample, batch.position)
  own = np.asarray(routing.expert)
  told = dataclasses.replace(batch, experts=own)
  assert_close(one_step(QWEN3, mesh, rows, told), free)
  shifted = np.where(own == moe.NOWHERE, own, (own + 1) % 4)
  other = one_step(QWEN3, mesh, rows, dataclasses.replace(batch, experts=shifted))
  counts = [np.bincount(own[..., i, :][own[..., i, :] >= 0], minlength=4) for i in range(2)]
  np.testing.assert_array_equal(other[0].routers.assigned, np.roll(counts, 1, axis=1))
  assert np.abs(other[0].logp - free[0].logp)[batch.action].max() > 1e-3


def test_a_dense_model_has_neither_routers_nor_told_experts():
  model = llama.bind(
    llama.Config(
      vocab_size=32, embed=16, ffw=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_position=64
    )
  )  # fmt: skip
  assert algorithm_of(grpo(), Routers(), model).needs == frozenset()
  with pytest.raises(ValueError, match="but llama has none"):
    algorithm_of(grpo(), Routers(z=0.1), model)
  batch = dataclasses.replace(batch_of(), experts=np.zeros((16, 12, 1, 1), np.int32))
  state = make_state(model, SGD, make_mesh(data=1))
  with pytest.raises(ValueError, match="tells which experts to take, llama has none"):
    make_evaluate(model, make_mesh(data=1), rows=16)(state.weights, batch)
  with pytest.raises(ValueError, match="load_balance"):
    Routers(load_balance=-1.0)


def test_the_coefficient_is_the_checkpoints_unless_the_run_says_another():
  assert algorithm_of(grpo(), Routers(), QWEN3).needs == {"routers"}
  assert algorithm_of(grpo(), Routers(load_balance=0.0), QWEN3).needs == frozenset()
  assert algorithm_of(grpo(), Routers(), GLM4).needs == frozenset()
  assert algorithm_of(grpo(), Routers(z=0.1), GLM4).needs == {"routers"}


def test_each_of_several_updates_sees_means_over_its_own_part():
  """Two updates with half of the micro-batches each have router losses of the whole's size."""
  batch = batch_of()
  old = one_step(QWEN3, make_mesh(data=1), 4, batch)[0]
  aux = Aux(old_logp=old.logp, routers=old.routers)
  loss_batch = make_prepare(BALANCED)(batch, aux)
  for share in minibatches(loss_batch, 2, 4, (0,)):
    assert share.aux.routers is not None
    np.testing.assert_allclose(share.aux.routers.tokens, old.routers.tokens / 2)
