"""Losses of a critic: weighted sums over the positions where `Credit` says it learns.

Which units are values of, what they should be and how much each counts is decided by the advantage
(`gae`, `endpoint_baseline`): these losses work at any scale.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import above_zero, finite, not_negative
from agentrl_jax.ops.stats import masked
from agentrl_jax.types import LossBatch, LossFn, Metric, Metrics, PolicyEval


def value_loss(coef: float = 0.5, clip: float | None = None) -> LossFn:
  """coef x mean of (V - target)^2 / 2 (needs `value`).

  With `clip`, the larger of that and the same for V kept within +-clip of the old value.
  """
  not_negative(coef=coef)
  if clip is not None:
    above_zero(clip=clip)

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    weight, target = _targets(batch)
    learns = weight > 0
    value = jnp.where(learns, _needed(policy.value, "value"), 0.0)
    error = jnp.square(value - target)
    if clip is not None:
      old = jnp.where(learns, _needed(batch.aux.value, "value"), 0.0)
      near = old + jnp.clip(value - old, -clip, clip)
      error = jnp.maximum(error, jnp.square(near - target))
    return coef * (0.5 * weight * error).sum(), _moments(value, target, learns)

  return loss


def categorical_value_loss(low: float, high: float, coef: float = 0.5) -> LossFn:
  """coef x mean cross-entropy of K bins from `low` to `high` to the two-hot target.

  The model gives `value_logits` [B T K] and their mean as `value`; targets outside are clipped.
  When traced it raises ValueError for a model whose bins span something else.
  """
  if not low < high:
    raise ValueError(f"value bins span {low} to {high}, expected low < high")
  finite(low=low, high=high)
  not_negative(coef=coef)

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    weight, target = _targets(batch)
    learns = weight > 0
    logits = _needed(policy.value_logits, "value_logits")
    if policy.value_span not in (None, (low, high)):
      raise ValueError(
        f"the loss has value bins from {low} to {high}, the critic from {policy.value_span[0]} to "
        f"{policy.value_span[1]}: give both the same"
      )
    logits = jnp.where(learns[..., None], logits, 0.0)
    wanted = two_hot(target, low, high, logits.shape[-1])
    entropy = -(wanted * jax.nn.log_softmax(logits, axis=-1)).sum(-1)
    value = expected_value(logits, low, high)
    return coef * (weight * entropy).sum(), _moments(value, target, learns)

  return loss


def two_hot(
  target: Float[Array, "*shape"], low: float, high: float, bins: int
) -> Float[Array, "*shape K"]:
  """Weights of the two bins around `target` whose mean it is."""
  place = (jnp.clip(target, low, high) - low) * ((bins - 1) / (high - low))
  centre = jnp.arange(bins, dtype=jnp.float32).reshape((1,) * target.ndim + (bins,))
  return jnp.maximum(0.0, 1.0 - jnp.abs(place[..., None] - centre))


def expected_value(
  logits: Float[Array, "*shape K"], low: float, high: float
) -> Float[Array, "*shape"]:
  """Mean of the distribution over bins from `low` to `high`."""
  centre = jnp.linspace(low, high, logits.shape[-1], dtype=jnp.float32)
  return jnp.einsum("...k,k->...", jax.nn.softmax(logits, axis=-1), centre)


def explained_variance(metrics: Mapping[str, Metric]) -> float:
  """1 - Var(target - V) / Var(target) of what a value loss reported; 0 if targets do not vary."""
  read = lambda name: float(metrics[name].total) / max(float(metrics[name].count), 1.0)  # noqa: E731
  spread = read("value_target_square") - read("value_target") ** 2
  error = read("value_error_square") - read("value_error") ** 2
  return 1.0 - error / spread if spread > 1e-12 else 0.0


def _targets(batch: LossBatch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  weight, target = batch.credit.value_weight, batch.credit.value_target
  if weight is None or target is None:
    raise ValueError("a value loss needs an advantage that gives value targets, such as gae")
  weight = jnp.where(batch.traj.action, weight, 0.0)
  return weight, jnp.where(weight > 0, target, 0.0)


def _needed(array: Array | None, name: str) -> Array:
  if array is None:
    raise ValueError(f"a value loss needs {name}, which the model does not give")
  return array


def _moments(value, target, learns) -> Metrics:
  error = target - value
  return {
    "value_error": masked(error, learns),
    "value_error_square": masked(jnp.square(error), learns),
    "value_target": masked(target, learns),
    "value_target_square": masked(jnp.square(target), learns),
  }
