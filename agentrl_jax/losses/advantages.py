"""Advantage slot: `(TrajectoryBatch, Aux) -> Credit`, once on the whole batch, without gradient.

Here: baselines from the group of episodes of one task. Statistics run over scored trajectories, one
vote each however many rows, turns or samples they occupy; where turns are compared, one a turn.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.losses.arguments import a_scale, finite, fraction, not_negative
from agentrl_jax.ops.scales import (
  TRAJ,
  TURN,
  Scale,
  restrict,
  scored,
  spread,
  unit_count,
  unit_mean,
)
from agentrl_jax.ops.scans import reverse_recurrence
from agentrl_jax.ops.stats import k1
from agentrl_jax.types import AdvantageFn, Aux, Credit, TrajectoryBatch

ALL_EQUAL = 1e-6  # a set whose largest centred number is below this (relative) has no signal

GroupScale = Callable[[Float[Array, "R"], Float[Array, "R"], Float[Array, "R"]], Float[Array, "R"]]


def by_std(eps: float = 1e-6) -> GroupScale:
  """Divide by the group's sample standard deviation (ddof 1) + `eps` (GRPO, arXiv 2402.03300)."""
  not_negative(eps=eps)

  def scale(square_sum, count, mean):
    del mean
    return jnp.sqrt(square_sum / jnp.maximum(count - 1.0, 1.0)) + eps

  return scale


def by_shared_std(eps: float = 1e-6) -> GroupScale:
  """Divide by one standard deviation, pooled within the groups of the batch.

  It keeps the step size of `by_std` but cannot favour one outcome of a task over another: under a
  proper score the optimum stays the true distribution.
  """
  not_negative(eps=eps)

  def scale(square_sum, count, mean):
    del mean
    member = count > 0
    each = lambda x: jnp.where(member, x / jnp.maximum(count, 1.0), 0.0).sum()  # noqa: E731
    freedom = each(count - 1.0)
    return jnp.full_like(count, jnp.sqrt(each(square_sum) / jnp.maximum(freedom, 1.0)) + eps)

  return scale


def by_mean() -> GroupScale:
  """Divide by the mean return, where none may be negative (MaxRL: maximum likelihood RL).

  So not of rewards shaped by a KL or a length: near a mean of 0 advantages would explode.
  """

  def scale(square_sum, count, mean):
    del square_sum, count
    return jnp.where(mean > 0, mean, 1.0)

  return scale


def by_others() -> GroupScale:
  """(n - 1) / n: turns the centred return into the return minus the mean of the *other* members."""

  def scale(square_sum, count, mean):
    del square_sum, mean
    return jnp.maximum(count - 1.0, 1.0) / jnp.maximum(count, 1.0)

  return scale


def unscaled() -> GroupScale:
  """Centre only (Dr.GRPO, arXiv 2503.20783): no division, so no bias towards easy or hard tasks."""
  return lambda square_sum, count, mean: jnp.ones_like(square_sum)


def group_relative(scale: GroupScale | None = None) -> AdvantageFn:
  """Return minus the mean return of the task's scored group, over `scale` (default `by_std()`).

  A group of one and a group of equal rewards get exactly 0.
  """
  scale = scale or by_std()

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    returns, group = trajectory_returns(batch), batch.traj_group
    return Credit(to_tokens(relative_to_set(returns, group, scale), batch))

  return advantage


def leave_one_out() -> AdvantageFn:
  """Return minus the mean return of the group's other members (RLOO, arXiv 2402.14740)."""
  return group_relative(by_others())


def group_relative_turns(gamma: float = 0.9, scale: GroupScale | None = None) -> AdvantageFn:
  """Discounted return of each turn, relative to all turns of the group (GTPO, arXiv 2511.14846).

  One mean a group and never one per turn index: among the trajectories that *reached* a turn, that
  would subtract a baseline which depends on the decision to go on.
  """
  fraction(gamma=gamma)
  scale = scale or by_std()

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    relative = relative_to_set(turn_returns(batch, gamma), turn_group(batch), scale)
    return Credit(jnp.where(scored(batch), spread(relative, TURN(batch)), 0.0))

  return advantage


def step_groups(
  anchor: Callable[[TrajectoryBatch], tuple[Int[Array, "U"], ...]],
  *,
  gamma: float = 0.95,
  scale: GroupScale | None = None,
) -> AdvantageFn:
  """Compares turns of a group that started from one observation (GiGPO, arXiv 2505.10978).

  Args:
    anchor: identifies the observation each turn answers, as integer keys that must all agree.
    gamma: discount of turn rewards, a turn.
    scale: of the discounted step returns within a step group (default: centre only).
  """
  fraction(gamma=gamma)
  scale = scale or unscaled()

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    group = turn_group(batch)
    same = _number_runs((group, *anchor(batch)))
    relative = relative_to_set(turn_returns(batch, gamma), jnp.where(group >= 0, same, -1), scale)
    return Credit(jnp.where(scored(batch), spread(relative, TURN(batch)), 0.0))

  return advantage


def imitation() -> AdvantageFn:
  """Advantage 1 on every scored action token: the credit of supervised training."""

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    del aux
    return Credit(scored(batch).astype(jnp.float32))

  return advantage


def distillation() -> AdvantageFn:
  """ref - old log-prob of each token: minus the one-token reverse KL to a teacher (`ref_logp`)."""

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    if aux.ref_logp is None:
      raise ValueError("distillation needs ref_logp: name it in Algorithm.needs")
    keep = scored(batch)
    delta = jnp.where(keep, aux.old_logp, 0.0) - jnp.where(keep, aux.ref_logp, 0.0)
    return Credit(-k1(delta))

  return advantage


