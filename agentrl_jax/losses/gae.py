"""Advantages from a critic: one reverse recursion whose steps are the units of a scale.

Between steps nothing is discounted, truncated trajectories bootstrap from their sentinel, and the
value of a unit is that of the state before its first action token.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.losses.arguments import above_zero, finite, fraction, within_trajectories
from agentrl_jax.ops.scales import (
  TOKEN,
  TRAJ,
  TURN,
  Partition,
  Scale,
  is_first,
  is_last,
  restrict,
  scored,
  spread,
  unit_count,
  unit_mean,
  unit_sum,
)
from agentrl_jax.ops.scans import generalised_advantage
from agentrl_jax.ops.stats import k1
from agentrl_jax.types import AdvantageFn, Aux, Credit, TrajectoryBatch

Schedule = Callable[[Float[Array, "R"]], Float[Array, "R"]]  # lambda from a trajectory's steps
Learners = Callable[[TrajectoryBatch, Partition], Bool[Array, "B T"]]


def length_adaptive(alpha: float = 0.05) -> Schedule:
  """lambda = max(0, 1 - 1 / (alpha x steps)) (VAPO, arXiv 2504.05118)."""
  above_zero(alpha=alpha)
  return lambda steps: jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(steps, 1.0)))


def relative_horizon(share: float) -> Schedule:
  """lambda = share^(1 / (steps - 1)): the last error reaches the first step weighing `share`."""
  fraction(share=share)

  def schedule(steps):
    several = jnp.power(share, 1.0 / jnp.maximum(steps - 1.0, 1.0))
    return jnp.where(steps >= 2, several, jnp.where(steps == 1, 1.0, 0.0))

  return schedule


def every_token(batch: TrajectoryBatch, units: Partition) -> Bool[Array, "B T"]:
  """All tokens of a unit learn its value, sharing the unit's weight."""
  del batch
  return units.ids >= 0


def gae(
  scale: Scale = TOKEN,
  *,
  gamma: float = 1.0,
  lam: float | Schedule = 0.95,
  critic_lam: float | Schedule | None = None,
  learners: Learners = is_first,
) -> AdvantageFn:
  """A_k = R_k + gamma V_{k+1} - V_k + gamma lam A_{k+1} over units, the same on a unit's tokens.

  At TOKEN this is GAE (arXiv 1506.02438), at TURN Turn-PPO's (arXiv 2512.17008). Needs `value`.

  Args:
    scale: whose units are steps.
    gamma: discount a step.
    lam: a constant or a schedule of the number of steps.
    critic_lam: of the value target A_k + V_k (default: `lam`).
    learners: which tokens of a unit learn its target: `is_first` or `every_token`.
  """
  within_trajectories(scale=scale)
  fraction(gamma=gamma)
  constants = {"lam": lam, "critic_lam": lam if critic_lam is None else critic_lam}
  fraction(**{name: x for name, x in constants.items() if not callable(x)})

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    value = _value(aux)
    units = restrict(scale(batch), scored(batch))
    first = is_first(batch, units)
    reward = spread(unit_sum(token_rewards(batch), units), units)

    def over_units(at_first):
      return spread(unit_sum(jnp.where(first, at_first, 0.0), units), units)

    def estimate(factor):
      gammas, lams = jnp.full_like(reward, gamma), _per_token(factor, first, batch)
      return over_units(generalised_advantage(batch, value, first, reward, gammas, lams))

    actor = estimate(lam)
    critic = actor if critic_lam is None else estimate(critic_lam)
    return _with_targets(actor, critic + over_units(value), learners(batch, units), units)

  return advantage


def two_scale_gae(
  scale: Scale = TURN,
  *,
  inner_gamma: float = 1.0,
  inner_lam: float = 1.0,
  outer_gamma: float = 1.0,
  outer_lam: float = 0.95,
  critic_lam: float = 1.0,
  learners: Learners = is_first,
) -> AdvantageFn:
  """Token GAE whose discount and lambda depend on whether the step leaves its unit.

  Our reading of Multiscale Advantage Estimation, construction A. With inner factors (1, 1) a unit's
  first token gets the unit's own GAE for any critic, and all its tokens do if the critic is
  constant inside units; equal factors give token GAE. Unit targets for the critic; needs `value`.
  """
  fraction(inner_gamma=inner_gamma, inner_lam=inner_lam)
  fraction(outer_gamma=outer_gamma, outer_lam=outer_lam)
  targets = gae(scale, gamma=outer_gamma, lam=critic_lam, learners=learners)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    keep = scored(batch)
    leaves = is_last(batch, restrict(scale(batch), keep))
    gamma = jnp.where(leaves, outer_gamma, inner_gamma)
    lam = jnp.where(leaves, outer_lam, inner_lam)
    token = generalised_advantage(batch, _value(aux), keep, token_rewards(batch), gamma, lam)
    return dataclasses.replace(targets(batch, aux), advantage=jnp.where(keep, token, 0.0))

  return advantage


