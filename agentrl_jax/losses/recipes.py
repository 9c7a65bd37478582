"""Named algorithms: each is one composition of the five slots and nothing else."""

from agentrl_jax.losses.advantages import group_relative, imitation, unscaled
from agentrl_jax.losses.compose import policy_loss
from agentrl_jax.losses.penalties import kl_to_ref
from agentrl_jax.losses.ratios import at_scale, per_token
from agentrl_jax.losses.surrogates import clip, likelihood
from agentrl_jax.losses.weights import fixed_length, mean_over
from agentrl_jax.ops.scales import TOKEN, TRAJ
from agentrl_jax.types import Algorithm


def grpo(*, low: float = 0.2, high: float = 0.28, kl: float = 0.0) -> Algorithm:
  """GRPO (arXiv 2402.03300, eq. 3) with DAPO's asymmetric clip and token mean (arXiv
  2503.14476).
  """
  penalties = [kl_to_ref(kl)] if kl else []
  return Algorithm(
    group_relative(),
    mean_over(TOKEN),
    policy_loss(per_token(), clip(low, high), *penalties),
    needs=frozenset({"ref_logp"} if kl else ()),
  )


def dr_grpo(*, length: float, low: float = 0.2, high: float = 0.2) -> Algorithm:
  """Dr.GRPO (arXiv 2503.20783): centred returns, and a constant length as the divisor."""
  loss = policy_loss(per_token(), clip(low, high))
  return Algorithm(group_relative(unscaled()), fixed_length(length), loss)


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Algorithm:
  """GSPO (arXiv 2507.18071, eq. 5): the ratio is compared and clipped once for the whole
  trajectory.
  """
  return Algorithm(group_relative(), mean_over(TRAJ), policy_loss(at_scale(TRAJ), clip(low, high)))


def sft() -> Algorithm:
  """Supervised training: negative log-likelihood of action tokens, token mean."""
  return Algorithm(imitation(), mean_over(TOKEN), policy_loss(per_token(), likelihood()))
