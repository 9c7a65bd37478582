"""Masked statistics as (total, count) pairs, KL estimators, and effective sample size."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.types import Metric

MAX_EXPONENT = 20.0  # a ratio beyond e^20 is clipped by every surrogate; the clamp keeps it finite


def bounded_exp(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """exp with its exponent clamped to +-20, so that no ratio overflows."""
  return jnp.exp(jnp.clip(log_ratio, -MAX_EXPONENT, MAX_EXPONENT))


def masked(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Metric:
  """Mean of `x` where `mask`, as a pair that adds over micro-batches; x may be NaN elsewhere."""
  total = jnp.where(mask, x.astype(jnp.float32), 0.0).sum()
  return Metric(total, mask.sum(dtype=jnp.float32))


def add_metrics(a: Metric, b: Metric) -> Metric:
  """The pair of the union of both."""
  return Metric(a.total + b.total, a.count + b.count)


def mean(metric: Metric) -> Float[Array, ""]:
  """total / count, and 0 where nothing was counted."""
  return metric.total / jnp.maximum(metric.count, 1.0)


def k1(delta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """KL(policy || other) from delta = logp - other: unbiased, noisy; as a loss its gradient is 0."""
  return delta


def k2(delta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """delta^2 / 2: biased value; on-policy gradient is that of KL(policy || other)."""
  return 0.5 * jnp.square(delta)


def k3(delta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """exp(-delta) - 1 + delta (Schulman, 2020): non-negative, unbiased on-policy.

  Only the exponent is limited, from above at 20. Beyond, the exponential goes on as its tangent: a
  constant would leave the linear term's gradient alone, which points away from the other policy.
  """
  exponent = jnp.minimum(-delta, MAX_EXPONENT)
  return jnp.exp(exponent) * (1.0 - delta - exponent) - 1.0 + delta


def effective_sample_share(
  weight: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, ""]:
  """(mean w)^2 / mean(w^2) over `mask`: 1 if all weights are equal, 0 if the mask is empty."""
  w = jnp.where(mask, weight, 0.0)
  squares = jnp.square(w).sum() * jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)
  return jnp.square(w.sum()) / jnp.where(squares > 0, squares, 1.0)