def weighted_sum(*parts: tuple[float, AdvantageFn]) -> AdvantageFn:
  """Sum of coefficient x advantage; a value target may come from one part only."""
  if not parts:
    raise ValueError("a weighted_sum needs at least one (coefficient, advantage)")
  finite(**{f"coefficient {k}": coef for k, (coef, _) in enumerate(parts)})

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    credits = [(coef, part(batch, aux)) for coef, part in parts]
    targets = [credit for _, credit in credits if credit.value_target is not None]
    if len(targets) > 1:
      raise ValueError(f"{len(targets)} parts of a weighted_sum give value targets, expected one")
    total = sum((coef * credit.advantage for coef, credit in credits), jnp.zeros(()))
    return dataclasses.replace(targets[0], advantage=total) if targets else Credit(total)

  return advantage


def whiten(base: AdvantageFn, scale: Scale, eps: float = 1e-8) -> AdvantageFn:
  """Centres and scales `base` by mean and variance (ddof 1) over the scored units of `scale`.

  Every unit has one vote, the mean of its tokens. Equal advantages give exactly 0; a single unit is
  centred only.
  """
  a_scale(scale=scale)
  not_negative(eps=eps)

  def advantage(batch: TrajectoryBatch, aux: Aux) -> Credit:
    credit = base(batch, aux)
    keep = scored(batch)
    units = restrict(scale(batch), keep)
    here, x = unit_count(units) > 0, unit_mean(credit.advantage, units)
    count = jnp.maximum(here.sum(dtype=jnp.float32), 1.0)
    mean = jnp.where(here, x, 0.0).sum() / count
    centred = jnp.where(here, x - mean, 0.0)
    tokens = jnp.where(keep, credit.advantage - mean, 0.0)
    # Of a single unit only its tokens can differ.
    largest = jnp.where(count > 1, jnp.abs(centred).max(), jnp.abs(tokens).max())
    signal = largest >= ALL_EQUAL * jnp.maximum(1.0, jnp.abs(mean))
    variance = jnp.square(centred).sum() / jnp.maximum(count - 1.0, 1.0)
    divisor = jnp.where(count > 1, jnp.sqrt(variance + eps), 1.0)
    white = jnp.where(keep & signal, tokens / divisor, 0.0)
    return dataclasses.replace(credit, advantage=white)

  return advantage


def trajectory_returns(batch: TrajectoryBatch) -> Float[Array, "R"]:
  """Sum of each trajectory's turn rewards."""
  size = batch.traj_group.shape[0]
  inside = batch.turn_traj >= 0
  ids = jnp.where(inside, batch.turn_traj, size)
  reward = jnp.where(inside, batch.turn_reward, 0.0)
  return jax.ops.segment_sum(reward, ids, size + 1)[:-1]


def turn_returns(batch: TrajectoryBatch, gamma: float) -> Float[Array, "U"]:
  """G_k = sum over the later turns j >= k of the trajectory of gamma^(j - k) times their reward."""
  inside = batch.turn_traj >= 0
  reward = jnp.where(inside, batch.turn_reward, 0.0)
  traj = jnp.where(inside, batch.turn_traj, batch.traj_group.shape[0])
  order = jnp.argsort(traj, stable=True)  # turns of a trajectory are in order
  ended = jnp.append(traj[order][1:] != traj[order][:-1], True)
  sums = reverse_recurrence(reward[order], jnp.where(ended, 0.0, gamma))
  return jnp.zeros_like(sums).at[order].set(sums)


def turn_group(batch: TrajectoryBatch) -> Int[Array, "U"]:
  """The group of each turn's trajectory; -1 on padding and unscored trajectories."""
  return jnp.where(batch.turn_traj >= 0, batch.traj_group[batch.turn_traj], -1)


def relative_to_set(
  x: Float[Array, "N"], label: Int[Array, "N"], scale: GroupScale
) -> Float[Array, "N"]:
  """(x - mean) / scale among entries of equal label; 0 for label -1, sets of one, equal sets."""
  valid = label >= 0
  over = lambda y, reduce=jax.ops.segment_sum: _over_set(y, label, valid, reduce)  # noqa: E731
  count = over(jnp.ones_like(x))
  mean = over(x) / jnp.maximum(count, 1.0)
  centred = jnp.where(valid, x - mean, 0.0)
  largest = over(jnp.abs(centred), jax.ops.segment_max)
  signal = (count > 1) & (largest >= ALL_EQUAL * jnp.maximum(1.0, jnp.abs(mean))) & valid
  divisor = scale(over(jnp.square(centred)), count, mean)
  return jnp.where(signal, centred / jnp.where(signal, divisor, 1.0), 0.0)


def to_tokens(per_trajectory: Float[Array, "R"], batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """A trajectory's number on each of its scored action tokens, 0 elsewhere."""
  return jnp.where(scored(batch), spread(per_trajectory, TRAJ(batch)), 0.0)


def _over_set(
  x: Float[Array, "N"], label: Int[Array, "N"], valid: Bool[Array, "N"], reduce
) -> Float[Array, "N"]:
  """`reduce` of x over the valid entries of each entry's label, given back to each entry."""
  size = label.shape[0]
  ids = jnp.where(valid, label, size)
  return reduce(jnp.where(valid, x, 0.0), ids, size + 1)[ids]


def _number_runs(keys: tuple[Int[Array, "N"], ...]) -> Int[Array, "N"]:
  """An id in [0, N) for each distinct tuple of keys."""
  order = jnp.lexsort(keys)
  new = jnp.zeros(order.shape, bool)
  for key in keys:
    new |= jnp.append(False, key[order][1:] != key[order][:-1])
  return jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.cumsum(new, dtype=jnp.int32))
