"""Factories refuse impossible arguments by name, and take the bounds of what is possible."""

import pytest

from agentrl_jax.losses import recipes
from agentrl_jax.losses.advantages import by_std, leave_one_out, step_groups, weighted_sum, whiten
from agentrl_jax.losses.compose import policy_loss, with_clip_high
from agentrl_jax.losses.corrections import (
  banded_is,
  drop_covariant,
  drop_stale,
  masked_by_kl,
  masked_is,
  truncated_is,
)
from agentrl_jax.losses.endpoint import endpoint_baseline
from agentrl_jax.losses.gae import gae, kl_to_go, relative_horizon, resolution_mix, two_scale_gae
from agentrl_jax.losses.penalties import entropy_bonus, imitate_successes, kl_to_old
from agentrl_jax.losses.ratios import (
  at_scale,
  at_scale_arithmetic,
  at_scale_product,
  freeze_stale,
  mix,
  one_sided_clip,
  per_token,
  straight_through,
)
from agentrl_jax.losses.readiness import ClipController, Readiness
from agentrl_jax.losses.replay import Replay
from agentrl_jax.losses.shaping import length_penalty
from agentrl_jax.losses.surrogates import clip
from agentrl_jax.losses.values import categorical_value_loss, value_loss
from agentrl_jax.losses.weights import mean_over, nested_mean, once_explained, sum_over
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ, TURN, fixed_chunks, marked_chunks

NAN, INF = float("nan"), float("inf")
BASE = mean_over(TOKEN)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: recipes.sapo(positive=0), "positive is 0, expected > 0"),
    (lambda: recipes.sapo(negative=-1.0), "negative is -1.0, expected > 0"),
    (lambda: recipes.gmpo(low=-1), "low is -1, expected >= 0"),
    (lambda: recipes.minirl(low=3, high=-1), "low=3, high=-1, expected 0 <= low < 1 and high"),
    (lambda: recipes.vapo(alpha=0), "alpha is 0, expected > 0"),
    (lambda: recipes.vapo(imitate=-0.1), "coef is -0.1, expected >= 0"),
    (lambda: recipes.grpo(kl=NAN), "coef is nan, expected >= 0"),
    (lambda: recipes.rloo(kl=-0.1), "coef is -0.1, expected >= 0"),
    (lambda: recipes.reinforce_pp(kl=-1.0), "kl is -1.0, expected >= 0"),
    (lambda: recipes.reinforce_pp(gamma=-1), "gamma is -1, expected 0 to 1"),
    (lambda: recipes.ppo(gamma=-1), "gamma is -1, expected 0 to 1"),
    (lambda: recipes.ppo(lam=1.5), "lam is 1.5, expected 0 to 1"),
    (lambda: recipes.ppo(coef="0.5"), "coef is '0.5', expected >= 0"),
    (lambda: recipes.gtpo(gamma=2.0), "gamma is 2.0, expected 0 to 1"),
    (lambda: recipes.gigpo(omega=INF), "coefficient 1 is inf, expected a finite number"),
    (lambda: recipes.ac2(low=2), "low=2, high=0.34, expected 0 <= low < 1"),
    (lambda: recipes.ac2(start=-1), "start is -1, expected >= 0"),
    (lambda: recipes.ac2(min_valid=0), "min_valid is 0, expected > 0"),
    (lambda: recipes.dr_grpo(length=INF), "length is inf, expected > 0"),
    (lambda: recipes.mpo_mix(turn=NAN), "turn is nan, expected a finite number"),
    (lambda: by_std(-1e-6), "eps is -1e-06, expected >= 0"),
    (lambda: step_groups(lambda batch: (), gamma=-0.1), "gamma is -0.1"),
    (lambda: weighted_sum((NAN, leave_one_out())), "coefficient 0 is nan"),
    (lambda: whiten(leave_one_out(), TOKEN, eps=-1.0), "eps is -1.0"),
    (lambda: gae(critic_lam=-0.5), "critic_lam is -0.5"),
    (lambda: relative_horizon(2.0), "share is 2.0, expected 0 to 1"),
    (lambda: two_scale_gae(inner_lam=7.0), "inner_lam is 7.0"),
    (lambda: two_scale_gae(outer_gamma=7.0), "outer_gamma is 7.0"),
    (lambda: resolution_mix(lam=NAN), "lam is nan"),
    (lambda: kl_to_go(-1.0), "gamma is -1.0"),
    (lambda: kl_to_old(-0.1), "coef is -0.1"),
    (lambda: entropy_bonus(NAN), "coef is nan"),
    (lambda: imitate_successes(0.1, above=NAN), "above is nan"),
    (lambda: freeze_stale(per_token(), -0.1), "max_kl is -0.1"),
    (lambda: mix((NAN, per_token()), (0.5, at_scale(TRAJ))), "sum to nan, expected 1"),
    (lambda: length_penalty(leave_one_out(), limit=8, buffer=4, coef=-1), "coef is -1"),
    (lambda: value_loss(clip=0.0), "clip is 0.0, expected > 0"),
    (lambda: categorical_value_loss(-INF, 1.0), "low is -inf"),
    (lambda: sum_over(NAN), "divisor is nan"),
    (lambda: truncated_is(BASE, cap=0.5, low=1.0), "low=1.0, high=0.5, expected 0 <= low <= high"),
    (lambda: banded_is(BASE, -1.0), "low=-1.0, high=5.0"),
    (lambda: masked_is(BASE, high=NAN), "low=0.0, high=nan"),
    (lambda: masked_by_kl(BASE, -1.0), "most is -1.0"),
    (lambda: drop_stale(BASE, NAN), "max_kl is nan"),
    (lambda: drop_covariant(BASE, 1.5), "share is 1.5"),
    (lambda: drop_covariant(BASE, low=5.0, high=1.0), "low=5.0, high=1.0, expected low < high"),
    (lambda: endpoint_baseline(grid=-0.1), "grid is -0.1"),
    (lambda: nested_mean(TURN, TRAJ), "the inner units hold the outer ones"),
    (lambda: gae(lam=None), "lam is None"),
    (lambda: weighted_sum(), "at least one (coefficient, advantage)"),
    (lambda: once_explained(BASE, NAN), "least is nan, expected a finite number"),
    (lambda: once_explained(BASE, 1.0), "least is 1.0, expected less than 1"),
    (lambda: drop_covariant(BASE, seed=-1), "seed is -1, expected a whole number of at least 0"),
    (lambda: drop_covariant(BASE, seed=1.5), "seed is 1.5, expected a whole number"),
    (lambda: fixed_chunks(2.5), "chunk length is 2.5, expected a whole number of at least 1"),
    (lambda: marked_chunks(5), "marks are 5, expected a sequence"),
    (lambda: marked_chunks([1.5]), "marks are [1.5], expected a sequence"),
    (lambda: ClipController(offset=0.2), "expected |offset| <= most <= base"),
    (lambda: ClipController(base=0.05), "base=0.05 + offset=0.06, at most 0.08 away"),
    (lambda: ClipController(target=NAN), "target is nan"),
    (lambda: Readiness(window=0), "window is 0, expected a whole number of at least 1"),
    (lambda: Replay(capacity=0), "capacity is 0, expected a whole number of at least 1"),
    (
      lambda: with_clip_high(lambda high: policy_loss(per_token(), clip(1.5, high)), start=0.2),
      "low=1.5, high=0.2",
    ),
  ],
)
def test_an_impossible_number_is_refused_by_name(make, words):
  with pytest.raises(ValueError) as caught:
    make()
  assert words in str(caught.value)