def resolution_mix(
  traj: float = 1.0,
  turn: float = 1.0,
  token: float = 0.0,
  *,
  gamma: float = 1.0,
  lam: float = 0.95,
  critic_lam: float = 1.0,
) -> AdvantageFn:
  """Token GAE split into trajectory mean, turn mean around it and the rest, each with its weight.

  Our reading of Multiscale Advantage Estimation, construction B: (1, 1, 1) is token PPO, (1, 1, 0)
  one advantage a turn, (1, 0, 0) one a trajectory. Needs `value`.
  """
  finite(traj=traj, turn=turn, token=token)
  base = gae(TOKEN, gamma=gamma, lam=lam, critic_lam=critic_lam)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    credit, keep = base(batch, aux), scored(batch)
    a = credit.advantage

    def mean(scale):
      units = restrict(scale(batch), keep)
      return spread(unit_mean(a, units), units)

    coarse, middle = mean(TRAJ), mean(TURN)
    mixed = traj * coarse + turn * (middle - coarse) + token * (a - middle)
    return dataclasses.replace(credit, advantage=mixed)

  return advantage


def reward_to_go(gamma: float = 1.0) -> AdvantageFn:
  """Discounted sum of rewards at and after each action token; observations are passed over."""
  fraction(gamma=gamma)
  return lambda batch, aux: _to_go(batch, token_rewards(batch), gamma)


def kl_to_go(gamma: float = 1.0) -> AdvantageFn:
  """The same sum of ref - old log-probs: what the KL to the reference still costs, token by token.

  To be added to `reward_to_go`; unlike `shaping.kl_in_reward` a token answers only for itself and
  what follows, not for earlier tokens of its turn. Needs `ref_logp`.
  """
  fraction(gamma=gamma)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    if aux.ref_logp is None:
      raise ValueError("kl_to_go needs ref_logp: name it in Algorithm.needs")
    keep = scored(batch)
    apart = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, aux.ref_logp, 0.0)
    return _to_go(batch, -k1(apart), gamma)

  return advantage


def _to_go(batch: TrajectoryBatch, rewards: Float[Array, "B T"], gamma: float) -> Credit:
  keep = scored(batch)
  gammas, zero = jnp.full_like(rewards, gamma), jnp.zeros_like(rewards)
  returns = generalised_advantage(batch, zero, keep, rewards, gammas, jnp.ones_like(rewards))
  return Credit(jnp.where(keep, returns, 0.0))


def token_rewards(batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """Each turn's reward on its last action token."""
  turns = TURN(batch)
  return jnp.where(is_last(batch, turns), spread(batch.turn_reward, turns), 0.0)


def _value(aux: Aux) -> Float[Array, "B T"]:
  if aux.value is None:
    raise ValueError("this advantage needs value: name it in Algorithm.needs")
  return aux.value


def _per_token(
  factor: float | Schedule, step: Bool[Array, "B T"], batch: TrajectoryBatch
) -> Float[Array, "B T"]:
  if not callable(factor):
    return jnp.full(step.shape, factor, jnp.float32)
  trajectories = TRAJ(batch)
  return spread(factor(unit_sum(step.astype(jnp.float32), trajectories)), trajectories)


def _with_targets(
  advantage: Float[Array, "B T"],
  target: Float[Array, "B T"],
  learns: Bool[Array, "B T"],
  units: Partition,
) -> Credit:
  """Credit whose value weights are a mean over units of the mean over each unit's learners."""
  counts = unit_count(restrict(units, learns))
  present = jnp.maximum((counts > 0).sum(dtype=jnp.float32), 1.0)
  weight = jnp.where(learns, spread(1.0 / (present * jnp.maximum(counts, 1.0)), units), 0.0)
  return Credit(advantage, jnp.where(learns, target, 0.0), weight)
