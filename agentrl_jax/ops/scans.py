"""Reverse linear recurrences: discounted sums and generalised advantages are both y = x + c y'."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.ops.scales import Partition, is_last, unit_sum
from agentrl_jax.types import TrajectoryBatch


def reverse_recurrence(
  x: Float[Array, "*rows N"], decay: Float[Array, "*rows N"]
) -> Float[Array, "*rows N"]:
  """y_i = x_i + decay_i y_{i+1} along the last axis, y = 0 past its end; in log(N) steps."""

  def compose(later, earlier):
    (decay_later, x_later), (decay_earlier, x_earlier) = later, earlier
    return decay_later * decay_earlier, x_earlier + decay_earlier * x_later

  _, y = jax.lax.associative_scan(compose, (decay, x), reverse=True, axis=x.ndim - 1)
  return y


class Timeline(NamedTuple):
  """All positions in time order, trajectory after trajectory, padding last."""

  order: Int[Array, "N"]  # flat index of the token at each place
  traj: Int[Array, "N"]
  end: Bool[Array, "N"]  # last place of its trajectory


def timeline(batch: TrajectoryBatch) -> Timeline:
  """Sorts the positions of a batch by (trajectory, sample, position)."""
  size = batch.traj_group.shape[0]
  traj = jnp.where(batch.traj >= 0, batch.traj, size).ravel()
  order = jnp.lexsort((batch.position.ravel(), batch.sample.ravel(), traj))
  traj = traj[order]
  end = jnp.append(traj[1:] != traj[:-1], True)
  return Timeline(order, traj, end)


def bootstrap(batch: TrajectoryBatch, value: Float[Array, "B T"]) -> Float[Array, "R"]:
  """The value at the sentinel of each truncated trajectory, 0 for terminated ones."""
  everything = Partition(batch.traj, batch.traj_group.shape[0])
  sentinel = is_last(batch, everything) & jnp.logical_not(batch.action)
  end = unit_sum(jnp.where(sentinel, value, 0.0), everything)
  return jnp.where(batch.traj_truncated, end, 0.0)


def generalised_advantage(
  batch: TrajectoryBatch,
  value: Float[Array, "B T"],
  step: Bool[Array, "B T"],
  reward: Float[Array, "B T"],
  gamma: Float[Array, "B T"],
  lam: Float[Array, "B T"],
) -> Float[Array, "B T"]:
  """A_k = r_k + gamma_k V_{k+1} - V_k + gamma_k lam_k A_{k+1} over the tokens marked `step`.

  Only steps consume discount: everything between two of them (observations, the rest of a unit) is
  passed over. After the last step of a trajectory V is its bootstrap value and A is 0. Other tokens
  are not read and get the advantage of the next step.
  """
  line = timeline(batch)
  step, end, size = step.ravel()[line.order], line.end, batch.traj_group.shape[0]
  pick = lambda x: jnp.where(step, x.ravel()[line.order], 0.0)  # noqa: E731
  v, reward, gamma, lam = pick(value), pick(reward), pick(gamma), pick(lam)
  final = jnp.append(bootstrap(batch, value), 0.0)[jnp.minimum(line.traj, size)]
  # V of the next step, carried backwards over what is no step.
  start = jnp.where(step, v, jnp.where(end, final, 0.0))
  carried = reverse_recurrence(start, jnp.where(step | end, 0.0, 1.0))
  following = jnp.where(end, final, jnp.roll(carried, -1))
  delta = jnp.where(step, reward + gamma * following - v, 0.0)
  decay = jnp.where(end, 0.0, jnp.where(step, gamma * lam, 1.0))
  advantage = reverse_recurrence(delta, decay)
  return jnp.zeros_like(advantage).at[line.order].set(advantage).reshape(batch.tokens.shape)
