"""The learner on a real, tiny transformer: shards, packs, learns."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo, sft
from agentrl_jax.models import kernels, llama
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.types import Aux
from tests.learner.toy import random_batch

MODEL = llama.bind(
  llama.Config(
    vocab_size=32, embed=16, ffw=32, layers=2, heads=4, kv_heads=2, head_dim=8, max_position=64,
    tied=True,
  )
)  # fmt: skip
SGD = optax.sgd(1.0)


def one_step(mesh, rows, batch, model=MODEL, **options):
  """(log-probs before, weights after) one off-policy step; weights move by minus the gradient."""
  state = make_state(model, SGD, mesh, seed=1)
  evaluate = make_evaluate(model, mesh, rows=rows, temperature=0.8, **options)
  policy = evaluate(state.weights, batch)
  noise = np.random.default_rng(0).normal(0, 0.1, batch.tokens.shape).astype(np.float32)
  old = np.where(batch.action, np.asarray(policy.logp) + noise, 0.0).astype(np.float32)
  loss_batch = make_prepare(grpo())(batch, Aux(old_logp=old))
  step = make_step(model, SGD, grpo(), mesh, micro_rows=rows, temperature=0.8, **options)
  state, metrics = step(state, loss_batch)
  return jax.device_get((policy, state.weights, metrics))


def test_sharded_equals_one_device():
  batch = random_batch(3, rows=16, vocabulary=32)
  one = one_step(make_mesh(data=1), 16, batch)
  many = one_step(make_mesh(data=2, fsdp=2, tensor=2), 2, batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), one, many)
  assert (one[0].logp[batch.action] < 0).all() and (one[0].logp[~batch.action] == 0).all()


def test_rows_cut_over_a_context_axis_equal_one_device():
  batch = random_batch(3, rows=4, length=272, vocabulary=32)  # long enough for attention in blocks
  one = one_step(make_mesh(data=1), 4, batch)
  many = one_step(make_mesh(fsdp=2, context=2, tensor=2), 2, batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4), one, many)


def test_a_kernel_that_may_be_used_is_what_learns():
  """TPU's, interpreted on a mesh of CPU devices, against blocks on one."""
  model = llama.bind(dataclasses.replace(MODEL.config, heads=2, kv_heads=1, head_dim=64))
  batch, runs = random_batch(3, rows=2, length=272, vocabulary=32), []

  def attend(*args):
    runs.append(args)
    return kernels.attend_splash(*args, interpret=True)

  one = one_step(make_mesh(data=1), 2, batch, model)
  on_cpu = {"cpu": kernels.SPLASH._replace(attend=attend)}
  many = one_step(make_mesh(fsdp=2, tensor=2), 1, batch, model, kernels=on_cpu)
  assert len(runs) > 1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4), one, many)


def test_an_oracle_is_learned_by_heart():
  mesh = make_mesh(data=1)
  batch = random_batch(4, rows=8, vocabulary=32)
  batch.tokens[:, 0] = np.arange(8)  # no two rows agree up to a token that they do not share
  optimizer = adamw(0.02, warmup_steps=5)
  state = make_state(MODEL, optimizer, mesh, seed=2)
  aux = Aux(old_logp=np.zeros(batch.tokens.shape, np.float32))  # so that the loss is the plain NLL
  loss_batch = make_prepare(sft())(batch, aux)
  step = make_step(MODEL, optimizer, sft(), mesh, micro_rows=8)
  losses = []
  for _ in range(120):
    state, metrics = step(state, loss_batch)
    losses.append(float(metrics["loss"].total))
  assert losses[0] == pytest.approx(np.log(32), rel=0.1)
  assert losses[-1] < 0.02
  policy = make_evaluate(MODEL, mesh, rows=8)(state.weights, batch)
  mean = -np.asarray(policy.logp)[batch.action].mean()
  assert mean == pytest.approx(losses[-1], abs=5e-3)
  assert step._cache_size() == 1


def test_state_from_a_directory_lies_under_the_model_shardings(tmp_path):
  mesh = make_mesh(fsdp=2, tensor=2)
  saved = make_state(MODEL, SGD, make_mesh(data=1), seed=5).weights
  save_weights(MODEL, saved, tmp_path / "model")
  state = make_state(MODEL, adamw(1e-3), mesh, directory=tmp_path / "model")
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.weights), jax.device_get(saved))
  placed = jax.tree.leaves(shardings(MODEL, mesh))
  adam = state.opt_state[1]
  for tree in (state.weights, adam.mu, adam.nu):
    for leaf, sharding in zip(jax.tree.leaves(tree), placed, strict=True):
      assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  query = adam.mu.layers.attention.query  # [layers, embed, heads]: cut in four
  assert query.sharding.shard_shape(query.shape) == (2, 8, 16)
  assert all(leaf.sharding.is_fully_replicated for leaf in (state.step, adam.count))
