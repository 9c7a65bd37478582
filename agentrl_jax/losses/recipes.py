"""Named algorithms: each is one composition of the five slots and nothing else.

Docstrings give paper and equation. The weight is the paper's aggregation; any correction for the
engine (`corrections`) may wrap it. `critic` replaces the value loss of those that have one.
"""

from agentrl_jax.losses.advantages import (
  by_mean,
  distillation,
  group_relative,
  group_relative_turns,
  imitation,
  leave_one_out,
  step_groups,
  unscaled,
  weighted_sum,
  whiten,
)
from agentrl_jax.losses.anchors import observation_before
from agentrl_jax.losses.arguments import not_negative
from agentrl_jax.losses.checks import no_negative_return, some_group_of_two
from agentrl_jax.losses.compose import add, policy_loss, with_clip_high
from agentrl_jax.losses.corrections import truncated_is
from agentrl_jax.losses.endpoint import endpoint_baseline, valid_endpoints
from agentrl_jax.losses.gae import (
  gae,
  kl_to_go,
  length_adaptive,
  resolution_mix,
  reward_to_go,
  two_scale_gae,
)
from agentrl_jax.losses.penalties import imitate_successes, kl_to_ref, value_and_gradient
from agentrl_jax.losses.ratios import at_scale, one_sided_clip, per_token, straight_through
from agentrl_jax.losses.shaping import kl_in_reward, length_penalty
from agentrl_jax.losses.surrogates import (
  clip,
  gated_reinforce,
  likelihood,
  reinforce,
  soft_gate,
  unclipped,
)
from agentrl_jax.losses.values import value_loss
from agentrl_jax.losses.weights import drop_truncated, fixed_length, mean_over
from agentrl_jax.ops.scales import TOKEN, TRAJ, TURN, Scale
from agentrl_jax.ops.stats import k2, k3
from agentrl_jax.types import AdvantageFn, Algorithm, LossFn, PenaltyFn

GROUPS = (some_group_of_two,)
VALUE, NOTHING = frozenset({"value"}), frozenset[str]()


def _kl(coef: float) -> tuple[list[PenaltyFn], frozenset[str]]:
  """The penalty to the reference (value k3, gradient k2) and what it needs; none if coef is 0."""
  if not coef:
    return [], NOTHING
  return [kl_to_ref(coef, value_and_gradient(k3, k2))], frozenset({"ref_logp"})


def grpo(*, low: float = 0.2, high: float = 0.28, kl: float = 0.0) -> Algorithm:
  """GRPO (arXiv 2402.03300, eq. 3), with the asymmetric clip and token mean of arXiv 2503.14476."""
  penalties, needs = _kl(kl)
  loss = policy_loss(per_token(), clip(low, high), *penalties)
  return Algorithm(group_relative(), mean_over(TOKEN), loss, needs, GROUPS)


def dr_grpo(*, length: float, low: float = 0.2, high: float = 0.2) -> Algorithm:
  """Dr.GRPO (arXiv 2503.20783): centred returns, and a constant length as the divisor."""
  loss = policy_loss(per_token(), clip(low, high))
  return Algorithm(group_relative(unscaled()), fixed_length(length), loss, NOTHING, GROUPS)


def dapo(
  *, limit: int, buffer: int, coef: float = 1.0, low: float = 0.2, high: float = 0.28
) -> Algorithm:
  """DAPO (arXiv 2503.14476, eq. 8 and 13): overlong shaping; truncated episodes carry no loss.

  Its dynamic sampling is not here: `Batch.only_mixed` leaves groups of equal rewards out of the
  step, and nothing refills them.
  """
  shaped = length_penalty(group_relative(), limit=limit, buffer=buffer, coef=coef)
  loss = policy_loss(per_token(), clip(low, high))
  return Algorithm(shaped, drop_truncated(mean_over(TOKEN)), loss, NOTHING, GROUPS)


def rloo(*, kl: float = 0.0) -> Algorithm:
  """RLOO (arXiv 2402.14740, eq. 8): leave-one-out baseline, REINFORCE, KL in the reward."""
  advantage = kl_in_reward(leave_one_out(), kl) if kl else leave_one_out()
  needs = frozenset({"ref_logp"}) if kl else NOTHING
  return Algorithm(
    advantage, fixed_length(1.0), policy_loss(per_token(), reinforce()), needs, GROUPS
  )


