"""Numbers published by others, with the source in each test's id or name and the arithmetic beside.

C1..C20 are the conventions listed in docs/losses.md.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.losses.advantages import (
  by_mean,
  by_std,
  group_relative,
  leave_one_out,
  trajectory_returns,
  unscaled,
)
from agentrl_jax.losses.corrections import banded_is, mismatch
from agentrl_jax.losses.endpoint import endpoint_baseline
from agentrl_jax.losses.gae import every_token, gae, reward_to_go
from agentrl_jax.losses.penalties import kl_to_ref
from agentrl_jax.losses.ratios import (
  at_scale,
  at_scale_arithmetic,
  at_scale_product,
  per_token,
)
from agentrl_jax.losses.surrogates import clip, reinforce
from agentrl_jax.losses.weights import fixed_length, mean_over, sum_over
from agentrl_jax.ops.logprobs import token_logprobs
from agentrl_jax.ops.scales import TOKEN, TRAJ, TURN
from agentrl_jax.ops.scans import reverse_recurrence
from agentrl_jax.ops.stats import k1, k2, k3
from agentrl_jax.types import Credit, LossBatch
from tests.reference.batches import by_hand, lay_out

# 1. Group advantages


def advantages_of(member, groups):
  """One number a trajectory, for one-token trajectories with the given rewards."""
  made = lay_out([by_hand([-1, 0], [r], group=g) for g, rs in enumerate(groups) for r in rs])
  return np.asarray(member(made.batch, made.aux).advantage[:, 1])


TUNIX = [[0.57450044, 0.09968603, 0.7419659], [0.8941783, 0.59656656, 0.45325184]]


def test_tunix_algo_core_leave_one_out():
  ours = advantages_of(leave_one_out(), [[1, 2, 3], [4, 5, 6]])
  np.testing.assert_allclose(ours, [-1.5, 0, 1.5] * 2, atol=1e-6)


@pytest.mark.parametrize(
  ("scale", "expected", "atol"),
  [
    (by_std(), [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855], 2e-5),
    (unscaled(), [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747], 1e-5),
  ],
  ids=["tunix-algo_core-grpo (C2)", "tunix-drgrpo_learner"],
)
def test_group_relative_of_tunix(scale, expected, atol):
  np.testing.assert_allclose(advantages_of(group_relative(scale), TUNIX), expected, atol=atol)


def test_other_conventions_give_other_numbers():
  """Negative controls of C2: eps 1e-4 and ddof 0 are told apart at the tolerance used above."""
  assert abs(advantages_of(group_relative(by_std(1e-4)), TUNIX)[0] - 0.307498) > 2e-5
  population = advantages_of(group_relative(by_std()), TUNIX)[0] * math.sqrt(3 / 2)
  assert abs(population - 0.307498) > 2e-5
  centred = advantages_of(group_relative(unscaled()), TUNIX)
  std = np.repeat([np.std(g, ddof=1) + 1e-6 for g in TUNIX], 3)
  np.testing.assert_allclose(
    advantages_of(group_relative(by_std()), TUNIX), centred / std, rtol=1e-5
  )


def test_prime_rl_max_likelihood():
  groups = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
  expected = [3, -1, -1, -1] + [0] * 8  # (R - 1/4) / (1/4)
  np.testing.assert_allclose(advantages_of(group_relative(by_mean()), groups), expected, atol=1e-6)
  assert advantages_of(group_relative(unscaled()), [[1.0]]) == 0


# 2. Aggregation: per-token losses [[.1, .2, .3], [.4, .5, .6]], mask [[1, 1, 0], [1, 1, 1]].


@pytest.mark.parametrize(
  ("weight", "expected"),
  [
    (mean_over(TOKEN), 0.36),  # 1.8 / 5
    (mean_over(TRAJ), 0.325),  # (.15 + .5) / 2
    (fixed_length(3.0), 0.3),  # (.3/3 + 1.5/3) / 2
    (fixed_length(3.14), 0.9 / 3.14),
    (fixed_length(1.0), 0.9),  # mean of sums
    (sum_over(4.0), 0.45),
  ],
  ids=["token-mean", "seq-mean-token-mean", "width-3", "width-3.14", "token-sum", "over-4"],
)
def test_tunix_common_aggregation(weight, expected):
  losses = {0: [0.1, 0.2], 1: [0.4, 0.5, 0.6]}
  made = lay_out([by_hand([0, 0, -1], [0.0]), by_hand([0, 0, 0], [0.0])])
  w = np.asarray(weight(made.batch, made.aux, Credit(jnp.zeros((2, 3)))))
  rows = [w[made.layout.places[r, 0][0]] for r in (0, 1)]
  total = sum(a * b for r in (0, 1) for a, b in zip(losses[r], rows[r], strict=False))
  assert total == pytest.approx(expected, abs=1e-6)
  silent = made.batch.replace(action=np.zeros((2, 3), bool))
  assert (np.asarray(weight(silent, made.aux, Credit(jnp.zeros((2, 3))))) == 0).all()


# 3. Returns and generalised advantages


def test_verl_reinforce_pp_multiturn():
  """gamma .5: reward 2 at the last token is 1 at the one before, whatever lies between (C1)."""
  made = lay_out([by_hand([0, 0, -1, -1, 1], [0.0, 2.0])])
  np.testing.assert_array_equal(
    reward_to_go(0.5)(made.batch, made.aux).advantage, [[0.5, 1, 0, 0, 2]]
  )


def by_token(made, member):
  credit = member(made.batch, made.aux)
  return np.asarray(credit.advantage)[0], np.asarray(credit.value_target)[0]


def test_areal_turn_gae():
  """Rewards 1 and 2, V = 0, lambda .5: A_1 = 2, A_0 = 1 + .5 x 2 = 2."""
  made = lay_out([by_hand([0, 0, 1, 1], [1.0, 2.0])])
  a, target = by_token(made, gae(TURN, lam=0.5, learners=every_token))
  np.testing.assert_array_equal(a, [2, 2, 2, 2])
  np.testing.assert_array_equal(target, [2, 2, 2, 2])


@pytest.mark.parametrize(
  ("turn", "values", "rewards"),
  [
    ([0, 0, -1, 2, 2, -1], [1, 5, 9, 2, 8, 8], [3.0, 0.0, 4.0]),
    ([0, 0, -1, 1, 1, -1], [1, 5, 9, 2, 8, 8], [3.0, 4.0]),
    ([0, 0, -1, -1, -1, -1, 1, 1, -1], [1, 5, 9, 9, 9, 9, 2, 8, 8], [3.0, 4.0]),
    ([0, 0, -1, 1, 1, -1], [1, 5, math.nan, 2, 8, 8], [3.0, 4.0]),
  ],
  ids=["unused turn id", "renumbered", "longer gap", "nan in the gap"],
)
def test_areal_turn_gae_with_a_gap_and_a_bootstrap(turn, values, rewards):
  """gamma .5, lambda .25, boot 8: A_1 = 4 + .5 x 8 - 2; A_0 = 3 + .5 x 2 - 1 + .125 x 6."""
  made = lay_out([by_hand(turn, rewards, truncated=True, old_value=values)])
  with jax.debug_nans(False):
    a, target = by_token(made, gae(TURN, gamma=0.5, lam=0.25, learners=every_token))
  action = np.array(turn) >= 0
  np.testing.assert_array_equal(a[action], [3.75, 3.75, 6, 6])
  np.testing.assert_array_equal(target[action], [4.75, 4.75, 8, 8])
  assert (a[~action] == 0).all()


RLAX_R = np.float32([[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]])
RLAX_V = np.float32([[1, 4, -3, -2, -1, -1], [-3, -2, -1, 0, 5, -1]])
RLAX_GAMMA = np.float32([[0.99] * 5, [0.9, 0.9, 0.9, 0, 0.9]])


@pytest.mark.parametrize(
  ("lam", "expected"),
  [
    (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3, 2, 1, 0, -4.9]]),
    (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1, 0, -4.9]]),
    (0.4, [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1, 0, -4.9]]),
  ],
)
def test_rlax_multistep_truncated_gae(lam, expected):
  """The zero discount in row 2 ends an episode inside the row: the recursion restarts there."""
  delta = RLAX_R + RLAX_GAMMA * RLAX_V[:, 1:] - RLAX_V[:, :-1]
  np.testing.assert_allclose(
    reverse_recurrence(delta, RLAX_GAMMA * np.float32(lam)), expected, atol=1e-3
  )


def test_rlax_multistep_row_1_through_the_library():
  """The same numbers from `gae` at one-token turns, the last value being the sentinel's."""
  made = lay_out(
    [by_hand([0, 1, 2, 3, 4, -1], RLAX_R[0].tolist(), truncated=True, old_value=RLAX_V[0].tolist())]
  )
  a, _ = by_token(made, gae(TURN, gamma=0.99, lam=0.7))
  np.testing.assert_allclose(a[:5], [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], atol=1e-3)


