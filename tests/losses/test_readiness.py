"""The host side of the endpoint baseline: AC2 (arXiv 2609.39247) and its published numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.losses.endpoint import ties_down
from agentrl_jax.losses.readiness import (
  ClipController,
  RateController,
  Readiness,
  audited,
  critic_target,
  decode_cost,
  round_to_grid,
)

TIES = [(0.25, 0.2), (0.15, 0.1), (0.55, 0.5), (0.65, 0.6), (0.05, 0.0), (0.35, 0.3)]


@pytest.mark.parametrize(("x", "expected"), TIES)
def test_ties_go_down(x, expected):
  """Comparing floats returns .6 for .55 and .7 for .65, as the released function does."""
  assert round_to_grid(x) == expected
  assert float(ties_down(np.float32(x), 0.1)) == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 10**6))
def test_rounding_is_to_the_nearest_tenth(millionths):
  x = Fraction(millionths, 10**6)
  rounded = Fraction(str(round_to_grid(x)))
  assert abs(rounded - x) <= Fraction(1, 20)
  assert not (rounded > x and rounded - x == Fraction(1, 20)), "ties go down"
  if abs(abs(rounded - x) - Fraction(1, 20)) > Fraction(1, 10**4):
    device = float(ties_down(np.float32(x), 0.1))
    assert device == pytest.approx(float(rounded), abs=1e-6)


def test_a_critic_target_needs_eight_valid_rewards():
  assert critic_target([1.0] * 7 + [math.nan]) is None
  assert critic_target([1.0] * 4 + [0.1] * 4) == 0.5  # mean .55, ties down
  assert critic_target([0.1] * 8) == 0.1


@pytest.mark.parametrize(("ready", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_audits_are_a_quarter_rounded_up(ready, expected):
  names = [f"p{i}" for i in range(ready)]
  chosen = audited(names, np.random.default_rng(0))
  assert len(chosen) == len(set(chosen)) == expected
  assert set(chosen) <= set(names)
  assert chosen == audited(names, np.random.default_rng(0)), "depends on the key only"


def step(state, error, *, solved=(), guess=0.5):
  return state.after_step({"a": guess}, {"a": guess - error}, solved)


def test_readiness_needs_all_four_conditions_and_is_never_lost():
  state = Readiness()
  for _ in range(4):
    state = step(state, 0.1, solved=["a"])
  assert state.why_not("a") == "global error", "five complete steps are needed"
  state = step(state, 0.1)
  assert state.ready("a")
  state = step(state, 0.9)
  assert state.ready("a"), "once ready, always ready"
  assert state.why_not("b") == "global error"


def test_the_mean_error_once_small_is_remembered():
  state = Readiness()
  for _ in range(4):
    state = step(state, 0.1)
  assert not state.opened, "five complete steps are needed"
  state = step(state, 0.1)
  assert state.opened and state.why_not("a") == "never solved"
  assert step(state, 0.9).opened and step(state, 0.9).why_not("a") == "global error"


def test_each_condition_is_named():
  warm = Readiness(recent=(0.1,) * 5)
  assert warm.why_not("a") == "own error"
  assert step(warm, 0.18).why_not("a") == "own error", "the bound itself is too large"
  assert step(warm, 0.17).why_not("a") == "never solved"
  silent = warm.after_step({"a": 0.0}, {"a": 0.1}, ["a"])
  assert silent.why_not("a") == "critic silent"
  assert silent.after_step({"a": 0.1}, {"a": 0.1}).ready("a")
  lost = Readiness(recent=(0.2,) * 5).after_step({"a": math.nan}, {"a": 0.5}, ["a"])
  assert lost.problems["a"].error == 1.0
  assert lost.recent[-1] == 1.0


def test_the_clip_stays_between_20_and_36_percent():
  control = ClipController()
  assert control.high == pytest.approx(0.34)
  assert control.after_step(0.1).high == pytest.approx(0.36)
  assert control.after_step(0.1).after_step(0.1).high == pytest.approx(0.36)
  assert control.after_step(0.5).high == pytest.approx(0.32)
  assert control.after_step(0.28).high == pytest.approx(0.34)
  for _ in range(20):
    control = control.after_step(1.0)
  assert control.high == pytest.approx(0.20)


def test_the_critic_rate_halves_after_two_strikes_in_a_row():
  control = RateController()
  first = control.rate
  rates = []
  for critic, actor in [(3, 2), (1, 2), (3, 2), (3, 2), (3, 2), (3, 2), (9, 2), (9, 2)]:
    control = control.after_step(critic, actor)
    rates.append(control.rate / first)
  np.testing.assert_allclose(rates, [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25])
  assert control.rate == pytest.approx(5 * 2**0.5 * 1e-7), "the floor is a quarter of the start"


def test_decoding_cost_of_qwen3_4b():
  cost = decode_cost(
    layers=36, embed=2560, heads=32, kv_heads=8, head_dim=128, ffw=9728, vocab_size=151_936
  )
  assert (cost.per_token, cost.per_pair) == (8_044_544_000, 589_824)
  assert cost(100, 1) == 0
  assert cost.forward(3) == 3 * 8_044_544_000 + (1 + 2 + 3) * 589_824
  assert cost.forward(2, 5) == 2 * 8_044_544_000 + (6 + 7) * 589_824
  assert cost(2048, 10001) == pytest.approx(1.2202e14, rel=1e-4)