def reinforce_pp(
  *, gamma: float = 1.0, low: float = 0.2, high: float = 0.2, kl: float = 0.0
) -> Algorithm:
  """REINFORCE++ (arXiv 2501.03262): returns to go, less each token's KL, whitened over tokens."""
  not_negative(kl=kl)
  to_go = reward_to_go(gamma)
  to_go = weighted_sum((1.0, to_go), (kl, kl_to_go(gamma))) if kl else to_go
  needs = frozenset({"ref_logp"}) if kl else NOTHING
  loss = policy_loss(per_token(), clip(low, high))
  return Algorithm(whiten(to_go, TOKEN), mean_over(TOKEN), loss, needs)


def reinforce_pp_baseline(*, low: float = 0.2, high: float = 0.2, kl: float = 0.0) -> Algorithm:
  """REINFORCE++-baseline (arXiv 2501.03262): centred in the group, whitened over all tokens."""
  penalties, needs = _kl(kl)
  loss = policy_loss(per_token(), clip(low, high), *penalties)
  return Algorithm(whiten(group_relative(unscaled()), TOKEN), mean_over(TOKEN), loss, needs, GROUPS)


def maxrl() -> Algorithm:
  """MaxRL (as in prime-rl): centred return over the mean, REINFORCE; no negative returns."""
  loss = policy_loss(per_token(), reinforce())
  checks = (*GROUPS, no_negative_return)
  return Algorithm(group_relative(by_mean()), mean_over(TOKEN), loss, NOTHING, checks)


def gtpo(*, gamma: float = 0.9, low: float = 0.2, high: float = 0.2) -> Algorithm:
  """GTPO over turns (arXiv 2511.14846): each turn's discounted return among the group's turns."""
  loss = policy_loss(per_token(), clip(low, high))
  return Algorithm(group_relative_turns(gamma), mean_over(TOKEN), loss, NOTHING, GROUPS)


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Algorithm:
  """GSPO (arXiv 2507.18071, eq. 5): the ratio is compared and clipped once for the trajectory."""
  loss = policy_loss(at_scale(TRAJ), clip(low, high))
  return Algorithm(group_relative(), mean_over(TRAJ), loss, NOTHING, GROUPS)


def gspo_token(*, low: float = 3e-4, high: float = 4e-4) -> Algorithm:
  """GSPO-token (arXiv 2507.18071, eq. 13): the trajectory's ratio, each token's own gradient."""
  loss = policy_loss(straight_through(TRAJ), clip(low, high))
  return Algorithm(group_relative(), mean_over(TRAJ), loss, NOTHING, GROUPS)


def gmpo(*, low: float = 0.4, high: float = 0.4) -> Algorithm:
  """GMPO (arXiv 2507.20673): geometric mean of token ratios that are clipped one by one."""
  loss = policy_loss(one_sided_clip(low, high), unclipped())
  return Algorithm(group_relative(), mean_over(TRAJ), loss, NOTHING, GROUPS)


def cispo(*, high: float = 0.28) -> Algorithm:
  """CISPO (arXiv 2506.13585, eq. 4): importance weights are capped, no token is silenced."""
  loss = policy_loss(per_token(), reinforce(cap=1.0 + high))
  return Algorithm(group_relative(), mean_over(TOKEN), loss, NOTHING, GROUPS)


def sapo(*, positive: float = 1.0, negative: float = 1.05) -> Algorithm:
  """SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip."""
  loss = policy_loss(per_token(), soft_gate(positive, negative))
  return Algorithm(group_relative(), mean_over(TRAJ), loss, NOTHING, GROUPS)


def minirl(*, low: float = 0.2, high: float = 0.2) -> Algorithm:
  """MiniRL (arXiv 2512.01374): token sums weighted by policy / behavior, gated by policy / old."""
  weight = truncated_is(fixed_length(1.0), cap=float("inf"))
  loss = policy_loss(per_token(), gated_reinforce(low, high))
  return Algorithm(group_relative(unscaled()), weight, loss, NOTHING, GROUPS)


def ppo(
  *, gamma: float = 1.0, lam: float = 0.95, low: float = 0.2, high: float = 0.2, coef: float = 0.5,
  critic: LossFn | None = None,
) -> Algorithm:  # fmt: skip
  """PPO (arXiv 1707.06347) over tokens, dual clip 3 (arXiv 1912.09729), clipped value loss."""
  loss = add(
    policy_loss(per_token(), clip(low, high, dual=3.0)), critic or value_loss(coef, clip=0.2)
  )
  return Algorithm(gae(TOKEN, gamma=gamma, lam=lam), mean_over(TOKEN), loss, VALUE)


def turn_ppo(
  *, gamma: float = 1.0, lam: float = 0.95, low: float = 0.2, high: float = 0.28, coef: float = 0.5,
  critic: LossFn | None = None,
) -> Algorithm:  # fmt: skip
  """Turn-PPO (arXiv 2512.17008): a turn is a step of the critic, a token a step of the actor."""
  loss = add(policy_loss(per_token(), clip(low, high, dual=3.0)), critic or value_loss(coef))
  return Algorithm(gae(TURN, gamma=gamma, lam=lam, critic_lam=1.0), mean_over(TOKEN), loss, VALUE)


