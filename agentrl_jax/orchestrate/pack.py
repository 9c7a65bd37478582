"""Episodes become packed rows: samples laid end to end, labels for every token, lengths in buckets.

All samples of an episode stay within one micro-batch of rows, so every scale is whole wherever a
loss looks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from agentrl_jax.losses.checks import check_batch
from agentrl_jax.rollout.records import Episode, Outcome, Sample
from agentrl_jax.types import TrajectoryBatch


@dataclasses.dataclass(frozen=True)
class Packed:
  """A batch of numpy arrays and the episodes its trajectory ids stand for, in order."""

  batch: TrajectoryBatch
  episodes: tuple[Episode, ...]
  dropped_groups: int  # with fewer than two scored members
  faults: int

  @property
  def fill(self) -> float:
    """Share of positions that hold a token, over rows that hold any."""
    used = self.batch.sample >= 0
    return float(used.sum() / max(1, used.any(1).sum() * used.shape[1]))


def bucket(n: int) -> int:
  """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is >= n: few shapes, at most a third
  wasted.
  """
  power = 1 << max(0, (n - 1).bit_length())
  return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def pack(
  groups: Sequence[Sequence[Episode]],
  *,
  row_length: int,
  micro_rows: int,
  min_members: int = 2,
) -> Packed:
  """Packs scored episodes; faulted ones take no row and enter no statistic.

  Args:
    groups: episodes of the same task together.
    row_length: positions a row, T.
    micro_rows: rows of one micro-batch over all data shards; the number of rows is a multiple of
    it. min_members: groups with fewer scored members are dropped (a group baseline needs 2).

  Returns:
    Packed, whose batch has B, R and U rounded up to buckets.

  Raises:
    ValueError: naming the episode, if a sample does not fit a row or no episode is left.
  """
  kept, dropped, faults = [], 0, 0
  for members in groups:
    scored = [e for e in members if e.outcome is not Outcome.FAULT and e.action_tokens]
    faults += sum(e.outcome is Outcome.FAULT for e in members)
    dropped += len(scored) < min_members
    kept += [scored] if len(scored) >= min_members else []
  episodes = tuple(episode for members in kept for episode in members)
  if not episodes:
    raise ValueError(f"nothing to train on: {len(groups)} groups, {faults} faulted episodes")
  places = _place(episodes, row_length, micro_rows)
  micro_batches = bucket(1 + max(row for rows in places for row, _ in rows) // micro_rows)
  batch = _empty(
    micro_batches * micro_rows,
    row_length,
    trajectories=bucket(len(episodes)),
    turns=bucket(sum(len(e.turn_rewards) for e in episodes)),
  )
  turn, sample = 0, 0
  for r, (episode, where) in enumerate(zip(episodes, places, strict=True)):
    for piece, (row, start) in zip(episode.samples, where, strict=True):
      _write(batch, piece, row, start, r, turn, sample)
      sample += 1
    _write_sentinel(batch, episode, where)
    turns = len(episode.turn_rewards)
    batch.turn_reward[turn : turn + turns] = episode.turn_rewards
    batch.turn_traj[turn : turn + turns] = r
    batch.traj_truncated[r] = episode.truncated
    turn += turns
  batch.traj_group[: len(episodes)] = [g for g, members in enumerate(kept) for _ in members]
  check_batch(batch)
  return Packed(batch, episodes, dropped, faults)


def unpack(values: np.ndarray, packed: Packed) -> list[np.ndarray]:
  """Each episode's action tokens' numbers, in token order, from a [B T] array."""
  action, traj = packed.batch.action, packed.batch.traj
  order = np.lexsort((packed.batch.position[action], packed.batch.sample[action], traj[action]))
  flat, owner = np.asarray(values)[action][order], traj[action][order]
  return [flat[owner == r] for r in range(len(packed.episodes))]


def _size(sample: Sample, episode: Episode) -> int:
  return len(sample) + (episode.truncated and sample is episode.samples[-1])


def _place(
  episodes: Sequence[Episode], row_length: int, micro_rows: int
) -> list[list[tuple[int, int]]]:
  """(row, start) of every sample: longest episodes first, each into the first micro-batch it
  fits.
  """
  free: list[np.ndarray] = []  # per micro-batch, positions left in each row
  places: list[list[tuple[int, int]]] = [[] for _ in episodes]
  sizes = [[_size(sample, episode) for sample in episode.samples] for episode in episodes]
  for i in sorted(range(len(episodes)), key=lambda i: -sum(sizes[i])):
    if max(sizes[i]) > row_length or sum(sizes[i]) > row_length * micro_rows:
      raise ValueError(
        f"episode {episodes[i].trajectory_id} has samples of {sizes[i]} tokens; "
        f"a micro-batch holds {micro_rows} rows of {row_length}"
      )
    for m in range(len(free) + 1):
      if m == len(free):
        free.append(np.full(micro_rows, row_length))
      found = _fit(sizes[i], free[m])
      if found is not None:
        places[i] = [(m * micro_rows + row, row_length - left) for row, left in found]
        break
    else:  # a fresh micro-batch can fail only by fragmentation of several samples
      raise ValueError(
        f"episode {episodes[i].trajectory_id} has samples of {sizes[i]} tokens, which no "
        f"arrangement fits in {micro_rows} rows of {row_length}"
      )
  return places


def _fit(sizes: Sequence[int], free: np.ndarray) -> list[tuple[int, int]] | None:
  """(row, positions left before writing) per sample, taken from `free`; None, untouched, if
  none.
  """
  left, found = free.copy(), []
  for size in sizes:
    rows = np.flatnonzero(left >= size)
    if not rows.size:
      return None
    found.append((int(rows[0]), int(left[rows[0]])))
    left[rows[0]] -= size
  free[:] = left
  return found


def _empty(rows: int, length: int, trajectories: int, turns: int) -> Any:
  """A TrajectoryBatch of numpy arrays that holds nothing yet, to be filled in place."""

  def label(*shape: int) -> np.ndarray:
    return np.full(shape, -1, np.int32)

  arrays: dict[str, np.ndarray] = dict(
    tokens=np.zeros((rows, length), np.int32),
    position=np.zeros((rows, length), np.int32),
    sample=label(rows, length),
    traj=label(rows, length),
    turn=label(rows, length),
    action=np.zeros((rows, length), bool),
    behavior_logp=np.zeros((rows, length), np.float32),
    behavior_version=label(rows, length),
    turn_reward=np.zeros(turns, np.float32),
    turn_traj=label(turns),
    traj_group=label(trajectories),
    traj_truncated=np.zeros(trajectories, bool),
  )
  return TrajectoryBatch(**cast(Any, arrays))


def _write(
  batch: Any, piece: Sample, row: int, start: int, traj: int, turn: int, sample: int
) -> None:
  here = np.s_[row, start : start + len(piece)]
  turns = piece.column("turn")
  batch.tokens[here] = piece.ids
  batch.position[here] = np.arange(len(piece))
  batch.sample[here] = sample
  batch.traj[here] = traj
  batch.turn[here] = np.where(turns >= 0, turns + turn, -1)
  batch.action[here] = piece.column("action")
  batch.behavior_logp[here] = piece.column("logp")
  batch.behavior_version[here] = piece.column("version")


def _write_sentinel(batch: Any, episode: Episode, where: list[tuple[int, int]]) -> None:
  """One non-action position after a truncated trajectory: where its bootstrap value is read."""
  if not episode.truncated:
    return
  row, start = where[-1]
  last = start + len(episode.samples[-1])
  batch.tokens[row, last] = batch.tokens[row, last - 1]
  batch.position[row, last] = batch.position[row, last - 1] + 1
  batch.sample[row, last] = batch.sample[row, last - 1]
  batch.traj[row, last] = batch.traj[row, last - 1]
