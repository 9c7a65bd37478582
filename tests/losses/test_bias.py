"""Estimators with known expectations: what is unbiased stays so, and known biases are shown."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.losses.advantages import (
  by_shared_std,
  group_relative,
  group_relative_turns,
  leave_one_out,
  unscaled,
)
from tests.reference import batches

# Standard-deviation scaling under a proper score (six outcome laws of up to four outcomes).
LAWS = {
  (0.7, 0.3): (1, 0),
  (0.4, 0.35, 0.25): (0.496, 0.310, 0.194),
  (0.45, 0.30, 0.25): (0.816, 0.101, 0.083),
  (0.6, 0.3, 0.1): (1, 0, 0),
  (0.3, 0.28, 0.22, 0.2): (0.329, 0.288, 0.203, 0.180),
  (0.5, 0.2, 0.2, 0.1): (1, 0, 0, 0),
}


def outcomes(stay_reward, go_reward, members):
  """All groups of `members` that stop (one turn) or go on (two turns), with equal probability."""
  for choice in itertools.product([0, 1], repeat=members):
    made = [
      batches.by_hand([0, 1], [0.0, go_reward]) if go else batches.by_hand([0, -1], [stay_reward])
      for go in choice
    ]
    yield choice, made


def expected_slope(member, members=3):
  """E[mean over members of A x d log p(choice)]: d log p is 1/2 for going on, -1/2 for not."""
  total = 0.0
  for choice, made in outcomes(0.0, 1.0, members):
    total += sum((0.5 if go else -0.5) * a for go, a in zip(choice, member(made), strict=True))
  return total / 2**members / members


def decision(member):
  """The advantage of each trajectory's first turn, where the choice to go on is made."""
  jitted = jax.jit(member)

  def advantages(made):
    packed = batches.lay_out(made)
    return np.asarray(jitted(packed.batch, packed.aux).advantage)[:, 0]

  return advantages


def per_turn_index(made):
  """The biased estimator: each turn's reward is centred among those that *reached* that turn."""

  def centred(one, k):
    reached = [other.rewards[k] for other in made if len(other.rewards) > k]
    return one.rewards[k] - sum(reached) / len(reached)

  return [sum(centred(one, k) for k in range(len(one.rewards))) for one in made]


def test_a_baseline_per_turn_index_is_biased_and_ours_are_not():
  """p(continue) = 1/2, reward 1 only there: the derivative is p (1 - p) = 1/4.

  A group mean that includes the member itself shrinks it by (n - 1) / n = 2/3.
  """
  assert expected_slope(per_turn_index) == 0
  centred = expected_slope(decision(group_relative(unscaled())))
  assert centred == pytest.approx(0.25 * 2 / 3, abs=1e-6)
  assert expected_slope(decision(leave_one_out())) == pytest.approx(0.25, abs=1e-6)
  constant = lambda made: [sum(one.rewards) - 0.5 for one in made]  # noqa: E731
  assert expected_slope(constant) == pytest.approx(0.25)
  assert expected_slope(decision(group_relative_turns(1.0, unscaled()))) > 0.1


def geometric_median(q, steps=2000):
  """Of the simplex's vertices with weights q (Weiszfeld), or the vertex that attracts."""
  k = len(q)
  vertices = np.eye(k)
  for y in range(k):
    pull = sum(q[j] * (vertices[j] - vertices[y]) / math.sqrt(2) for j in range(k) if j != y)
    if q[y] >= np.linalg.norm(pull):
      return vertices[y]
  x = np.array(q)
  for _ in range(steps):
    w = np.array(q) / np.linalg.norm(vertices - x, axis=1)
    x = (w[:, None] * vertices).sum(0) / w.sum()
  return x


@pytest.mark.parametrize("q", list(LAWS))
def test_geometric_medians(q):
  np.testing.assert_allclose(geometric_median(q), LAWS[q], atol=1e-3)


