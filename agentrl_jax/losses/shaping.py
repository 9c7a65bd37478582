"""Rewards edited before any advantage sees them: each wraps an advantage and works with all."""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.losses.arguments import not_negative
from agentrl_jax.ops.scales import TRAJ, TURN, restrict, scored, unit_count, unit_sum
from agentrl_jax.ops.stats import k1
from agentrl_jax.types import AdvantageFn, Aux, Credit, TrajectoryBatch


def kl_in_reward(base: AdvantageFn, coef: float) -> AdvantageFn:
  """Takes coef x the sum over the turn of old - ref log-probs from each turn's reward.

  This is k1, whose expectation is the KL; as a reward it has the right gradient. Needs `ref_logp`.
  """
  not_negative(coef=coef)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    if aux.ref_logp is None:
      raise ValueError("kl_in_reward needs ref_logp: name it in Algorithm.needs")
    keep = scored(batch)
    apart = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, aux.ref_logp, 0.0)
    cost = unit_sum(k1(apart), restrict(TURN(batch), keep))
    return base(dataclasses.replace(batch, turn_reward=batch.turn_reward - coef * cost), aux)

  return advantage


def length_penalty(
  base: AdvantageFn, *, limit: int, buffer: int, coef: float = 1.0, saturate: bool = False
) -> AdvantageFn:
  """Takes coef x max(0, length - (limit - buffer)) / buffer from the last turn's reward.

  Length is in action tokens. Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), which
  saturates at `coef`; public code, and the default here, lets it grow: they agree up to `limit`.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f"length limit {limit} and buffer {buffer}, expected 0 < buffer <= limit")
  not_negative(coef=coef)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    over = jnp.maximum(0.0, unit_count(TRAJ(batch)) - (limit - buffer)) / buffer
    over = jnp.minimum(over, 1.0) if saturate else over
    size, turns = over.shape[0], batch.turn_traj.shape[0]
    owner = jnp.where(batch.turn_traj >= 0, batch.turn_traj, size)
    number = jnp.arange(turns, dtype=jnp.int32)
    last = number == jax.ops.segment_max(number, owner, size + 1)[owner]
    cost = jnp.where(last, jnp.append(over, 0.0)[owner], 0.0)
    return base(dataclasses.replace(batch, turn_reward=batch.turn_reward - coef * cost), aux)

  return advantage
