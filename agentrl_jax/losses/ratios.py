"""Ratio slot: `(log_ratio, LossBatch) -> log_ratio`, at the scale where policies are compared.

The log-ratio of a unit is a mean over its tokens unless the name says otherwise, so clip ranges do
not transfer between scales: it spreads like 1 / sqrt(tokens of the unit).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import not_negative, within_trajectories
from agentrl_jax.ops.scales import TRAJ, Scale, restrict, spread, unit_mean, unit_sum
from agentrl_jax.ops.stats import bounded_exp
from agentrl_jax.types import LossBatch, RatioFn


def per_token() -> RatioFn:
  """Each token keeps its own log-ratio (PPO, arXiv 1707.06347)."""
  return lambda log_ratio, batch: log_ratio


def at_scale(scale: Scale) -> RatioFn:
  """Geometric mean of the unit's token ratios, on each of its tokens (GSPO, arXiv 2507.18071)."""
  within_trajectories(scale=scale)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    units = scale(batch.traj)
    return spread(unit_mean(log_ratio, units), units)

  return ratio


def at_scale_product(scale: Scale) -> RatioFn:
  """Product of the unit's token ratios: the exact ratio of probabilities, explosive in length."""
  within_trajectories(scale=scale)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    units = scale(batch.traj)
    return spread(unit_sum(log_ratio, units), units)

  return ratio


def at_scale_arithmetic(scale: Scale) -> RatioFn:
  """Arithmetic mean of the unit's token ratios."""
  within_trajectories(scale=scale)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    units = scale(batch.traj)
    mean = spread(unit_mean(bounded_exp(log_ratio), units), units, fill=1)
    return jnp.log(mean)

  return ratio


def straight_through(scale: Scale) -> RatioFn:
  """Value of `at_scale`, gradient of each token's own log-prob (GSPO-token, arXiv 2507.18071).

  It differs from `at_scale` only where weight x advantage varies inside a unit: there each token
  answers for its own.
  """
  coarse = at_scale(scale)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    # Without stop_gradient the mean would be differentiated too, and tokens would share credit.
    mean, own = jax.lax.stop_gradient((coarse(log_ratio, batch), log_ratio))
    return mean + (log_ratio - own)

  return ratio


def mix(*parts: tuple[float, RatioFn]) -> RatioFn:
  """Geometric mixture of ratios: sum of coefficient x log-ratio; coefficients must sum to 1."""
  total = sum(coef for coef, _ in parts)
  if not abs(total - 1) <= 1e-6:
    raise ValueError(f"coefficients of a ratio mixture sum to {total}, expected 1")

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    return sum((coef * part(log_ratio, batch) for coef, part in parts), jnp.zeros(()))

  return ratio


def one_sided_clip(low: float = 0.4, high: float = 0.4, scale: Scale = TRAJ) -> RatioFn:
  """Clips token log-ratios where that lowers the objective, then averages (GMPO, arXiv 2507.20673).

  For a positive advantage d becomes min(d, high), for a negative one max(d, -low); `low` and `high`
  are bounds of the log-ratio. A clipped token gets no gradient, the others of its unit do.
  """
  not_negative(low=low, high=high)
  within_trajectories(scale=scale)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    sign = jnp.sign(batch.credit.advantage)
    bounded = sign * jnp.minimum(sign * log_ratio, sign * jnp.clip(log_ratio, -low, high))
    units = restrict(scale(batch.traj), batch.traj.action)
    return spread(unit_mean(bounded, units), units)

  return ratio


def freeze_stale(base: RatioFn, max_kl: float) -> RatioFn:
  """No gradient for negative advantages of trajectories that drifted: mean(old - logp) > max_kl.

  The in-loss form of off-policy sequence masking (DeepSeek-V3.2); the form against the engine's
  log-probs is `corrections.drop_stale`.
  """
  not_negative(max_kl=max_kl)

  def ratio(log_ratio: Float[Array, "B T"], batch: LossBatch) -> Float[Array, "B T"]:
    units = TRAJ(batch.traj)
    drift = spread(unit_mean(-log_ratio, units), units)
    stale = (drift > max_kl) & (batch.credit.advantage < 0)
    # stop_gradient is the mask itself: without it stale trajectories would go on being pushed away.
    log_ratio = jnp.where(stale, jax.lax.stop_gradient(log_ratio), log_ratio)
    return base(log_ratio, batch)

  return ratio
