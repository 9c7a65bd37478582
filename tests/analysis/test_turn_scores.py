import math

import numpy as np
import pytest

from agentrl_jax.analysis import turn_scores
from agentrl_jax.analysis.turn_scores import Attempts, Trace, conformal_threshold

# Turns of 2, 1 and 2 tokens; V at their starts is .4, .6, .1.
ONE = Trace(
  value=np.array([0.4, 0.5, 0.6, 0.1, 0.3]),
  turn=np.array([0, 0, 1, 2, 2]),
  reward=np.array([0.0, 0.0, 0.0]),
)
WON = Trace(
  value=np.array([0.5, 0.7, 0.9]),
  turn=np.array([0, 1, 1]),
  reward=np.array([0.0, 1.0]),
  success=True,
)


def test_surprise_is_the_fall_of_the_expected_return():
  # .4 - .6, .6 - .1, .1 - 0; a truncated one ends in its bootstrap value
  np.testing.assert_allclose(turn_scores.surprises(ONE), [-0.2, 0.5, 0.1])
  cut = Trace(ONE.value, ONE.turn, ONE.reward, boot=0.25)
  np.testing.assert_allclose(turn_scores.surprises(cut), [-0.2, 0.5, -0.15])
  # with gamma 1/2: .4 - .3, .6 - .05, .1
  np.testing.assert_allclose(turn_scores.surprises(ONE, 0.5), [0.1, 0.55, 0.1])
  np.testing.assert_allclose(turn_scores.surprises(WON), [-0.2, -0.3])  # .5 - .7, .7 - 1


def test_surprises_telescope():
  """Undiscounted they sum to V_0 minus the return and the bootstrap."""
  cut = Trace(ONE.value, ONE.turn, np.array([0.5, -1.0, 2.0]), boot=0.25)
  assert turn_scores.surprises(cut).sum() == pytest.approx(0.4 - (1.5 + 0.25))


def test_scores_are_in_spreads_of_successful_runs():
  scale = turn_scores.surprise_scale([WON, WON])
  # -.2, -.3 twice: deviations of .05 each, variance 4 x .0025 / 3
  assert scale == pytest.approx(math.sqrt(0.01 / 3))
  np.testing.assert_allclose(turn_scores.turn_scores(ONE, 0.1), [0.0, 5.0, 1.0])
  with pytest.raises(
    ValueError, match="0 successful runs with 0 turns, whose surprises spread by 0"
  ):
    turn_scores.surprise_scale([])


@pytest.mark.parametrize(
  ("n", "q", "rank"),
  [(5, 0.1, None), (9, 0.1, 9), (19, 0.1, 18), (19, 0.05, 19), (10, 0.1, 10), (3, 0.5, 2)],
)
def test_the_conformal_rank(n, q, rank):
  """ceil((n + 1)(1 - q)); n = 5, q = .1 gives 6 > 5."""
  maxima = np.random.default_rng(0).permutation(n).astype(float)  # the r-th smallest is r - 1
  expected = math.inf if rank is None else rank - 1
  assert conformal_threshold(maxima.tolist(), q) == expected


def test_false_alarms_stay_below_their_rate():
  """Exchangeable scores: the rate over many calibrations is at most q within 3 standard errors."""
  rng, q, trials = np.random.default_rng(1), 0.2, 4000
  false = [
    rng.exponential() > conformal_threshold(rng.exponential(size=23).tolist(), q)
    for _ in range(trials)
  ]
  # ceil(24 x .8) = 20 of 23: the rate is exactly 4 / 24
  error = math.sqrt(q * (1 - q) / trials)
  assert np.mean(false) <= q + 3 * error
  assert np.mean(false) == pytest.approx(4 / 24, abs=3 * error)


def test_rates_outside_their_range_are_refused():
  with pytest.raises(ValueError, match=r"is 1\.0, expected between"):
    conformal_threshold([1.0], 1.0)


