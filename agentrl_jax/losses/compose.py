"""Composes slots into a loss: a plain weighted sum over tokens, plus the metrics of its parts."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import not_negative
from agentrl_jax.ops.stats import add_metrics, k3, masked
from agentrl_jax.types import (
  LossBatch,
  LossFn,
  Metric,
  Metrics,
  PenaltyFn,
  PolicyEval,
  RatioFn,
  SurrogateFn,
)


def policy_loss(ratio: RatioFn, surrogate: SurrogateFn, *penalties: PenaltyFn) -> LossFn:
  """sum_t weight_t (surrogate(ratio(logp - old_logp), advantage) + penalties)_t.

  Only action tokens are read, in value or gradient. One of weight 0 has no term of its own, but a
  ratio at a coarser scale averages over its whole unit: there it is read, and gets the gradient of
  its neighbours' terms.
  """

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    weight, action = batch.weight, batch.traj.action
    live = action & (weight != 0)
    old = jnp.where(action, batch.aux.old_logp, 0.0)
    token_log_ratio = jnp.where(action, policy.logp, 0.0) - old
    log_ratio = jnp.where(live, ratio(token_log_ratio, batch), 0.0)
    per_token, clipped = surrogate(log_ratio, jnp.where(live, batch.credit.advantage, 0.0))
    for penalty in penalties:
      per_token += penalty(policy, batch)
    total = jnp.where(live, weight * jnp.where(live, per_token, 0.0), 0.0).sum()
    return total, {
      "clip_fraction": masked(clipped, live),
      "entropy": masked(policy.entropy, live),
      "kl_old": masked(k3(token_log_ratio), live),
    }

  return loss


def with_clip_high(build: Callable[[float | Float[Array, ""]], LossFn], *, start: float) -> LossFn:
  """The loss that `build` makes of the step's upper clip, `start` until a controller sets it."""
  not_negative(start=start)
  at_start = build(start)

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    moved = batch.aux.clip_high
    total, metrics = (at_start if moved is None else build(moved))(policy, batch)
    high = jnp.asarray(start, jnp.float32) if moved is None else moved
    live = batch.traj.action & (batch.weight != 0)
    return total, {**metrics, "clip_high": masked(jnp.broadcast_to(high, live.shape), live)}

  return loss


def add(*losses: LossFn) -> LossFn:
  """The sum of losses; metrics of the same name are pooled."""

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    total, metrics = jnp.zeros((), jnp.float32), dict[str, Metric]()
    for part in losses:
      value, found = part(policy, batch)
      total += value
      for name, metric in found.items():
        metrics[name] = add_metrics(metrics[name], metric) if name in metrics else metric
    return total, metrics

  return loss