def test_rlax_multistep_lambda_returns():
  r = np.float32([[1, 0, -1, 0, 1], [0.5, 0.8, -0.7, 0, 2.1]])
  gamma = np.float32([[0.5, 0.9, 1, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]])
  v = np.float32([[3, 1, 5, -5, 3], [-1.7, 1.2, 2.3, 2.2, 2.7]])
  lam = np.float32(0.75)
  x = r + gamma * (1 - lam) * v
  x[:, -1] += gamma[:, -1] * lam * v[:, -1]  # the recursion starts from the last v
  np.testing.assert_allclose(
    reverse_recurrence(x, gamma * lam),
    [[1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4],
     [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]],
    rtol=1e-5,
  )  # fmt: skip


def logp_of(logits, actions):
  """[N A] logits as hidden states and the identity as unembedding: log-probs of the actions."""
  logits = np.float32(logits)
  hidden = np.concatenate([logits, np.zeros_like(logits[:1])])[None]
  tokens = np.array([[0, *actions]], np.int32)
  sample, mask = np.zeros_like(tokens), np.ones_like(tokens, bool)
  logp, entropy = token_logprobs(
    hidden, np.eye(logits.shape[1], dtype=np.float32), tokens, sample, mask
  )
  return np.asarray(logp[0, 1:]), np.asarray(entropy[0, 1:])


