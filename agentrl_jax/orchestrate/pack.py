"""Episodes become packed rows: samples laid end to end, labels for every token, lengths in buckets.

All samples of an episode stay within one micro-batch of rows, so every scale is whole wherever a
loss looks. What all samples of a row begin with (the prompt of a group, the examples of a task) can
lie there once, as a stream that they continue: the model reads it once instead of once a sample.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

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
  share_prompts: bool = False,
  least: tuple[int, int] = (1, 1),
) -> Packed:
  """Packs scored episodes; faulted ones take no row and enter no statistic.

  Args:
    groups: episodes of the same task together.
    row_length: positions a row, T.
    micro_rows: rows of one micro-batch over all data shards; the number of rows is a multiple of
      it.
    min_members: groups with fewer scored members are dropped (a group baseline needs 2).
    share_prompts: lay what all samples of a row begin with there once, see
      `TrajectoryBatch.parent`.
    least: rows and turns that the batch has at least, padding included: room for longer episodes
      keeps the shape, and with it the compiled programs; rows without a token are not computed.

  Returns:
    Packed, whose batch has B, R and U rounded up to buckets.

  Raises:
    ValueError: naming the episode, if a sample does not fit a row or no episode is left.
  """
  kept: list[list[Episode]] = []
  dropped, faults = 0, 0
  for members in groups:
    scored = [e for e in members if e.outcome is not Outcome.FAULT and e.action_tokens]
    faults += sum(e.outcome is Outcome.FAULT for e in members)
    dropped += len(scored) < min_members
    kept += [scored] if len(scored) >= min_members else []
  episodes = tuple(episode for members in kept for episode in members)
  if not episodes:
    raise ValueError(
      f"nothing to train on: {len(groups)} groups, {dropped} of them with fewer than {min_members} "
      f"scored members, {faults} faulted episodes"
    )
  pieces = _pieces(kept, share_prompts)
  samples = sum(len(e.samples) for e in episodes)
  rows = _place(pieces, row_length, micro_rows, share_prompts)
  blocks = max(len(rows) // micro_rows, -(-least[0] // micro_rows))
  batch = _empty(
    bucket(blocks) * micro_rows,
    row_length,
    trajectories=bucket(len(episodes)),
    turns=bucket(max(least[1], sum(len(e.turn_rewards) for e in episodes))),
  )
  first_turn = np.cumsum([0] + [len(e.turn_rewards) for e in episodes])
  for r, episode in enumerate(episodes):
    turns = np.s_[first_turn[r] : first_turn[r + 1]]
    batch.turn_reward[turns] = episode.turn_rewards
    batch.turn_traj[turns] = r
    batch.traj_truncated[r] = episode.truncated
  for b, row in enumerate(rows):
    shared, parent = row.shared, samples + b
    if shared:
      _write_shared(batch, row.lead, b, parent)
    start = shared
    for sample, episode, r, own, _ in row.pieces:
      _write(batch, sample, b, start, shared, r, first_turn[r], own, parent if shared else own)
      start += len(sample) - shared
      if _has_sentinel(sample, episode):
        _write_sentinel(batch, b, start)
        start += 1
  batch.traj_group[: len(episodes)] = [g for g, members in enumerate(kept) for _ in members]
  if not share_prompts:
    batch = batch.replace(parent=None)
  check_batch(batch)
  return Packed(batch, episodes, dropped, faults)


def unpack(values: np.ndarray, packed: Packed) -> list[np.ndarray]:
  """Each episode's action tokens' numbers, in token order, from a [B T] array."""
  action, traj = packed.batch.action, packed.batch.traj
  order = np.lexsort((packed.batch.position[action], packed.batch.sample[action], traj[action]))
  flat, owner = np.asarray(values)[action][order], traj[action][order]
  return [flat[owner == r] for r in range(len(packed.episodes))]


def _has_sentinel(sample: Sample, episode: Episode) -> bool:
  return episode.truncated and sample is episode.samples[-1]


class _Piece(NamedTuple):
  sample: Sample
  episode: Episode
  trajectory: int  # the episode's number in the batch
  own: int  # the sample's number in the batch
  lead: np.ndarray  # what it may share with others of its row

  @property
  def size(self) -> int:
    return len(self.sample) + _has_sentinel(self.sample, self.episode)


@dataclasses.dataclass(frozen=True)
class _Row:
  """The samples of one row, in order, and what they all begin with."""

  pieces: tuple[_Piece, ...] = ()
  total: int = 0  # positions without sharing
  lead: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

  def with_piece(self, piece: _Piece) -> "_Row":
    lead = _common(self.lead, piece.lead) if self.pieces else piece.lead
    return _Row((*self.pieces, piece), self.total + piece.size, lead)

  @property
  def shared(self) -> int:
    """How many ids lie there once; one sample alone shares with nobody."""
    return len(self.lead) if len(self.pieces) > 1 else 0

  @property
  def used(self) -> int:
    return self.total - self.shared * (len(self.pieces) - 1)


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The longest beginning of both."""
  least = min(len(a), len(b))
  differ = np.flatnonzero(a[:least] != b[:least])
  return a[: differ[0] if differ.size else least]