WITHIN = {
  "at_scale": at_scale,
  "at_scale_product": at_scale_product,
  "at_scale_arithmetic": at_scale_arithmetic,
  "straight_through": straight_through,
  "one_sided_clip": lambda scale: one_sided_clip(scale=scale),
  "gae": gae,
  "two_scale_gae": two_scale_gae,
}
ANY = {
  "mean_over": mean_over,
  "nested_mean": lambda scale: nested_mean(scale, TURN),
  "whiten": lambda scale: whiten(leave_one_out(), scale),
}


@pytest.mark.parametrize("name", [*WITHIN, *ANY])
def test_a_scale_is_a_function_and_no_name(name):
  make = {**WITHIN, **ANY}[name]
  make(TRAJ)
  with pytest.raises(ValueError, match="is 'turn', expected a function like TURN"):
    make("turn")


@pytest.mark.parametrize("name", list(WITHIN))
def test_what_sees_one_micro_batch_or_an_order_in_time_refuses_groups(name):
  """A ratio at GROUP would be of the micro-batch's members: another for every split."""
  with pytest.raises(ValueError, match="scale is GROUP, expected units that each lie"):
    WITHIN[name](GROUP)


@pytest.mark.parametrize("name", list(ANY))
def test_what_sees_the_whole_batch_takes_groups(name):
  ANY[name](GROUP)


def test_the_bounds_are_possible():
  recipes.ppo(gamma=0, lam=1, coef=0)
  recipes.gmpo(low=0.0, high=0.0)
  recipes.grpo(kl=0, low=0.0, high=INF)
  truncated_is(BASE, cap=INF)
  masked_is(BASE, low=1.0, high=1.0)
  entropy_bonus(-0.01)