def vapo(
  *, alpha: float = 0.05, low: float = 0.2, high: float = 0.28, imitate: float = 0.1,
  coef: float = 0.5, scale: Scale = TOKEN, critic: LossFn | None = None,
) -> Algorithm:  # fmt: skip
  """VAPO (arXiv 2504.05118): length-adaptive lambda, critic lambda 1, likelihood of successes."""
  advantage = gae(scale, lam=length_adaptive(alpha), critic_lam=1.0)
  actor = policy_loss(per_token(), clip(low, high), imitate_successes(imitate))
  return Algorithm(advantage, mean_over(TOKEN), add(actor, critic or value_loss(coef)), VALUE)


def gigpo(
  *, omega: float = 1.0, gamma: float = 0.95, low: float = 0.2, high: float = 0.2, kl: float = 0.0
) -> Algorithm:
  """GiGPO (arXiv 2505.10978, eq. 7): episode advantage + omega x advantage among equal states."""
  steps = step_groups(observation_before, gamma=gamma)
  penalties, needs = _kl(kl)
  loss = policy_loss(per_token(), clip(low, high), *penalties)
  advantage = weighted_sum((1.0, group_relative()), (omega, steps))
  return Algorithm(advantage, mean_over(TOKEN), loss, needs, GROUPS)


def mpo(
  *, advantage: AdvantageFn | None = None, scale: Scale = TURN, low: float = 3e-3,
  high: float = 4e-3, kl: float = 0.0, coef: float = 0.5, critic: LossFn | None = None,
) -> Algorithm:  # fmt: skip
  """MPO, our reading: two-scale GAE, turn ratio with each token's own gradient, critic at turns.

  The other settings are other arguments: `resolution_mix()` is construction B; `gae(TOKEN)` or
  `gae(TURN)` with scale TOKEN or TURN are the 2 x 2 of advantage and ratio.
  """
  penalties, needs = _kl(kl)
  actor = policy_loss(straight_through(scale), clip(low, high, dual=3.0), *penalties)
  loss = add(actor, critic or value_loss(coef))
  return Algorithm(advantage or two_scale_gae(), mean_over(TOKEN), loss, VALUE | needs)


def mpo_mix(*, traj: float = 1.0, turn: float = 1.0, token: float = 0.0) -> Algorithm:
  """MPO, our reading, construction B: token GAE averaged at each resolution."""
  return mpo(advantage=resolution_mix(traj, turn, token))


def ac2(
  *, low: float = 0.2, start: float = 0.34, coef: float = 0.5, min_valid: int = 8,
  critic: LossFn | None = None,
) -> Algorithm:  # fmt: skip
  """AC2 (arXiv 2609.39247): endpoint baseline; a controller of entropy moves the upper clip."""
  actor = with_clip_high(
    lambda high: policy_loss(per_token(), clip(low, high, dual=3.0)), start=start
  )
  weight = valid_endpoints(mean_over(TOKEN))
  advantage = endpoint_baseline(min_valid=min_valid)
  return Algorithm(advantage, weight, add(actor, critic or value_loss(coef)), VALUE, GROUPS)


def canopy(*, kl: float = 1e-4, low: float = 0.2, high: float = 0.2) -> Algorithm:
  """CANOPY (arXiv 2609.01245): standardised group returns, pooled token mean, a light KL anchor."""
  return grpo(low=low, high=high, kl=kl)


def opd(*, cap: float = 2.0) -> Algorithm:
  """On-policy distillation from `Experiment.reference`, the teacher: each token's advantage is
  ref - old log-prob.
  """
  loss = policy_loss(per_token(), reinforce(cap=cap))
  return Algorithm(distillation(), mean_over(TOKEN), loss, frozenset({"ref_logp"}))


def critic_only(*, gamma: float = 1.0, scale: Scale = TOKEN) -> Algorithm:
  """Value pre-training (VC-PPO, arXiv 2503.01491): Monte-Carlo returns, no policy loss.

  The policy stays beside a critic that is `learner.critic.detached` or `of_its_own`; with the
  default one, whose loss reaches the policy's hidden states, it moves too.
  """
  return Algorithm(gae(scale, gamma=gamma, lam=1.0), mean_over(TOKEN), value_loss(1.0), VALUE)


def sft() -> Algorithm:
  """Supervised training: negative log-likelihood of action tokens, token mean."""
  return Algorithm(imitation(), mean_over(TOKEN), policy_loss(per_token(), likelihood()))
