"""Surrogate slot: `(log_ratio, advantage) -> (loss, clipped)` per token.

`clipped` is true exactly where the gradient coefficient was zeroed or capped.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.ops.stats import MAX_EXPONENT
from agentrl_jax.types import SurrogateFn


def reinforce(cap: float = float("inf")) -> SurrogateFn:
  """-sg[min(r, cap)] A d: importance-weighted REINFORCE; the gradient never dies, only its weight
  is capped.
  """

  def surrogate(log_ratio, advantage):
    # Without stop_gradient the weight's own gradient would double the score function off-policy.
    ratio = jax.lax.stop_gradient(bounded_exp(log_ratio))
    return -jnp.minimum(ratio, cap) * advantage * log_ratio, ratio > cap

  return surrogate


def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> SurrogateFn:
  """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; asymmetric as in DAPO,
  2503.14476).

  With `dual` = c > 1 the loss of a negative advantage is at most -c A (arXiv 1912.09729).

  Raises:
    ValueError: unless 0 <= low < 1, high >= 0 and dual > 1.
  """
  if not (0 <= low < 1 and high >= 0):
    raise ValueError(f"clip range is low={low}, high={high}, expected 0 <= low < 1 and high >= 0")
  if dual is not None and not dual > 1:
    raise ValueError(f"dual clip is {dual}, expected > 1")

  def surrogate(log_ratio, advantage):
    ratio = bounded_exp(log_ratio)
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
    clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    if dual is not None:
      loss = jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)
      clipped |= (advantage < 0) & (ratio > dual)
    return loss, clipped

  return surrogate


def likelihood() -> SurrogateFn:
  """-A d: maximum likelihood of tokens weighted by A (d is logp up to a constant)."""
  return lambda log_ratio, advantage: (-advantage * log_ratio, jnp.zeros(log_ratio.shape, bool))


def bounded_exp(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """exp with its exponent clamped to +-20, so that no ratio overflows."""
  return jnp.exp(jnp.clip(log_ratio, -MAX_EXPONENT, MAX_EXPONENT))
