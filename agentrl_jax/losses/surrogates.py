"""Surrogate slot: `(log_ratio, advantage) -> (loss, clipped)` per token.

`clipped` is true exactly where the gradient coefficient was zeroed or capped. At ratio one all of
them have the gradient of REINFORCE; only off-policy do they differ.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import above_zero
from agentrl_jax.ops.stats import bounded_exp
from agentrl_jax.types import SurrogateFn


def reinforce(low: float = 0.0, cap: float = float("inf")) -> SurrogateFn:
  """-sg[clip(r, low, cap)] A d: importance-weighted REINFORCE, whose gradient never dies.

  With a cap of 1 + epsilon it is CISPO (arXiv 2506.13585), which has no lower bound.
  """
  if not 0 <= low < cap:
    raise ValueError(f"ratio bounds are low={low}, cap={cap}, expected 0 <= low < cap")

  def surrogate(log_ratio, advantage):
    # Without stop_gradient the weight's own gradient would double the score function off-policy.
    ratio = jax.lax.stop_gradient(bounded_exp(log_ratio))
    return -jnp.clip(ratio, low, cap) * advantage * log_ratio, (ratio > cap) | (ratio < low)

  return surrogate


def clip(
  low: float = 0.2, high: float | Float[Array, ""] = 0.2, dual: float | None = None
) -> SurrogateFn:
  """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; asymmetric: DAPO, 2503.14476).

  `high` may be an array, where a controller moves it. With `dual` = c > 1 the loss of a negative
  advantage is at most -c A (arXiv 1912.09729).

  Raises:
    ValueError: unless 0 <= low < 1, high >= 0 and dual > 1.
  """
  _check_range(low, high)
  if dual is not None and not dual > 1:
    raise ValueError(f"dual clip is {dual}, expected > 1")

  def surrogate(log_ratio, advantage):
    ratio = bounded_exp(log_ratio)
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
    clipped = _outside(ratio, advantage, low, high)
    if dual is not None:
      loss = jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)
      clipped |= (advantage < 0) & (ratio > dual)
    return loss, clipped

  return surrogate


def gated_reinforce(low: float = 0.2, high: float = 0.2) -> SurrogateFn:
  """-sg[M r] A d, M = 0 where `clip` would stop the gradient (MiniRL, arXiv 2512.01374)."""
  _check_range(low, high)

  def surrogate(log_ratio, advantage):
    # stop_gradient as in `reinforce`.
    ratio = jax.lax.stop_gradient(bounded_exp(log_ratio))
    outside = _outside(ratio, advantage, low, high)
    return jnp.where(outside, 0.0, -ratio * advantage * log_ratio), outside

  return surrogate


def soft_gate(positive: float = 1.0, negative: float = 1.05) -> SurrogateFn:
  """-A (4 / tau) sigmoid(tau (r - 1)): a smooth clip (SAPO, arXiv 2511.20347).

  The gradient coefficient is -A r 4 s (1 - s), s the sigmoid: -A at r = 1, fading on both sides.
  `positive` and `negative` are tau for advantages of either sign.
  """
  above_zero(positive=positive, negative=negative)

  def surrogate(log_ratio, advantage):
    tau = jnp.where(advantage > 0, positive, negative)
    gate = jax.nn.sigmoid(tau * (bounded_exp(log_ratio) - 1.0))
    return -advantage * 4.0 / tau * gate, jnp.zeros(log_ratio.shape, bool)

  return surrogate


def unclipped() -> SurrogateFn:
  """-r A: the plain importance-sampled objective, for ratios that are bounded themselves."""
  return lambda log_ratio, advantage: (
    -bounded_exp(log_ratio) * advantage,
    jnp.zeros(log_ratio.shape, bool),
  )


def likelihood() -> SurrogateFn:
  """-A d: maximum likelihood of tokens weighted by A (d is logp up to a constant)."""
  return lambda log_ratio, advantage: (-advantage * log_ratio, jnp.zeros(log_ratio.shape, bool))


def _check_range(low: float, high: float | Float[Array, ""]) -> None:
  if not 0 <= low < 1 or (not isinstance(high, jax.Array) and not high >= 0):
    raise ValueError(f"clip range is low={low}, high={high}, expected 0 <= low < 1 and high >= 0")


def _outside(ratio, advantage, low, high):
  """Where the pessimistic clip is active: the ratio left the band on the advantage's own side."""
  return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
