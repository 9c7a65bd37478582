"""Penalty slot: `(PolicyEval, LossBatch) -> [B T]`, added to the surrogate under the same
weight.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.ops.stats import k3
from agentrl_jax.types import LossBatch, PenaltyFn, PolicyEval

Estimator = Callable[[Float[Array, "B T"]], Float[Array, "B T"]]


def kl_to_ref(coef: float, estimator: Estimator = k3) -> PenaltyFn:
  """coef x KL estimate of the policy to the reference, from delta = logp - ref_logp (needs
  `ref_logp`).
  """

  def penalty(policy: PolicyEval, batch: LossBatch) -> Float[Array, "B T"]:
    if batch.aux.ref_logp is None:
      raise ValueError("kl_to_ref needs ref_logp: name it in Algorithm.needs")
    action = batch.traj.action
    delta = jnp.where(action, policy.logp, 0.0) - jnp.where(action, batch.aux.ref_logp, 0.0)
    return coef * estimator(delta)

  return penalty


def entropy_bonus(coef: float) -> PenaltyFn:
  """-coef x entropy of the full next-token distribution at the sampling temperature."""
  return lambda policy, batch: -coef * jnp.where(batch.traj.action, policy.entropy, 0.0)
