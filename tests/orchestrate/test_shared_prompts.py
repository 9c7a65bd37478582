"""Rows that hold a prompt once teach exactly what rows that repeat it teach."""

import jax
import numpy as np
import optax
import pytest

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses import recipes
from agentrl_jax.losses.anchors import observation_before
from agentrl_jax.losses.checks import check_batch
from agentrl_jax.models import llama
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.pack import pack, unpack
from agentrl_jax.types import Aux
from tests.orchestrate.test_pack import share_prompt
from tests.reference.episodes import VOCAB, groups

MODEL = llama.bind(
  llama.Config(
    vocab_size=VOCAB, embed=16, ffw=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_position=512
  )
)
MICRO_ROWS = 2


def packings(row_length):
  rng = np.random.default_rng(0)
  made = [share_prompt(rng, members) for members in groups(rng)]
  sizes = dict(row_length=row_length, micro_rows=MICRO_ROWS)
  return pack(made, **sizes), pack(made, **sizes, share_prompts=True)


def learned(packed, algorithm):
  """Old log-probs of every episode's actions, and how a step moves the weights."""
  mesh, optimizer = make_mesh(data=1), optax.sgd(1.0)
  state = make_state(MODEL, optimizer, mesh, seed=3)
  before = jax.device_get(state.weights)
  old = make_evaluate(MODEL, mesh, rows=MICRO_ROWS)(state.weights, packed.batch)
  batch = make_prepare(algorithm)(packed.batch, Aux(old_logp=old.logp))
  step = make_step(MODEL, optimizer, algorithm, mesh, micro_rows=MICRO_ROWS)
  state, _ = step(state, batch)
  moved = jax.tree.map(np.subtract, jax.device_get(state.weights), before)
  return unpack(np.asarray(old.logp), packed), moved


def test_equal_observations_keep_equal_keys():
  """Where a prompt is cut differs from row to row; what a turn answers does not."""
  apart, shared = packings(100)
  assert len({int(x) for x in shared.batch.parent[shared.batch.action]}) > 1
  for a, b in zip(*(observation_before(p.batch) for p in (apart, shared)), strict=True):
    turns = apart.batch.turn_traj >= 0
    np.testing.assert_array_equal(np.asarray(a)[turns], np.asarray(b)[turns])


def test_without_sharing_no_family_is_handed_a_parent():
  apart, shared = packings(100)
  assert apart.batch.parent is None and shared.batch.parent is not None


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda batch, b, t: batch.parent.__setitem__((b, t + 1), 0), "changes its parent"),
    (lambda batch, b, t: batch.sample.__setitem__((b, slice(t)), -1), "lies nowhere before it"),
    (lambda batch, b, t: batch.traj.__setitem__((b, 0), 0), "belongs to a trajectory"),
    (lambda batch, b, t: batch.position.__setitem__((b, t), 40), "the sample begins at 40"),
  ],
)
def test_a_parent_that_cannot_be_one_is_refused(change, message):
  batch = packings(100)[1].batch
  b, t = np.argwhere((batch.parent != batch.sample) & (batch.sample >= 0))[0]
  change(batch, b, t)
  with pytest.raises(ValueError, match=f"at row {b}, .*{message}"):
    check_batch(batch)


@pytest.mark.parametrize(
  ("algorithm", "row_length"),
  [(recipes.grpo(), 100), (recipes.gigpo(), 300)],
  ids=["grpo, plain attention", "gigpo, blockwise attention"],
)
def test_sharing_changes_no_log_prob_and_no_gradient(algorithm, row_length):
  apart, shared = packings(row_length)
  assert (shared.batch.sample >= 0).sum() < 0.6 * (apart.batch.sample >= 0).sum()
  (logp, moved), (shared_logp, shared_moved) = (learned(p, algorithm) for p in (apart, shared))
  for a, b in zip(logp, shared_logp, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(moved))
  assert largest > 1e-3
  for a, b in zip(*map(jax.tree.leaves, (moved, shared_moved)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest)