@pytest.mark.parametrize(
  ("behavior", "target", "actions", "r", "gamma", "v", "boot", "expected"),
  [
    ([[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]],
     [[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]],
     [0, 1, 0, 0], [-1.3, -1.3, 2.3, 42], [0, 0.89, 0.85, 0.99], [2.1, 1.1, -3.1, 0], 8.4,
     [-1.6155143, -3.4973226, 1.8670533, 50.316002]),
    ([[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]],
     [1, 0, 0, 1], [1.3, 5.3, -3.3, -5], [0.88, 1, 0.83, 0.95], [3.1, 0.1, -1.1, 7.4], -1.2,
     [1.4662437, 3.6116405, -8.3327e-5, -13.54]),
  ],
)  # fmt: skip
def test_rlax_vtrace(behavior, target, actions, r, gamma, v, boot, expected):
  """Tests log-probs and the recurrence: errors = rho (r + gamma v' - v) + gamma c errors'."""
  rho = np.minimum(1, np.exp(logp_of(target, actions)[0] - logp_of(behavior, actions)[0]))
  gamma, v = np.float32(gamma), np.float32([*v, boot])
  delta = rho * (np.float32(r) + gamma * v[1:] - v[:-1])
  np.testing.assert_allclose(reverse_recurrence(delta, gamma * rho), expected, rtol=1e-3)


# 4. Surrogates


