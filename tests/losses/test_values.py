"""Critic losses in closed form: at first tokens and at all, plain, clipped and categorical."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.losses.advantages import group_relative
from agentrl_jax.losses.gae import every_token, gae
from agentrl_jax.losses.values import (
  categorical_value_loss,
  expected_value,
  explained_variance,
  two_hot,
  value_loss,
)
from agentrl_jax.losses.weights import mean_over
from agentrl_jax.ops.scales import TOKEN, TURN
from agentrl_jax.types import LossBatch, Metric, PolicyEval
from tests.reference import batches


@functools.cache
def case(learners=None):
  made = batches.ragged(4)
  packed = batches.pack(made, batches.one_a_row(made, rows=24, length=40))
  member = gae(TURN, lam=0.8, **({} if learners is None else {"learners": learners}))
  credit = jax.device_get(member(packed.batch, packed.aux))
  weight = mean_over(TOKEN)(packed.batch, packed.aux, credit)
  return packed.policy, LossBatch(packed.batch, packed.aux, credit, weight)


def slope(loss, policy, batch):
  return jax.device_get(jax.grad(lambda p: loss(p, batch)[0])(policy))


@pytest.mark.parametrize("learners", [None, every_token])
def test_plain_value_loss(learners):
  policy, batch = case(learners)
  w, target = batch.credit.value_weight, batch.credit.value_target
  error = np.where(w > 0, policy.value - target, 0)
  value, _ = value_loss(0.7)(policy, batch)
  assert float(value) == pytest.approx(0.35 * (w * error**2).sum(), rel=1e-5)
  np.testing.assert_allclose(
    slope(value_loss(0.7), policy, batch).value, 0.7 * w * error, atol=1e-6
  )


def test_clipped_value_loss():
  """The larger of two squares; the gradient dies where the clipped one wins and is clipped."""
  policy, batch = case()
  w, target, old = batch.credit.value_weight, batch.credit.value_target, batch.aux.value
  near = old + np.clip(policy.value - old, -0.3, 0.3)
  plain, clipped = (policy.value - target) ** 2, (near - target) ** 2
  value, _ = value_loss(1.0, clip=0.3)(policy, batch)
  assert float(value) == pytest.approx(0.5 * (w * np.maximum(plain, clipped)).sum(), rel=1e-5)
  g = slope(value_loss(1.0, clip=0.3), policy, batch).value
  dead = (clipped > plain) & (np.abs(policy.value - old) > 0.3)
  np.testing.assert_allclose(g, np.where(dead, 0, w * (policy.value - target)), atol=1e-6)
  assert (dead & (w > 0)).any() and (~dead & (w > 0)).any()


def test_two_hot_by_hand():
  """Bins -1, 0, 1: .25 is three quarters of 0 and a quarter of 1; 5 is all of 1."""
  expected = [[0, 0.75, 0.25], [0, 0, 1], [1, 0, 0], [0.5, 0.5, 0]]
  ours = two_hot(jnp.float32([0.25, 5, -1, -0.5]), -1, 1, 3)
  np.testing.assert_allclose(ours, expected, atol=1e-6)
  np.testing.assert_allclose(ours @ jnp.float32([-1, 0, 1]), [0.25, 1, -1, -0.5], atol=1e-6)


def test_expected_value_by_hand():
  """Probabilities 1/4, 1/4, 1/2 of -1, 0, 1 have mean 1/4."""
  assert float(expected_value(jnp.log(jnp.float32([1, 1, 2])), -1, 1)) == pytest.approx(0.25)


def test_categorical_value_loss():
  policy, batch = case()
  w, target = batch.credit.value_weight, batch.credit.value_target
  p = np.exp(policy.value_logits - np.log(np.exp(policy.value_logits).sum(-1, keepdims=True)))
  wanted = np.asarray(two_hot(jnp.asarray(target), -2.0, 2.0, batches.BINS))
  value, _ = categorical_value_loss(-2.0, 2.0, coef=0.5)(policy, batch)
  assert float(value) == pytest.approx(-0.5 * (w[..., None] * wanted * np.log(p)).sum(), rel=1e-4)
  g = slope(categorical_value_loss(-2.0, 2.0, coef=0.5), policy, batch).value_logits
  np.testing.assert_allclose(g, 0.5 * w[..., None] * (p - wanted), atol=1e-5)
  with pytest.raises(ValueError, match=r"span 1\.0 to 1\.0, expected low < high"):
    categorical_value_loss(1.0, 1.0)


def test_bins_of_critic_and_loss_must_span_the_same():
  """Else targets would be two-hot over other centres than the values are a mean of."""
  policy, batch = case()
  loss = categorical_value_loss(-2.0, 2.0)
  same = loss(policy.replace(value_span=(-2.0, 2.0)), batch)[0]
  assert same == loss(policy, batch)[0]
  with pytest.raises(ValueError, match=r"bins from -2\.0 to 2\.0, the critic from -1\.0 to 2\.0"):
    loss(policy.replace(value_span=(-1.0, 2.0)), batch)


def test_explained_variance_adds_over_micro_batches():
  policy, batch = case()
  learns = batch.credit.value_weight > 0
  target, error = (
    batch.credit.value_target[learns],
    (batch.credit.value_target - policy.value)[learns],
  )
  expected = 1 - error.var() / target.var()
  _, metrics = value_loss()(policy, batch)
  assert explained_variance(metrics) == pytest.approx(expected, rel=1e-5)
  halves = []
  for part in (slice(0, 7), slice(7, None)):
    weight = np.zeros_like(batch.credit.value_weight)
    weight[part] = batch.credit.value_weight[part]
    credit = batch.credit.replace(value_weight=weight)
    halves.append(value_loss()(policy, batch.replace(credit=credit))[1])
  total = {k: Metric(*(a + b for a, b in zip(halves[0][k], halves[1][k], strict=True)))
           for k in metrics}  # fmt: skip
  assert explained_variance(total) == pytest.approx(expected, rel=1e-5)
  flat = {k: Metric(jnp.float32(0), jnp.float32(3)) for k in metrics}
  assert explained_variance(flat) == 0


def test_what_is_missing_is_named():
  policy, batch = case()
  no_target = batch.replace(credit=group_relative()(batch.traj, batch.aux))
  with pytest.raises(ValueError, match="needs an advantage that gives value targets"):
    value_loss()(policy, no_target)
  silent = PolicyEval(policy.logp, policy.entropy)
  for loss, name in [(value_loss(), "value"), (categorical_value_loss(0, 1), "value_logits")]:
    with pytest.raises(ValueError, match=f"needs {name}, which the model does not give"):
      loss(silent, batch)
