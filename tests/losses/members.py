"""Every member of every slot as an algorithm: one line here, and all properties are tested."""

from agentrl_jax.losses import recipes
from agentrl_jax.losses.advantages import group_relative, unscaled
from agentrl_jax.losses.compose import policy_loss
from agentrl_jax.losses.penalties import entropy_bonus, kl_to_ref
from agentrl_jax.losses.ratios import at_scale, per_token
from agentrl_jax.losses.surrogates import clip, reinforce
from agentrl_jax.losses.weights import fixed_length, mean_over, truncated_is
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ, TURN
from agentrl_jax.types import Algorithm

SIMPLE = policy_loss(per_token(), clip(0.2, 0.28))


def advantage(member, *needs):
  return Algorithm(member, mean_over(TOKEN), SIMPLE, frozenset(needs))


def ratio(member):
  return Algorithm(group_relative(), mean_over(TURN), policy_loss(member, clip(0.2, 0.28)))


def surrogate(member):
  return Algorithm(group_relative(), mean_over(TOKEN), policy_loss(per_token(), member))


def penalty(member, *needs):
  return Algorithm(
    group_relative(), mean_over(TRAJ), policy_loss(per_token(), clip(), member), frozenset(needs)
  )


def weight(member):
  return Algorithm(group_relative(), member, SIMPLE)


MEMBERS = {
  "advantage-group_relative": advantage(group_relative()),
  "advantage-centred": advantage(group_relative(unscaled())),
  "ratio-turn": ratio(at_scale(TURN)),
  "ratio-traj": ratio(at_scale(TRAJ)),
  "surrogate-reinforce": surrogate(reinforce()),
  "surrogate-reinforce_capped": surrogate(reinforce(cap=1.5)),
  "surrogate-clip_dual": surrogate(clip(0.2, 0.28, dual=3.0)),
  "penalty-kl_to_ref": penalty(kl_to_ref(0.1), "ref_logp"),
  "penalty-entropy": penalty(entropy_bonus(0.1)),
  "weight-token": weight(mean_over(TOKEN)),
  "weight-turn": weight(mean_over(TURN)),
  "weight-traj": weight(mean_over(TRAJ)),
  "weight-group": weight(mean_over(GROUP)),
  "weight-fixed_length": weight(fixed_length(10.0)),
  "weight-truncated_is": weight(truncated_is(mean_over(TOKEN), cap=1.2)),
}

RECIPES = {
  "grpo": recipes.grpo(),
  "grpo-kl": recipes.grpo(kl=0.1),
  "dr_grpo": recipes.dr_grpo(length=10.0),
  "gspo": recipes.gspo(),
  "sft": recipes.sft(),
}

ALL = {**MEMBERS, **{f"recipe-{name}": recipe for name, recipe in RECIPES.items()}}

# What a weight adds up to, where that is not one.
SUMS = {"weight-fixed_length": None, "recipe-dr_grpo": None, "weight-truncated_is": None}
