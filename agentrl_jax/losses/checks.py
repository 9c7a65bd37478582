"""What a batch must satisfy before any algorithm sees it, and what some algorithms ask on top.

Checks run on numpy arrays, once a step, and name the first offender.
"""

import numpy as np

from agentrl_jax.types import TrajectoryBatch

# Squares of larger ones leave float32: the deviation of their group would be infinite.
MOST_REWARD = 1e15


def check_batch(batch: TrajectoryBatch) -> None:
  """Raises ValueError, naming values, if labels, masks, rewards or shapes contradict."""
  shape = np.shape(batch.tokens)
  if len(shape) != 2:
    raise ValueError(f"tokens have shape {shape}, expected [B, T]")
  for name in (
    "position", "sample", "traj", "turn", "action", "behavior_logp", "behavior_version",
  ):  # fmt: skip
    if np.shape(getattr(batch, name)) != shape:
      raise ValueError(f"{name} has shape {np.shape(getattr(batch, name))}, tokens {shape}")
  if batch.parent is not None and np.shape(batch.parent) != shape:
    raise ValueError(f"parent has shape {np.shape(batch.parent)}, tokens {shape}")
  for a, b in (("turn_reward", "turn_traj"), ("traj_group", "traj_truncated")):
    sizes = np.shape(getattr(batch, a)), np.shape(getattr(batch, b))
    if sizes[0] != sizes[1]:
      raise ValueError(f"{a} has shape {sizes[0]}, {b} {sizes[1]}")
  _check_labels(batch)
  _check_parents(batch)
  _check_actions(batch)
  _check_turns(batch)
  _check_sentinels(batch)


def some_group_of_two(batch: TrajectoryBatch) -> None:
  """Raises ValueError if no group has two scored trajectories: a group baseline leaves nothing."""
  groups, counts = np.unique(batch.traj_group[batch.traj_group >= 0], return_counts=True)
  if groups.size and counts.max() < 2:
    raise ValueError(
      f"a group baseline needs 2 scored trajectories of a task; group {groups[0]} and the "
      f"{groups.size - 1} others have 1"
    )


def no_negative_return(batch: TrajectoryBatch) -> None:
  """Raises ValueError if a scored trajectory's rewards sum to less than 0."""
  inside = batch.turn_traj >= 0
  returns = np.bincount(
    batch.turn_traj[inside], batch.turn_reward[inside], minlength=len(batch.traj_group)
  )
  bad = np.flatnonzero((returns < 0) & (batch.traj_group >= 0))
  if bad.size:
    raise ValueError(f"trajectory {bad[0]} has return {returns[bad[0]]:g}, expected at least 0")


def _check_labels(batch: TrajectoryBatch) -> None:
  sizes = {"traj": len(batch.traj_group), "turn": len(batch.turn_traj), "sample": batch.tokens.size}
  for name, size in sizes.items():
    label = getattr(batch, name)
    bad = np.argwhere((label < -1) | (label >= size))
    if bad.size:
      b, t = bad[0]
      raise ValueError(
        f"{name} at row {b}, position {t} is {label[b, t]}, expected -1 to {size - 1}"
      )
  odd = (batch.turn_traj >= 0) & ~(np.abs(batch.turn_reward) <= MOST_REWARD)
  if odd.any():
    k = np.flatnonzero(odd)[0]
    raise ValueError(
      f"turn {k} of trajectory {batch.turn_traj[k]} has reward {batch.turn_reward[k]:g}, expected "
      f"at most {MOST_REWARD:g} in size"
    )


def _check_parents(batch: TrajectoryBatch) -> None:
  """A parent is a stream without trajectory or action, whole and earlier in the same row."""
  if batch.parent is None:
    return
  goes_on = (batch.sample[:, 1:] == batch.sample[:, :-1]) & (batch.sample[:, 1:] >= 0)
  for b, t in np.argwhere(goes_on & (batch.parent[:, 1:] != batch.parent[:, :-1]))[:1]:
    _refuse_parent(batch, b, t + 1, "changes its parent")
  starts = np.pad(np.logical_not(goes_on), ((0, 0), (1, 0)), constant_values=True)
  for b, t in np.argwhere(starts & (batch.parent != batch.sample) & (batch.sample >= 0)):
    parent = np.flatnonzero(batch.sample[b, :t] == batch.parent[b, t])
    if not parent.size:
      _refuse_parent(batch, b, t, "lies nowhere before it")
    if (batch.traj[b, parent] >= 0).any():
      _refuse_parent(batch, b, t, "belongs to a trajectory")
    ends, begins = batch.position[b, parent[-1]], batch.position[b, t]
    if begins != ends + 1:
      _refuse_parent(batch, b, t, f"ends at position {ends}, the sample begins at {begins}")


def _refuse_parent(batch: TrajectoryBatch, b: int, t: int, problem: str) -> None:
  assert batch.parent is not None
  raise ValueError(
    f"parent {batch.parent[b, t]} of sample {batch.sample[b, t]} at row {b}, {t}: {problem}"
  )


def _check_actions(batch: TrajectoryBatch) -> None:
  action = batch.action
  for name in ("sample", "traj", "turn"):
    bad = np.argwhere(action & (getattr(batch, name) < 0))
    if bad.size:
      b, t = bad[0]
      raise ValueError(f"action on padding: row {b}, position {t} has {name} -1")
  bad = np.argwhere(action & ~(np.isfinite(batch.behavior_logp) & (batch.behavior_logp <= 0)))
  if bad.size:
    b, t = bad[0]
    raise ValueError(
      f"behavior log-prob at row {b}, position {t} is {batch.behavior_logp[b, t]}, expected "
      "finite and at most 0"
    )


def _check_turns(batch: TrajectoryBatch) -> None:
  rows, columns = np.nonzero(batch.action)
  turn, traj = batch.turn[rows, columns], batch.traj[rows, columns]
  wrong = np.flatnonzero(batch.turn_traj[turn] != traj)
  if wrong.size:
    k = turn[wrong[0]]
    raise ValueError(
      f"turn {k} spans trajectories {batch.turn_traj[k]} and {traj[wrong[0]]}, row {rows[wrong[0]]}"
    )
  order = np.lexsort((batch.position[rows, columns], batch.sample[rows, columns], traj))
  turn, traj = turn[order], traj[order]
  fell = np.flatnonzero((np.diff(turn) < 0) & (np.diff(traj) == 0))
  if fell.size:
    i = fell[0]
    raise ValueError(f"turn {turn[i + 1]} follows turn {turn[i]} in trajectory {traj[i]}")
  silent = np.setdiff1d(np.flatnonzero((batch.turn_traj >= 0) & (batch.turn_reward != 0)), turn)
  if silent.size:
    k = silent[0]
    raise ValueError(
      f"turn {k} of trajectory {batch.turn_traj[k]} has reward {batch.turn_reward[k]:g} and no "
      "action token"
    )


def _check_sentinels(batch: TrajectoryBatch) -> None:
  rows, columns = np.nonzero(batch.traj >= 0)
  traj, sample = batch.traj[rows, columns], batch.sample[rows, columns]
  order = np.lexsort((batch.position[rows, columns], sample, traj))
  traj, action = traj[order], batch.action[rows, columns][order]
  last = np.flatnonzero(np.append(np.diff(traj) != 0, True)) if traj.size else []
  for i in last:
    if batch.traj_truncated[traj[i]] and action[i]:
      raise ValueError(f"trajectory {traj[i]} is truncated and ends without a sentinel position")
