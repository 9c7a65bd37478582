"""pass@k and pass^k against enumeration, and Wilson's interval against hand values."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.analysis.intervals import bootstrap_means, wilson
from agentrl_jax.analysis.pass_at_k import curves, pass_at_k, pass_hat_k
from agentrl_jax.analysis.samples import table


@pytest.mark.parametrize("successes", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_equals_the_mean_over_all_subsets_of_five(successes, k):
  outcomes = [i < successes for i in range(5)]
  subsets = list(itertools.combinations(outcomes, k))
  n, c = np.array([5]), np.array([successes])
  assert pass_at_k(n, c, k).item() == pytest.approx(np.mean([any(s) for s in subsets]), abs=1e-12)
  assert pass_hat_k(n, c, k).item() == pytest.approx(np.mean([all(s) for s in subsets]), abs=1e-12)


def test_one_success_in_four_is_certain_at_four():
  assert pass_at_k(np.array([4]), np.array([1]), 4).item() == 1
  assert pass_hat_k(np.array([4]), np.array([3]), 4).item() == 0


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_monotone_in_k_and_equal_at_one(n, data):
  c = data.draw(st.integers(0, n))
  k = data.draw(st.integers(1, n))
  samples, successes = np.array([n]), np.array([c])
  at_one = pass_at_k(samples, successes, 1).item()
  assert at_one == pytest.approx(c / n) == pass_hat_k(samples, successes, 1).item()
  assert pass_at_k(samples, successes, k).item() >= at_one - 1e-12
  assert pass_hat_k(samples, successes, k).item() <= at_one + 1e-12


def test_wrong_counts_are_refused():
  with pytest.raises(ValueError, match="problem 1: k is 3, expected 1 to its 2 samples"):
    pass_at_k(np.array([4, 2]), np.array([1, 1]), 3)
  with pytest.raises(ValueError, match="3 successes of 2 samples"):
    pass_hat_k(np.array([2]), np.array([3]), 1)


def test_curves_have_intervals_over_problems():
  rows = [
    {
      "problem": p, "sample": i, "finished": True, "correct": i < p, "tokens": 1, "model": "m"
    }
    for p in range(5)
    for i in range(4)
  ]  # fmt: skip
  found = curves(table(rows), (1, 4), resamples=400)
  # Successes 0..4 of 4: pass@1 = 1/2, pass@4 = 4/5, pass^4 = 1/5.
  assert found["pass@k"][1].estimate == 0.5 == found["pass^k"][1].estimate
  assert found["pass@k"][4].estimate == 0.8
  assert found["pass^k"][4].estimate == pytest.approx(0.2)
  assert found["pass@k"][1].low < 0.5 < found["pass@k"][1].high


def test_wilson_on_hand_values():
  # z^2 = 3.8415. 1 of 10: middle (.1 + .19207)/1.38415 = .21101, half
  # 1.95996 sqrt(.009 + .0096036)/1.38415 = .19313.
  share = wilson(1, 10)
  assert share.low == pytest.approx(0.01788, abs=2e-5)
  assert share.high == pytest.approx(0.40415, abs=2e-5)
  # 0 of n: [0, z^2/(n + z^2)].
  assert wilson(0, 20).low == 0
  assert wilson(0, 20).high == pytest.approx(3.8415 / 23.8415, abs=1e-4)
  assert wilson(20, 20).low == pytest.approx(1 - 3.8415 / 23.8415, abs=1e-4)
  nothing = wilson(0, 0)
  assert math.isnan(nothing.estimate) and (nothing.low, nothing.high) == (0, 1)
  with pytest.raises(ValueError, match="3 successes of 2 trials"):
    wilson(3, 2)


def test_bootstrap_spread_is_the_error_of_a_mean():
  values = np.random.default_rng(0).normal(size=(400, 1))
  drawn = bootstrap_means([values], resamples=4000, seed=1)
  assert drawn.std() == pytest.approx(values.std() / 20, rel=0.1)
  assert drawn.mean() == pytest.approx(values.mean(), abs=0.01)


def test_bootstrap_of_several_sets_draws_the_sets_too():
  zeros, ones = np.zeros((50, 1)), np.ones((50, 1))
  drawn = bootstrap_means([zeros, ones], resamples=4000, seed=0)
  # Both slots draw a set: mean 0, 1/2 or 1 with chances 1/4, 1/2, 1/4.
  assert set(np.unique(drawn)) == {0, 0.5, 1}
  assert np.mean(drawn == 0.5) == pytest.approx(0.5, abs=0.04)