def _place(
  cut: Sequence[Sequence[Sequence[_Piece]]], row_length: int, micro_rows: int, share: bool
) -> list[_Row]:
  """Rows of whole micro-batches for the pieces of each episode of each group. Longest first, each
  episode where its samples add least.

  Prompts are shared best by neighbours, so with `share` a group's episodes follow one another.
  """

  def longest(pieces: Sequence[_Piece]) -> int:
    return -sum(piece.size for piece in pieces)

  if share:
    by_group = sorted(cut, key=lambda members: min(map(longest, members)))
    order = [pieces for members in by_group for pieces in sorted(members, key=longest)]
  else:
    order = sorted((pieces for members in cut for pieces in members), key=longest)
  blocks: list[list[_Row]] = []
  for pieces in order:
    sizes = [piece.size for piece in pieces]
    named = f"episode {pieces[0].episode.trajectory_id} has samples of {sizes} tokens"
    if max(sizes) > row_length or sum(sizes) > row_length * micro_rows:
      raise ValueError(f"{named}; a micro-batch holds {micro_rows} rows of {row_length}")
    tried = ((_fit(pieces, block, row_length), m) for m, block in enumerate(blocks))
    found = min(((*fit, m) for fit, m in tried if fit), key=lambda x: (x[0], x[2]), default=None)
    if found:
      _, blocks[found[2]], _ = found
      continue
    fresh = _fit(pieces, [_Row()] * micro_rows, row_length)
    if fresh is None:  # only by fragmentation of several samples
      raise ValueError(f"{named}, which no arrangement fits in {micro_rows} rows of {row_length}")
    blocks.append(fresh[1])
  return [row for block in blocks for row in block]


def _pieces(kept: Sequence[Sequence[Episode]], share: bool) -> list[list[list[_Piece]]]:
  """The samples of each episode of each group, numbered: an episode may be there twice.

  May be shared: ids before the first action, less one, which that action is read from.
  """

  def lead(sample: Sample) -> int:
    return max(0, int(np.argmax(sample.column("action"))) - 1) if share else 0

  trajectory, own = itertools.count(), itertools.count()
  return [
    [
      [_Piece(s, e, r, next(own), s.ids[: lead(s)]) for s in e.samples]
      for e, r in zip(members, trajectory, strict=False)
    ]
    for members in kept
  ]


def _fit(
  pieces: Sequence[_Piece], block: Sequence[_Row], row_length: int
) -> tuple[int, list[_Row]] | None:
  """(positions added, the block with the pieces in it), each where it adds least; None if it does
  not fit.
  """
  rows, added = list(block), 0
  for piece in pieces:
    options = [(row.with_piece(piece), i) for i, row in enumerate(rows)]
    growth = [(new.used - rows[i].used, i) for new, i in options if new.used <= row_length]
    if not growth:
      return None
    least, i = min(growth)
    rows[i], added = options[i][0], added + least
  return added, rows


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
    parent=label(rows, length),
  )
  return TrajectoryBatch(**cast(Any, arrays))


def _write_shared(batch: Any, ids: np.ndarray, row: int, sample: int) -> None:
  here = np.s_[row, : len(ids)]
  batch.tokens[here] = ids
  batch.position[here] = np.arange(len(ids))
  batch.sample[here] = batch.parent[here] = sample


def _write(
  batch: Any,
  piece: Sample,
  row: int,
  start: int,
  shared: int,
  traj: int,
  turn: int,
  sample: int,
  parent: int,
) -> None:
  """Lays a sample from its id number `shared` on at `start`."""
  here, rest = np.s_[row, start : start + len(piece) - shared], np.s_[shared:]
  turns = piece.column("turn")[rest]
  batch.tokens[here] = piece.ids[rest]
  batch.position[here] = np.arange(len(piece))[rest]
  batch.sample[here], batch.parent[here] = sample, parent
  batch.traj[here] = traj
  batch.turn[here] = np.where(turns >= 0, turns + turn, -1)
  batch.action[here] = piece.column("action")[rest]
  batch.behavior_logp[here] = piece.column("logp")[rest]
  batch.behavior_version[here] = piece.column("version")[rest]


def _write_sentinel(batch: Any, row: int, column: int) -> None:
  """One non-action position after a truncated trajectory: where its bootstrap value is read."""
  here, last = (row, column), (row, column - 1)
  for name in ("tokens", "sample", "parent", "traj"):
    getattr(batch, name)[here] = getattr(batch, name)[last]
  batch.position[here] = batch.position[last] + 1