def test_auroc_counts_pairs_and_ties_half():
  # positives 3, 1 against negatives 2, 1: wins 3>2, 3>1, tie 1=1, loss 1<2: 2.5 of 4
  assert turn_scores.auroc([3, 2, 1, 1], [True, False, True, False]) == 2.5 / 4
  assert math.isnan(turn_scores.auroc([1, 2], [True, True]))


def test_alarms():
  late = Trace(ONE.value[::-1].copy(), ONE.turn[::-1].max() - ONE.turn[::-1], ONE.reward)
  # late: turns of 2, 1, 2 tokens starting at .3, .6, .5: surprises -.3, .1, .5
  np.testing.assert_allclose(turn_scores.surprises(late), [-0.3, 0.1, 0.5])
  found = turn_scores.alarms([ONE, late, WON], scale=0.1, threshold=4.0)
  # ONE: 5 at turn 1 of 3, one turn ahead; late: 5 at the last turn, none ahead; WON: none
  assert found == turn_scores.Alarms(
    auroc=1.0,
    auroc_early=1.0,  # 5 and 1 against 0
    caught=1.0,
    false=0.0,
    lead=0.5,
  )
  silent = turn_scores.alarms([ONE, WON], scale=0.1, threshold=math.inf)
  assert silent.caught == 0.0 and math.isnan(silent.lead)


def test_constancy_by_hand():
  # grand mean .38; turn means .45, .6, .2
  between = 2 * 0.07**2 + 0.22**2 + 2 * 0.18**2
  within = 2 * 0.05**2 + 0 + 2 * 0.1**2
  found = turn_scores.constancy([ONE])
  assert found.eta2 == pytest.approx(between / (between + within))
  assert found.inside == pytest.approx((0.1 + 0.0 + 0.2) / 3)
  assert found.between == pytest.approx((0.2 + 0.5) / 2)
  single = Trace(np.array([0.1, 9.0]), np.array([0, 0]), np.array([0.0]))
  assert turn_scores.constancy([ONE, single]) == found  # one turn says nothing
  assert math.isnan(turn_scores.constancy([single]).eta2)


def test_permuted_turns_keep_values_and_lengths():
  rng = np.random.default_rng(0)
  seen = set()
  for _ in range(20):
    moved = turn_scores.with_permuted_turns(ONE, rng)
    assert sorted(moved.value) == sorted(ONE.value)
    assert sorted(np.bincount(moved.turn)) == [1, 2, 2]
    seen.add((*moved.value, *moved.turn))
  assert len(seen) > 5
  flat = [
    Trace(np.repeat(rng.random(6), 4), np.repeat(np.arange(6), 4), np.zeros(6)) for _ in range(50)
  ]
  assert turn_scores.constancy(flat).eta2 == pytest.approx(1.0)
  moved = [turn_scores.with_permuted_turns(t, rng) for t in flat]
  assert turn_scores.constancy(moved).eta2 < 0.9


def test_equal_tokens_make_chances_comparable():
  flagged, random = Attempts(2, 4, 10.0), Attempts(1, 4, 5.0)
  assert flagged.chance(10.0) == 0.5
  assert random.chance(10.0) == pytest.approx(1 - 0.75**2)  # two plays for the same tokens
  assert turn_scores.retry_value(flagged, random) == pytest.approx(0.5 - 0.4375)
  with pytest.raises(ValueError, match="nothing was tried"):
    Attempts(0, 0, 0.0).chance(1.0)


@pytest.mark.parametrize(
  ("value", "turn", "reward", "words"),
  [
    ([0.0, 1.0], [0, 0], [], "0 rewards"),
    ([0.0, 1.0], [0, 2], [0.0, 0.0, 0.0], r"turns \[0, 2\]"),
    ([0.0, 1.0], [1, 0], [0.0, 0.0], r"turns \[1, 0\]"),
    ([0.0, 1.0], [0, 0], [0.0, 0.0], "expected 0 to 1"),
    ([0.0, math.nan], [0, 1], [0.0, 0.0], "finite"),
  ],
)
def test_traces_that_cannot_be_are_refused(value, turn, reward, words):
  with pytest.raises(ValueError, match=words):
    Trace(np.array(value), np.array(turn), np.array(reward))