def surrogate_of(member, logp, old, advantage, ratio=None):
  """(losses, gradients with respect to logp) of tokens that are one trajectory."""
  n = len(logp)
  made = lay_out([by_hand([0] * n, [0.0], logp=logp, old=old)])
  batch = LossBatch(
    made.batch, made.aux, Credit(np.float32([advantage])), np.ones((1, n), np.float32)
  )
  ratio = ratio or per_token()

  def losses(logp):
    return member(ratio(logp - made.aux.old_logp, batch), batch.credit.advantage)[0]

  total = lambda x: losses(x).sum()  # noqa: E731
  return np.asarray(losses(made.policy.logp))[0], np.asarray(jax.grad(total)(made.policy.logp))[0]


def test_nemo_rl_ppo_clip():
  """Ratios .5, 1, 1.5: -.5 x 1, 1 x 1, -min(3, 1.2 x 2) = -2.4; mean -1.9 / 3."""
  losses, _ = surrogate_of(clip(0.2, 0.2), [-1.69315, -1, -0.59453], [-1.0] * 3, [1, -1, 2])
  np.testing.assert_allclose(losses, [-0.5, 1, -2.4], atol=1e-3)
  assert losses.mean() == pytest.approx(-0.6333, abs=1e-3)


def test_nemo_rl_plain_policy_gradient():
  """-A logp has mean (.5 - 1 + 3) / 3 and slope -A; ours is linear in d, so take old = 0."""
  a, logp = [1, -1, 2], [-0.5, -1, -1.5]
  _, slope = surrogate_of(reinforce(), logp, logp, a)
  np.testing.assert_allclose(slope, [-1, 1, -2], atol=1e-6)
  losses, _ = surrogate_of(reinforce(low=1.0, cap=1.0 + 1e-7), logp, [0.0] * 3, a)
  assert losses.mean() == pytest.approx(0.8333, abs=1e-4)


def test_nemo_rl_dual_clip():
  """Ratios .5, 1, 10: -.5, 1 and min(40, 3 x 4) = 12; mean 12.5 / 3."""
  losses, slope = surrogate_of(
    clip(0.2, 0.2, dual=3.0), [-1.69315, -1, -0.69741], [-1.0, -1.0, -3.0], [1, -1, -4]
  )
  assert losses.mean() == pytest.approx(4.1667, abs=1e-3)
  assert slope[2] == 0


def test_nemo_rl_sequence_ratio():
  """s = exp((-.69315 + 0 + .40547) / 3) = .9086; mean of -A s = -.9086 x 2 / 3."""
  args = ([-1.69315, -1, -0.59453], [-1.0] * 3, [1, -1, 2])
  mean = lambda ratio: surrogate_of(clip(0.2, 0.2), *args, ratio=ratio)[0].mean()  # noqa: E731
  assert mean(at_scale(TRAJ)) == pytest.approx(-0.6057, abs=1e-3)
  for other in (at_scale_product(TRAJ), at_scale_arithmetic(TRAJ), per_token()):
    assert abs(mean(other) + 0.6057) > 5e-3


def test_nemo_rl_icepop():
  """rho = exp(-.5, 2.5, -.2) = .6065, 12.182, .8187, and 12.182 is out of .5 to 5."""
  made = lay_out([by_hand([0] * 3, [0.0], old=[-1.0] * 3, behavior=[-0.5, -3.5, -0.8])])
  credit = Credit(np.float32([[1, -1, 2]]))
  weight = np.asarray(banded_is(mean_over(TOKEN), 0.5, 5.0)(made.batch, made.aux, credit))[0]
  np.testing.assert_allclose(weight * 3, [0.6065, 0, 0.8187], atol=1e-3)
  assert (-weight * [1, -1, 2]).sum() == pytest.approx(-0.7480, abs=1e-3)


def test_verl_rollout_correction_statistics():
  """rho = .4, .8, 6: two of three out of band; kept .8: std sqrt(.64/3 - .0711), ess 1/3."""
  old = [math.log(x) - 4 for x in (0.4, 0.8, 6)]
  made = lay_out([by_hand([0] * 3, [0.0], old=old, behavior=[-4.0] * 3)])
  ours = mismatch(made.batch, made.aux, 0.5, 5.0)
  for name, value in {"out_of_band": 2 / 3, "spread": 0.3771236, "effective": 1 / 3}.items():
    assert float(ours[name]) == pytest.approx(value, abs=1e-6)