def reports_after(scale, q, *, steps=1500, groups=256, members=32, noise=0.01, rate=0.02, seed=0):
  """Ascent on the Brier reward of a mean report, exploring with isotropic simplex noise."""
  k = len(q)
  relative = group_relative(scale)
  made = [batches.by_hand([0], [0.0], group=g) for g in range(groups) for _ in range(members)]
  packed = batches.pack(made, batches.one_a_row(made, rows=groups * members, length=1))
  turns = groups * members
  batch = jax.tree.map(jnp.asarray, packed.batch)
  aux = jax.tree.map(jnp.asarray, packed.aux)

  def step(mean, key):
    outcome_key, noise_key = jax.random.split(key)
    y = jax.random.choice(outcome_key, k, (groups,), p=jnp.float32(q))
    z = noise * jax.random.normal(noise_key, (groups, members, k))
    z -= z.mean(-1, keepdims=True)
    reports = mean[None, None, :] + z
    brier = jnp.square(reports - jax.nn.one_hot(y, k)[:, None, :]).sum(-1)
    rewards = jnp.zeros(batch.turn_reward.shape).at[:turns].set(-brier.reshape(-1) / 2)
    a = relative(batch.replace(turn_reward=rewards), aux).advantage.reshape(groups, members)
    move = jnp.einsum("gm,gmk->k", a, z) / (groups * members * noise)
    mean = jnp.maximum(mean + rate * move, 0.0)
    mean = mean / mean.sum()
    return mean, mean

  keys = jax.random.split(jax.random.key(seed), steps)
  _, path = jax.jit(lambda: jax.lax.scan(step, jnp.full((k,), 1 / k), keys))()
  return np.asarray(path[-steps // 5 :].mean(0))


@pytest.mark.parametrize("q", [(0.7, 0.3), pytest.param((0.6, 0.3, 0.1), marks=pytest.mark.slow)])
def test_scaling_by_the_group_moves_the_report_and_centring_does_not(q):
  """Centred, or scaled by one number for all groups, the report is q; divided by the group's own
  standard deviation it moves towards the geometric median of the outcomes.
  """
  q_, median = np.array(q), np.array(LAWS[q])
  np.testing.assert_allclose(reports_after(unscaled(), q, rate=1.0), q_, atol=0.02)
  np.testing.assert_allclose(reports_after(by_shared_std(), q), q_, atol=0.03)
  scaled = reports_after(None, q)
  assert (scaled - q_) @ (median - q_) / np.linalg.norm(median - q_) > 0.1


def test_random_rewards_have_zero_mean_gradient():
  """Score-function identity: centred REINFORCE under rewards independent of the actions."""
  rng = np.random.default_rng(0)
  made = [batches.by_hand([0], [0.0], group=r // 4) for r in range(64)]
  packed = batches.lay_out(made)
  member = jax.jit(group_relative(unscaled()))
  p, slopes = 0.3, []
  for _ in range(300):
    action = rng.random(64) < p
    rewards = np.zeros_like(packed.batch.turn_reward)
    rewards[:64] = rng.normal(0, 1, 64)
    a = np.asarray(member(packed.batch.replace(turn_reward=rewards), packed.aux).advantage)[:, 0]
    slopes.append((a * (action - p)).mean())
  assert abs(np.mean(slopes)) < 3 * np.std(slopes) / math.sqrt(len(slopes))
  assert np.std(slopes) > 0.01


def test_the_length_of_observations_changes_nothing():
  """Inserting observation tokens between turns leaves every credit alone."""
  member = jax.jit(group_relative_turns(0.9))
  short = [batches.by_hand([-1, 0, 0, -1, 1], [0.1, r], group=0) for r in (0.0, 1.0, 0.5)]
  long = [
    batches.by_hand([-1, 0, 0, -1, -1, -1, -1, 1, -1], [0.1, r], group=0) for r in (0.0, 1.0, 0.5)
  ]
  a, b = (batches.lay_out(made) for made in (short, long))
  x, y = member(a.batch, a.aux).advantage, member(b.batch, b.aux).advantage
  np.testing.assert_array_equal(x[:, [1, 2, 4]], y[:, [1, 2, 7]])
