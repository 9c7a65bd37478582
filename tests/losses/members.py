"""Every member of every slot as an algorithm: one line here, and all properties are tested."""

from agentrl_jax.losses import recipes
from agentrl_jax.losses.advantages import (
  by_mean,
  by_shared_std,
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
from agentrl_jax.losses.compose import add, policy_loss, with_clip_high
from agentrl_jax.losses.corrections import (
  banded_is,
  drop_covariant,
  drop_stale,
  masked_by_kl,
  masked_is,
  truncated_is,
)
from agentrl_jax.losses.endpoint import endpoint_baseline, valid_endpoints
from agentrl_jax.losses.gae import (
  every_token,
  gae,
  kl_to_go,
  length_adaptive,
  relative_horizon,
  resolution_mix,
  reward_to_go,
  two_scale_gae,
)
from agentrl_jax.losses.penalties import (
  entropy_bonus,
  imitate_successes,
  kl_to_old,
  kl_to_ref,
  off_policy,
  value_and_gradient,
)
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
from agentrl_jax.losses.shaping import kl_in_reward, length_penalty
from agentrl_jax.losses.surrogates import (
  clip,
  gated_reinforce,
  likelihood,
  reinforce,
  soft_gate,
  unclipped,
)
from agentrl_jax.losses.values import categorical_value_loss, value_loss
from agentrl_jax.losses.weights import (
  drop_truncated,
  fixed_length,
  mean_over,
  nested_mean,
  once_explained,
  sum_over,
)
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ, TURN, fixed_chunks, marked_chunks
from agentrl_jax.ops.stats import k1, k2, k3
from agentrl_jax.types import Algorithm

SIMPLE = policy_loss(per_token(), clip(0.2, 0.28))
BY_TOKEN = mean_over(TOKEN)
GROUPED = group_relative()


def advantage(member, *needs):
  return Algorithm(member, BY_TOKEN, SIMPLE, frozenset(needs))


def ratio(member):
  return Algorithm(GROUPED, BY_TOKEN, policy_loss(member, clip(0.2, 0.28)))


def surrogate(member):
  return Algorithm(GROUPED, BY_TOKEN, policy_loss(per_token(), member))


def penalty(member, *needs):
  return Algorithm(GROUPED, BY_TOKEN, policy_loss(per_token(), clip(), member), frozenset(needs))


def weight(member):
  return Algorithm(GROUPED, member, SIMPLE)


def critic(member):
  return Algorithm(gae(TURN), BY_TOKEN, member, frozenset({"value"}))


MEMBERS = {
  "advantage-group_relative": advantage(group_relative()),
  "advantage-centred": advantage(group_relative(unscaled())),
  "advantage-shared_std": advantage(group_relative(by_shared_std())),
  "advantage-by_mean": advantage(group_relative(by_mean())),
  "advantage-leave_one_out": advantage(leave_one_out()),
  "advantage-turns": advantage(group_relative_turns(0.9)),
  "advantage-step_groups": advantage(step_groups(observation_before, gamma=0.95)),
  "advantage-imitation": advantage(imitation()),
  "advantage-distillation": advantage(distillation(), "ref_logp"),
  "advantage-weighted_sum": advantage(weighted_sum((1.0, leave_one_out()), (0.3, gae(TURN)))),
  "advantage-whiten_token": advantage(whiten(gae(TURN), TOKEN), "value"),
  "advantage-whiten_turn": advantage(whiten(gae(TURN), TURN), "value"),
  "advantage-reward_to_go": advantage(reward_to_go(0.9)),
  "advantage-kl_to_go": advantage(kl_to_go(0.9), "ref_logp"),
  "advantage-gae_token": advantage(gae(TOKEN, gamma=0.9, lam=0.8), "value"),
  "advantage-gae_chunk": advantage(gae(fixed_chunks(2), gamma=0.9, lam=0.8), "value"),
  "advantage-gae_turn": advantage(gae(TURN, gamma=0.9, lam=0.8, critic_lam=1.0), "value"),
  "advantage-gae_traj": advantage(gae(TRAJ, gamma=0.9, lam=0.8), "value"),
  "advantage-gae_adaptive": advantage(gae(TURN, lam=length_adaptive(0.4)), "value"),
  "advantage-gae_horizon": advantage(gae(TOKEN, lam=relative_horizon(0.3)), "value"),
  "advantage-two_scale": advantage(two_scale_gae(inner_lam=0.9, outer_lam=0.7), "value"),
  "advantage-mix": advantage(resolution_mix(1.0, 0.7, 0.2, gamma=0.9, lam=0.8), "value"),
  "advantage-endpoint": advantage(endpoint_baseline(min_valid=2), "value"),
  "advantage-kl_in_reward": advantage(kl_in_reward(leave_one_out(), 0.1), "ref_logp"),
  "advantage-length_penalty": advantage(length_penalty(leave_one_out(), limit=8, buffer=6)),
  "ratio-chunk": ratio(at_scale(fixed_chunks(2))),
  "ratio-marked_chunk": ratio(at_scale(marked_chunks([3, 4, 5]))),
  "ratio-turn": ratio(at_scale(TURN)),
  "ratio-traj": ratio(at_scale(TRAJ)),
  "ratio-product": ratio(at_scale_product(TURN)),
  "ratio-arithmetic": ratio(at_scale_arithmetic(TURN)),
  "ratio-straight_through": ratio(straight_through(TURN)),
  "ratio-mix": ratio(mix((0.5, per_token()), (0.3, at_scale(TURN)), (0.2, at_scale(TRAJ)))),
  "ratio-one_sided_clip": ratio(one_sided_clip(0.1, 0.1)),
  "ratio-freeze_stale": ratio(freeze_stale(per_token(), 0.01)),
  "surrogate-reinforce": surrogate(reinforce()),
  "surrogate-reinforce_capped": surrogate(reinforce(low=0.8, cap=1.2)),
  "surrogate-clip_dual": surrogate(clip(0.2, 0.28, dual=3.0)),
  "surrogate-gated": surrogate(gated_reinforce()),
  "surrogate-soft_gate": surrogate(soft_gate()),
  "surrogate-unclipped": surrogate(unclipped()),
  "surrogate-likelihood": surrogate(likelihood()),
  "penalty-kl_k1": penalty(kl_to_ref(0.1, k1), "ref_logp"),
  "penalty-kl_k2": penalty(kl_to_ref(0.1, k2), "ref_logp"),
  "penalty-kl_k3": penalty(kl_to_ref(0.1, k3), "ref_logp"),
  "penalty-kl_k3_k2": penalty(kl_to_ref(0.1, value_and_gradient(k3, k2)), "ref_logp"),
  "penalty-kl_to_old": penalty(kl_to_old(0.1)),
  "penalty-off_policy": penalty(off_policy(kl_to_ref(0.1, k2)), "ref_logp"),
  "penalty-entropy": penalty(entropy_bonus(0.1)),
  "penalty-imitate_successes": penalty(imitate_successes(0.1, above=0.5)),
  "loss-clip_high": Algorithm(
    GROUPED,
    BY_TOKEN,
    with_clip_high(lambda high: policy_loss(per_token(), clip(0.2, high)), start=0.3),
  ),
  "weight-turn": weight(mean_over(TURN)),
  "weight-chunk": weight(mean_over(fixed_chunks(3))),
  "weight-traj": weight(mean_over(TRAJ)),
  "weight-group": weight(mean_over(GROUP)),
  "weight-nested": weight(nested_mean(TRAJ, TURN)),
  "weight-fixed_length": weight(fixed_length(10.0)),
  "weight-sum_over": weight(sum_over(50.0)),
  "weight-drop_truncated": weight(drop_truncated(mean_over(TRAJ))),
  "weight-once_explained": Algorithm(
    gae(TURN), once_explained(BY_TOKEN, -100.0), SIMPLE, frozenset({"value"})
  ),
  "weight-truncated_is": weight(truncated_is(BY_TOKEN, cap=1.2)),
  "weight-truncated_is_traj": weight(truncated_is(BY_TOKEN, ratio=at_scale_product(TRAJ))),
  "weight-banded_is": weight(banded_is(BY_TOKEN, 0.7, 1.4)),
  "weight-masked_is": weight(masked_is(BY_TOKEN, high=1.5)),
  "weight-masked_is_band": weight(masked_is(BY_TOKEN, 0.9, 1.1, at_scale(TRAJ))),
  "weight-masked_by_kl": weight(masked_by_kl(BY_TOKEN, 0.05)),
  "weight-drop_stale": weight(drop_stale(BY_TOKEN, 0.01)),
  "weight-drop_covariant": weight(drop_covariant(BY_TOKEN, 0.05, 0.1, 2.0)),
  "weight-valid_endpoints": weight(valid_endpoints(BY_TOKEN)),
  "value-plain": critic(value_loss()),
  "value-clipped": critic(value_loss(clip=0.2)),
  "value-categorical": critic(categorical_value_loss(-2.0, 2.0)),
  "value-every_token": Algorithm(gae(TURN, learners=every_token), BY_TOKEN, value_loss()),
  "loss-add": Algorithm(gae(TURN), BY_TOKEN, add(SIMPLE, value_loss())),
}

RECIPES = {
  "grpo": recipes.grpo(),
  "grpo-kl": recipes.grpo(kl=0.1),
  "dr_grpo": recipes.dr_grpo(length=10.0),
  "dapo": recipes.dapo(limit=8, buffer=4),
  "rloo": recipes.rloo(kl=0.1),
  "reinforce_pp": recipes.reinforce_pp(kl=0.1),
  "reinforce_pp_baseline": recipes.reinforce_pp_baseline(kl=0.1),
  "maxrl": recipes.maxrl(),
  "gtpo": recipes.gtpo(),
  "gspo": recipes.gspo(),
  "gspo_token": recipes.gspo_token(),
  "gmpo": recipes.gmpo(),
  "cispo": recipes.cispo(),
  "sapo": recipes.sapo(),
  "minirl": recipes.minirl(),
  "ppo": recipes.ppo(),
  "turn_ppo": recipes.turn_ppo(),
  "vapo": recipes.vapo(),
  "gigpo": recipes.gigpo(),
  "mpo": recipes.mpo(kl=0.1),
  "mpo_mix": recipes.mpo_mix(),
  "mpo-token_token": recipes.mpo(advantage=gae(TOKEN), scale=TOKEN, low=0.2, high=0.28),
  "mpo-token_turn": recipes.mpo(advantage=gae(TOKEN), scale=TURN),
  "mpo-turn_token": recipes.mpo(advantage=gae(TURN), scale=TOKEN, low=0.2, high=0.28),
  "mpo-turn_turn": recipes.mpo(advantage=gae(TURN), scale=TURN),
  "ac2": recipes.ac2(min_valid=2),
  "canopy": recipes.canopy(),
  "opd": recipes.opd(),
  "critic_only": recipes.critic_only(),
  "sft": recipes.sft(),
}

ALL = {**MEMBERS, **{f"recipe-{name}": recipe for name, recipe in RECIPES.items()}}

# Weights that are declared to add up to something else than one.
UNNORMALISED = {
  "weight-fixed_length", "weight-sum_over", "weight-truncated_is", "weight-truncated_is_traj",
  "weight-banded_is", "weight-masked_is", "weight-masked_is_band", "weight-masked_by_kl",
  "weight-drop_stale", "weight-drop_covariant",
  "recipe-dr_grpo", "recipe-rloo", "recipe-minirl",
}  # fmt: skip
