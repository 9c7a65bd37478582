"""A critic beside the policy: on its hidden states or with its own trunk, trained by one step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.critic import categorical, detached, of_its_own, on_policy
from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import with_critic
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import critic_only, ppo
from agentrl_jax.losses.values import categorical_value_loss
from agentrl_jax.models import llama
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.reference import batches

MODEL = llama.bind(
  llama.Config(
    vocab_size=batches.VOCAB, embed=16, ffw=32, layers=2, heads=2, kv_heads=1, head_dim=8,
    max_position=64, tied=True,
  )
)  # fmt: skip


def made():
  trajectories = batches.ragged(5)
  return batches.pack(trajectories, batches.place(trajectories, rows=8, length=40))


def trained(make_critic, algorithm, steps, rate=0.01):
  """Returns are fixed targets here: a bootstrap would move with the critic."""
  mesh, packed = make_mesh(data=1), made()
  whole = np.zeros_like(packed.batch.traj_truncated)
  packed.batch = packed.batch.replace(traj_truncated=whole)
  optimizer = optax.adam(rate)
  state = make_state(MODEL, optimizer, mesh, seed=1, critic=make_critic)
  evaluate = make_evaluate(MODEL, mesh, rows=8)
  step = make_step(MODEL, optimizer, algorithm, mesh, micro_rows=4, critic=make_critic)
  prepare, errors = make_prepare(algorithm), []
  first = jax.device_get(evaluate(state.weights, packed.batch, state.critic))
  before = jax.device_get(state.weights)
  for _ in range(steps):
    old = evaluate(state.weights, packed.batch, state.critic)
    batch = prepare(packed.batch, Aux(old_logp=old.logp, value=old.value))
    state, metrics = step(state, batch)
    errors.append(float(metrics["value_error_square"].total / metrics["value_error_square"].count))
  return first, before, state, errors


@pytest.mark.parametrize("make_critic", [on_policy, detached, of_its_own])
def test_a_critic_starts_at_zero_and_learns(make_critic):
  first, before, state, errors = trained(make_critic, critic_only(), 25)
  assert (first.value == 0).all()
  assert errors[-1] < (0.99 if make_critic is detached else 0.5) * errors[0]
  assert state.critic.head.weight.shape == (16,)
  moved = [
    np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, state.weights)), strict=True)
  ]
  shared = make_critic is on_policy
  assert (max(moved) > 1e-3) == shared, "only a head that shapes the policy's states moves it"


def test_values_are_of_the_state_before_the_token():
  """V[t] depends on tokens before t only, and the sentinel has a value."""
  mesh, packed = make_mesh(data=1), made()
  state = make_state(MODEL, optax.sgd(1.0), mesh, seed=1, critic=on_policy)
  head = state.critic.head.replace(weight=jnp.ones(16), bias=jnp.float32(0.5))
  critic = state.critic.replace(head=head)
  evaluate = make_evaluate(MODEL, mesh, rows=8)
  value = np.asarray(evaluate(state.weights, packed.batch, critic).value)
  b, t = np.argwhere(packed.batch.action)[-1]
  tokens = packed.batch.tokens.copy()
  tokens[b, t] = (tokens[b, t] + 1) % batches.VOCAB
  other = np.asarray(evaluate(state.weights, packed.batch.replace(tokens=tokens), critic).value)
  assert value[b, t] == other[b, t]
  same = (value == other)[b]
  assert same[: t + 1].all()
  if packed.batch.sample[b, t + 1] == packed.batch.sample[b, t]:
    assert not same[t + 1]
  last = np.flatnonzero(packed.batch.traj_truncated)
  assert last.size
  for r in last:
    row = np.argwhere((packed.batch.traj == r) & ~packed.batch.action)[-1]
    assert value[tuple(row)] != 0


def test_eight_devices_train_the_same_critic():
  mesh, packed, algorithm = make_mesh(data=4, fsdp=2), made(), ppo()
  results = []
  for where in (make_mesh(data=1), mesh):
    state = make_state(MODEL, optax.sgd(0.1), where, seed=1, critic=of_its_own)
    old = make_evaluate(MODEL, where, rows=1)(state.weights, packed.batch, state.critic)
    batch = make_prepare(algorithm)(packed.batch, Aux(old_logp=old.logp, value=old.value))
    step = make_step(MODEL, optax.sgd(0.1), algorithm, where, micro_rows=1, critic=of_its_own)
    state, _ = step(state, batch)
    results.append(jax.device_get((state.weights, state.critic)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


@pytest.mark.parametrize("own", [False, True], ids=["on the policy", "of its own"])
def test_a_categorical_critic_starts_in_the_middle_and_learns(own):
  """Its error falls by its own cross-entropy, through the head it declares."""
  ends = {"low": -3.0, "high": 3.0}
  algorithm = critic_only()._replace(loss=categorical_value_loss(**ends, coef=1.0))
  first, _, state, errors = trained(categorical(**ends, bins=13, own=own), algorithm, 40, rate=0.03)
  np.testing.assert_allclose(first.value, 0.0, atol=1e-6)
  assert first.value_logits is None and first.value_span == (-3.0, 3.0)
  assert errors[-1] < 0.5 * errors[0]
  assert state.critic.head.weight.shape == (16, 13)


def test_bins_that_make_no_sense_are_refused():
  for bins, low, high in [(1, 0.0, 1.0), (5, 1.0, 1.0)]:
    with pytest.raises(ValueError, match=f"{bins} bins from {low}"):
      categorical(low=low, high=high, bins=bins)(MODEL)


def test_actor_and_critic_have_rates_of_their_own():
  """With the critic's rate at 0 only the policy moves, and the other way round."""
  for actor, critic in [(0.1, 0.0), (0.0, 0.1)]:
    mesh, packed, algorithm = make_mesh(data=1), made(), ppo()
    optimizer = with_critic(optax.sgd(actor), optax.sgd(critic))
    state = make_state(MODEL, optimizer, mesh, seed=1, critic=of_its_own)
    before = jax.device_get((state.weights, state.critic))
    old = make_evaluate(MODEL, mesh, rows=8)(state.weights, packed.batch, state.critic)
    batch = make_prepare(algorithm)(packed.batch, Aux(old_logp=old.logp, value=old.value))
    step = make_step(MODEL, optimizer, algorithm, mesh, micro_rows=4, critic=of_its_own)
    state, _ = step(state, batch)
    after = jax.device_get((state.weights, state.critic))
    moved = [
      max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
      for pair in zip(before, after, strict=True)
    ]
    assert [m > 0 for m in moved] == [actor > 0, critic > 0]