def test_slime_dual_clip():
  """Ratios 2, 2, .5, A = 2, -2, 2: -1.2 x 2; min(4, 1.5 x 2) = 3; -.5 x 2."""
  logp = [math.log(x) - 3 for x in (2, 2, 0.5)]
  losses, _ = surrogate_of(clip(0.2, 0.2, dual=1.5), logp, [-3.0] * 3, [2, -2, 2])
  np.testing.assert_allclose(losses, [-2.4, 3, -1], atol=1e-6)


def test_nemo_rl_kl_estimators():
  """Unclamped (C18): delta = -1, 14, 29; k3 of -1 is e - 2 = .7183."""
  delta = np.float32([-1, 14, 29])
  np.testing.assert_allclose(k1(delta), [-1, 14, 29], rtol=1e-3)
  np.testing.assert_allclose(k2(delta), [0.5, 98, 420.5], rtol=1e-3)
  np.testing.assert_allclose(k3(delta), [0.7183, 13, 28], rtol=1e-3)


RLAX_LOGITS = [[1, 1, 1], [2, 0, 0], [-1, -2, -3]]


def test_rlax_clipped_surrogate_from_logits():
  logp = logp_of(RLAX_LOGITS, [0, 1, 2])[0].tolist()
  old = logp_of([[1, 1, 1], [2, 0, 0], [-3, -2, -1]], [0, 1, 2])[0].tolist()
  for sign, expected in [(1, -0.17117467), (-1, 0.19333333)]:
    advantage = [sign * x for x in (0.3, 0.2, 0.1)]
    losses, _ = surrogate_of(clip(0.2, 0.2), logp, old, advantage)
    assert losses.mean() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
  ("shift", "actions", "advantage", "weight", "loss", "entropy_loss"),
  [
    (0, [0, 1, 2], [0.3, 0.2, 0.1], [-2, 2, 0], 0.0788835, 0.288693),
    (1, [0, 0, 0], [-0.3, -0.2, -0.1], [-3, 1, -1], 0.3272009, 1.15422),
  ],
)
def test_rlax_policy_gradient_and_entropy(shift, actions, advantage, weight, loss, entropy_loss):
  logp, entropy = logp_of(np.array(RLAX_LOGITS) + shift, actions)
  assert (-np.array(advantage) * weight * logp).mean() == pytest.approx(loss, abs=1e-4)
  assert (-np.array(weight) * entropy).mean() == pytest.approx(entropy_loss, abs=1e-4)


def test_maxtext_identical_reference_costs_nothing():
  made = lay_out([by_hand([0] * 3, [0.0], logp=[-1, -2, -3], ref=[-1, -2, -3])])
  batch = LossBatch(made.batch, made.aux, Credit(np.zeros((1, 3), np.float32)), np.ones((1, 3)))
  assert np.abs(kl_to_ref(1.0)(made.policy, batch)).max() <= 1e-5


# 6. AC2 (arXiv 2609.39247); its readiness, audits and costs are in test_readiness.py


def test_ac2_reduces_to_centred_returns_when_all_are_complete():
  made = lay_out([by_hand([-1, 0], [r]) for r in (0.0, 0.5, 1.0, 1.0)])
  ours = endpoint_baseline()(made.batch, made.aux).advantage
  theirs = group_relative(unscaled())(made.batch, made.aux).advantage
  np.testing.assert_allclose(ours, theirs, atol=1e-7)
  np.testing.assert_allclose(ours.sum(), 0, atol=1e-6)


@pytest.mark.parametrize(("valid", "has_target"), [(7, False), (8, True)])
def test_ac2_critic_target_needs_eight_valid_rewards(valid, has_target):
  made = lay_out([by_hand([-1, 0], [1.0]) for _ in range(valid)])
  credit = endpoint_baseline()(made.batch, made.aux)
  assert bool((credit.value_weight > 0).any()) == has_target
  assert (credit.advantage == 0).all()
  np.testing.assert_allclose(trajectory_returns(made.batch)[:valid], 1.0)
