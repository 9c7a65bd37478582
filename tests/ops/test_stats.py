"""Estimators and metrics by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.ops.logprobs import has_previous, previous
from agentrl_jax.ops.stats import (
  add_metrics,
  bounded_exp,
  effective_sample_share,
  k3,
  masked,
  mean,
)


def test_metrics_add():
  x, mask = np.float32([1, 2, np.nan, 5]), np.array([True, True, False, True])
  one, two = masked(x[:2], mask[:2]), masked(x[2:], mask[2:])
  assert float(mean(add_metrics(one, two))) == pytest.approx(8 / 3)
  assert float(mean(masked(x, np.zeros(4, bool)))) == 0


def test_effective_sample_share():
  """(mean w)^2 / mean(w^2) of 1, 3: 4 / 5; equal weights: 1; nothing: 0."""
  both = np.array([True, True])
  assert float(effective_sample_share(np.float32([1, 3]), both)) == pytest.approx(0.8)
  assert float(effective_sample_share(np.float32([7, 7]), both)) == pytest.approx(1.0)
  assert float(effective_sample_share(np.float32([7, 7]), ~both)) == 0


def test_clamps():
  """Ratios are clamped on both sides, k3's exponent above only, where it goes on as a line."""
  limit = np.exp(20.0)
  np.testing.assert_allclose(
    bounded_exp(np.float32([-50, 0, 50])), [1 / limit, 1, limit], rtol=1e-5
  )
  np.testing.assert_allclose(k3(jnp.float32([-50, 50])), [31 * limit - 51, 49], rtol=1e-5)


@pytest.mark.parametrize("delta", [-1e4, -21.0, -20.0, -19.0, -0.1])
def test_a_policy_below_the_other_is_pulled_up_however_far_it_is(delta):
  """d k3 / d delta = 1 - exp(-delta) < 0; beyond the clamp it stays 1 - e^20."""
  slope = float(jax.grad(k3)(jnp.float32(delta)))
  assert slope == pytest.approx(1 - np.exp(min(-delta, 20.0)), rel=1e-4)


def test_previous_stays_within_a_stream():
  sample = np.array([[0, 0, 1, 1, -1, -1]], np.int32)
  x = np.float32([[1, 2, 3, 4, 5, 6]])
  np.testing.assert_array_equal(previous(x, sample), [[0, 1, 0, 3, 0, 0]])
  np.testing.assert_array_equal(has_previous(sample), [[0, 1, 0, 1, 0, 0]])
