"""Penalty slot: `(PolicyEval, LossBatch) -> [B T]`, added to the surrogate, same weight."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.advantages import to_tokens, trajectory_returns
from agentrl_jax.losses.arguments import finite, not_negative
from agentrl_jax.ops.stats import bounded_exp, k3
from agentrl_jax.types import LossBatch, PenaltyFn, PolicyEval

Estimator = Callable[[Float[Array, "B T"]], Float[Array, "B T"]]


def value_and_gradient(value: Estimator, gradient: Estimator) -> Estimator:
  """An estimator with the value of one and the gradient of another, as in (k3, k2).

  On-policy the gradient of k2 is that of KL(policy || reference), while k3's is that of
  KL(reference || policy).
  """

  def estimator(delta: Float[Array, "B T"]) -> Float[Array, "B T"]:
    slope = gradient(delta)
    # Without stop_gradient the gradients of both estimators would add up.
    return slope + jax.lax.stop_gradient(value(delta) - slope)

  return estimator


def kl_to_ref(coef: float, estimator: Estimator = k3) -> PenaltyFn:
  """coef x KL estimate of the policy to the reference, from delta = logp - ref_logp (needs it)."""
  not_negative(coef=coef)

  def penalty(policy: PolicyEval, batch: LossBatch) -> Float[Array, "B T"]:
    if batch.aux.ref_logp is None:
      raise ValueError("kl_to_ref needs ref_logp: name it in Algorithm.needs")
    return coef * estimator(_delta(policy, batch.aux.ref_logp, batch))

  return penalty


def kl_to_old(coef: float, estimator: Estimator = k3) -> PenaltyFn:
  """coef x KL estimate of the policy to the one at the start of the step."""
  not_negative(coef=coef)
  return lambda policy, batch: coef * estimator(_delta(policy, batch.aux.old_logp, batch))


def off_policy(base: PenaltyFn) -> PenaltyFn:
  """`base` times the ratio policy / old, differentiated: unbiased when tokens came from old."""

  def penalty(policy: PolicyEval, batch: LossBatch) -> Float[Array, "B T"]:
    return bounded_exp(_delta(policy, batch.aux.old_logp, batch)) * base(policy, batch)

  return penalty


def entropy_bonus(coef: float) -> PenaltyFn:
  """-coef x entropy of the full next-token distribution at the sampling temperature."""
  finite(coef=coef)
  return lambda policy, batch: -coef * jnp.where(batch.traj.action, policy.entropy, 0.0)


def imitate_successes(coef: float, above: float = 0.0) -> PenaltyFn:
  """-coef x logp on trajectories whose return is greater than `above` (VAPO, arXiv 2504.05118)."""
  not_negative(coef=coef)
  finite(above=above)

  def penalty(policy: PolicyEval, batch: LossBatch) -> Float[Array, "B T"]:
    success = (trajectory_returns(batch.traj) > above).astype(jnp.float32)
    logp = jnp.where(batch.traj.action, policy.logp, 0.0)
    return -coef * to_tokens(success, batch.traj) * logp

  return penalty


def _delta(policy: PolicyEval, other: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
  action = batch.traj.action
  return jnp.where(action, policy.logp, 0.0) - jnp.where(action, other, 0.0)
