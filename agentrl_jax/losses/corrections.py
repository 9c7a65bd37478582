"""Weights that answer for engine and trainer disagreeing: rho = exp(old - behavior) per token.

Each wraps a weight and multiplies it by a constant of the loss; denominators, and the units that a
coarser ratio averages over, stay as they were and advantages never see rho. Where `old` is taken
from the engine, rho is one and nothing is left.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from agentrl_jax.losses.arguments import band, fraction, not_negative, whole
from agentrl_jax.losses.ratios import at_scale, at_scale_product, per_token
from agentrl_jax.ops.scales import TRAJ, restrict, scored, spread, unit_mean
from agentrl_jax.ops.stats import bounded_exp, effective_sample_share, k3, masked, mean
from agentrl_jax.types import Aux, Credit, LossBatch, RatioFn, TrajectoryBatch, WeightFn


def truncated_is(
  base: WeightFn, cap: float = 2.0, low: float = 0.0, ratio: RatioFn | None = None
) -> WeightFn:
  """Multiplies `base` by clip(rho, low, cap), rho taken at `ratio`'s scale (default: token).

  Truncated importance sampling; with `at_scale_product(TRAJ)` it is the sequence form.
  """
  band(low=low, high=cap)
  ratio = ratio or per_token()

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    rho = bounded_exp(_log_rho(ratio, batch, aux, credit))
    return base(batch, aux, credit) * jnp.clip(rho, low, cap)

  return weight


def banded_is(base: WeightFn, low: float = 0.5, high: float = 5.0) -> WeightFn:
  """Multiplies `base` by rho, or by 0 where rho is outside [low, high] (IcePop)."""
  band(low=low, high=high)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    rho = bounded_exp(_log_rho(per_token(), batch, aux, credit))
    return base(batch, aux, credit) * jnp.where((rho >= low) & (rho <= high), rho, 0.0)

  return weight


def masked_is(
  base: WeightFn, low: float = 0.0, high: float = 2.0, ratio: RatioFn | None = None
) -> WeightFn:
  """Keeps `base` where rho, at `ratio`'s scale, is within [low, high], and 0 elsewhere.

  The default compares the product over the trajectory (masked importance sampling), which rejects
  long trajectories first; `at_scale(TRAJ)` with .999 to 1.001 is the geometric band.
  """
  band(low=low, high=high)
  ratio = ratio or at_scale_product(TRAJ)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    rho = bounded_exp(_log_rho(ratio, batch, aux, credit))
    return jnp.where((rho >= low) & (rho <= high), base(batch, aux, credit), 0.0)

  return weight


def masked_by_kl(base: WeightFn, most: float) -> WeightFn:
  """Keeps trajectories whose mean of rho - log rho - 1 is at most `most`."""
  not_negative(most=most)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    apart = _log_rho(per_token(), batch, aux, credit)
    units = restrict(TRAJ(batch), scored(batch))
    return jnp.where(
      spread(unit_mean(k3(-apart), units), units) <= most, base(batch, aux, credit), 0.0
    )

  return weight


def drop_stale(base: WeightFn, max_kl: float) -> WeightFn:
  """Drops negative advantages where the trajectory's mean of behavior - old exceeds `max_kl`."""
  not_negative(max_kl=max_kl)

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    drift = -_log_rho(at_scale(TRAJ), batch, aux, credit)
    stale = (drift > max_kl) & (credit.advantage < 0)
    return jnp.where(stale, 0.0, base(batch, aux, credit))

  return weight


def drop_covariant(
  base: WeightFn, share: float = 2e-4, low: float = 1.0, high: float = 5.0, seed: int = 0
) -> WeightFn:
  """Zero weight for a few tokens whose advantage and log-prob rise together (Clip-Cov, 2505.22617).

  Of the tokens with (A - mean A)(old - mean old) in (low, high), as many as `share` of all scored
  tokens (at least one) are dropped. The choice is pseudo-random in the token's own numbers and
  `seed`: the same for every packing and device, where public code chooses in each micro-batch.
  """
  fraction(share=share)
  whole(0, seed=seed)
  if not low < high:
    raise ValueError(f"the covariances are low={low}, high={high}, expected low < high")

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit) -> Float[Array, "B T"]:
    keep = scored(batch)
    old = jnp.where(keep, aux.old_logp, 0.0)
    centre = lambda x: x - mean(masked(x, keep))  # noqa: E731
    covariance = centre(credit.advantage) * centre(old)
    candidate = keep & (covariance > low) & (covariance < high)
    budget = jnp.maximum(1, (share * keep.sum(dtype=jnp.float32)).astype(jnp.int32))
    lot = jnp.where(candidate, _draw(old, batch, seed), jnp.uint32(2**32 - 1))
    threshold = jnp.sort(lot.ravel())[jnp.minimum(budget, lot.size) - 1]
    return jnp.where(candidate & (lot <= threshold), 0.0, base(batch, aux, credit))

  return weight


def mismatch(
  batch: TrajectoryBatch, aux: Aux, low: float = 0.5, high: float = 2.0
) -> Mapping[str, Float[Array, ""]]:
  """How far apart engine and trainer are, over scored tokens of the whole batch.

  `out_of_band` is the share of rho outside [low, high], `kl` the mean of rho - log rho - 1,
  `largest` the largest |old - behavior|; `effective` the effective sample share of the weights that
  `banded_is` would multiply by, `spread` their standard deviation.
  """
  keep = scored(batch)
  log_rho = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, batch.behavior_logp, 0.0)
  rho = bounded_exp(log_rho)
  outside = (rho < low) | (rho > high)
  kept = jnp.where(outside, 0.0, rho)
  centred = kept - mean(masked(kept, keep))
  return {
    "out_of_band": mean(masked(outside, keep)),
    "kl": mean(masked(k3(-log_rho), keep)),
    "largest": jnp.abs(log_rho).max(),
    "effective": effective_sample_share(kept, keep),
    "spread": jnp.sqrt(mean(masked(jnp.square(centred), keep))),
  }


def _log_rho(
  ratio: RatioFn, batch: TrajectoryBatch, aux: Aux, credit: Credit
) -> Float[Array, "B T"]:
  keep = scored(batch)
  apart = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, batch.behavior_logp, 0.0)
  everywhere = jnp.ones_like(apart)
  return jnp.where(keep, ratio(apart, LossBatch(batch, aux, credit, everywhere)), 0.0)


def _draw(old: Float[Array, "B T"], batch: TrajectoryBatch, seed: int) -> UInt[Array, "B T"]:
  """A hash of each token's log-prob bits, id and position (the finaliser of MurmurHash3)."""
  bits = jax.lax.bitcast_convert_type(old, jnp.uint32)
  for extra in (batch.tokens, batch.position):
    bits = (bits ^ extra.astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B) + jnp.uint32(seed % 2**32)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> jnp.uint32(16))
  return bits
