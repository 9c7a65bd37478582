"""Ragged random trajectories as plain Python, and every way to lay them out in packed rows.

References loop over `Trajectory` objects; the library sees what `pack` makes of them. The two meet
only in `Layout.column`, which puts per-token lists where `pack` put the tokens.
"""

import dataclasses
import itertools

import numpy as np

from agentrl_jax.types import Aux, PolicyEval, TrajectoryBatch

VOCAB = 12
BINS = 3  # of a categorical critic


@dataclasses.dataclass
class Stream:
  """One sample: per-token lists of equal length; `turn` counts within the trajectory, -1 off it."""

  tokens: list[int]
  turn: list[int]
  behavior: list[float]
  old: list[float]
  ref: list[float]
  logp: list[float]
  entropy: list[float]
  value: list[float]
  old_value: list[float]

  def __len__(self):
    return len(self.tokens)


@dataclasses.dataclass
class Trajectory:
  group: int  # -1: faulted
  truncated: bool
  rewards: list[float]  # one a turn
  streams: list[Stream]

  def places(self) -> list[tuple[int, int]]:
    """(stream, index) of each action token, in time order."""
    return [(s, i) for s, one in enumerate(self.streams) for i, k in enumerate(one.turn) if k >= 0]

  def actions(self, name: str) -> list[float]:
    """A column's values at the action tokens, in time order."""
    return [getattr(self.streams[s], name)[i] for s, i in self.places()]

  def bootstrap(self) -> float:
    """The value at the sentinel (the last entry of the last stream), 0 if terminated."""
    return self.streams[-1].old_value[-1] if self.truncated else 0.0


def stream(rng: np.random.Generator, pieces: list[tuple[int, int]]) -> Stream:
  """A stream of (turn or -1, tokens) pieces, with log-probs of nearby policies."""
  turn = [k for k, n in pieces for _ in range(n)]
  n = len(turn)
  logp = -rng.exponential(1.0, n) - 0.01
  near = lambda sd: np.minimum(logp + rng.normal(0, sd, n), -1e-3)  # noqa: E731
  columns = dict(
    behavior=near(0.3), old=near(0.25), ref=near(0.5), logp=logp, entropy=rng.uniform(0.1, 2, n)
  )
  columns |= dict(value=rng.normal(0, 1, n), old_value=rng.normal(0, 1, n))
  f32 = {name: x.astype(np.float32).tolist() for name, x in columns.items()}
  # Few distinct observations, so that some turns answer the same one.
  tokens = [int(rng.integers(1, VOCAB if k >= 0 else 3)) for k in turn]
  return Stream(tokens=tokens, turn=turn, **f32)


def trajectory(
  rng: np.random.Generator,
  group: int,
  turns: list[int],
  *,
  truncated: bool = False,
  fork_at: int | None = None,
  rewards: list[float] | None = None,
) -> Trajectory:
  """Prompt, then turns of the given lengths with 0-3 observation tokens after each (0 merges none).

  `fork_at` starts a second stream before that turn. A truncated one ends with its sentinel.
  """
  pieces, streams = [(-1, int(rng.integers(1, 4)))], []
  for k, n in enumerate(turns):
    if k == fork_at:
      streams.append(stream(rng, pieces))
      pieces = [(-1, int(rng.integers(2, 5)))]
    pieces += [(k, n), (-1, int(rng.integers(0, 4)))]
  streams.append(stream(rng, pieces + ([(-1, 1)] if truncated else [])))
  if rewards is None:
    rewards = [float(rng.choice([0.0, 0.25])) for _ in turns]
    if rewards:
      rewards[-1] = float(rng.choice([0.0, 0.5, 1.0]))
  return Trajectory(group, truncated, rewards, streams)


def by_hand(
  turn: list[int], rewards: list[float], *, group: int = 0, truncated: bool = False, **columns
) -> Trajectory:
  """One stream with the given per-token columns; log-probs are -1 and values 0 where not given."""
  n = len(turn)
  filled = {name: [-1.0] * n for name in ("behavior", "old", "ref", "logp")}
  filled |= {name: [0.0] * n for name in ("entropy", "value", "old_value")}
  piece = Stream(tokens=[1] * n, turn=turn, **{**filled, **columns})
  if any(len(getattr(piece, f.name)) != n for f in dataclasses.fields(Stream)):
    raise ValueError(f"columns differ in length from {n} tokens")
  return Trajectory(group, truncated, rewards, [piece])


def lay_out(trajectories: list[Trajectory]) -> "Made":
  """One row per stream, no more room than needed."""
  streams = [piece for one in trajectories for piece in one.streams]
  return pack(
    trajectories,
    one_a_row(trajectories, rows=len(streams), length=max(len(piece) for piece in streams)),
  )


def ragged(seed: int, groups: int = 4) -> list[Trajectory]:
  """Groups of 1 to 5: one-token and adjacent turns, forks, truncations, faults, an empty one.

  Group 0 is a singleton; group 1 has equal rewards; the last group holds an empty trajectory.
  """
  rng = np.random.default_rng(seed)
  made = []
  for g in range(groups):
    for m in range(1 if g == 0 else int(rng.integers(3, 6))):
      turns = [int(rng.choice([1, 1, 2, 3, 5])) for _ in range(int(rng.integers(1, 5)))]
      truncated = bool(rng.random() < 0.4)
      fork = int(rng.integers(1, len(turns))) if len(turns) > 1 and rng.random() < 0.3 else None
      rewards = [0.0] * (len(turns) - 1) + [0.7] if g == 1 else None
      one = trajectory(rng, g, turns, truncated=truncated, fork_at=fork, rewards=rewards)
      if g > 1 and m == 2:
        one.group = -1
      made.append(one)
  made.append(trajectory(rng, groups - 1, []))
  return made


@dataclasses.dataclass
class Layout:
  """Where `pack` put each stream: (trajectory, stream) -> (row, start)."""

  places: dict[tuple[int, int], tuple[int, int]]
  shape: tuple[int, int]

  def column(self, per_action: list[list[float]], trajectories: list[Trajectory]) -> np.ndarray:
    """[B T] from each trajectory's numbers at its action tokens in time order; 0 elsewhere."""
    out = np.zeros(self.shape, np.float32)
    for r, (one, numbers) in enumerate(zip(trajectories, per_action, strict=True)):
      for (s, i), x in zip(one.places(), numbers, strict=True):
        row, start = self.places[r, s]
        out[row, start + i] = x
    return out

  def actions(self, array: np.ndarray, index: int, one: Trajectory) -> list:
    """The numbers of trajectory `index` at its action tokens in time order."""
    where = [(self.places[index, s], i) for s, i in one.places()]
    return [array[row, start + i] for (row, start), i in where]


def place(trajectories: list[Trajectory], *, rows: int, length: int, order=None, pad: int = 0):
  """First-fit of whole trajectories in `order`, `pad` empty positions before each stream."""
  used, places = [0] * rows, {}
  for r in order if order is not None else range(len(trajectories)):
    for s, one in enumerate(trajectories[r].streams):
      row = next((b for b in range(rows) if used[b] + pad + len(one) <= length), None)
      if row is None:
        raise ValueError(f"trajectory {r} does not fit {rows} rows of {length}")
      places[r, s] = (row, used[row] + pad)
      used[row] += pad + len(one)
  return Layout(places, (rows, length))


def one_a_row(trajectories: list[Trajectory], *, rows: int, length: int, reverse=False) -> Layout:
  """A row for every stream, at its end if `reverse`d (left padding), in reverse order of rows."""
  keys = [(r, s) for r, one in enumerate(trajectories) for s in range(len(one.streams))]
  if len(keys) > rows:
    raise ValueError(f"{len(keys)} streams need more than {rows} rows")
  size = lambda key: len(trajectories[key[0]].streams[key[1]])  # noqa: E731
  places = {
    key: (rows - 1 - b, length - size(key)) if reverse else (b, 0) for b, key in enumerate(keys)
  }
  return Layout(places, (rows, length))


@dataclasses.dataclass
class Made:
  """What the library is given."""

  batch: TrajectoryBatch
  aux: Aux
  policy: PolicyEval
  layout: Layout


def pack(trajectories, layout: Layout, *, order=None, gap: int = 1, poison=None) -> Made:
  """Arrays for `layout`.

  Args:
    trajectories: what to lay out.
    layout: where; a stream that it lacks is left out.
    order: which trajectories, numbered in which order, and with them turns, samples and groups.
    gap: distance between ids of consecutive turns, samples, groups, ...: 1, or 2 with unused ids.
    poison: a number for every float slot that no formula may read; 0 if None.
  """
  bad = 0.0 if poison is None else poison
  count = len(trajectories)
  size = 2 * count + 2  # room for gaps: arrays have one shape whatever the numbering
  order = list(range(count)) if order is None else list(order)
  turns = 2 * sum(len(t.rewards) for t in trajectories) + 3
  shape = layout.shape
  label = lambda *dims: np.full(dims, -1, np.int32)  # noqa: E731
  number = lambda *dims: np.full(dims, bad, np.float32)  # noqa: E731
  batch = TrajectoryBatch(
    tokens=np.zeros(shape, np.int32),
    position=np.zeros(shape, np.int32),
    sample=label(*shape),
    traj=label(*shape),
    turn=label(*shape),
    action=np.zeros(shape, bool),
    behavior_logp=number(*shape),
    behavior_version=label(*shape),
    turn_reward=number(turns),
    turn_traj=label(turns),
    traj_group=label(size),
    traj_truncated=np.zeros(size, bool),
  )
  aux = Aux(old_logp=number(*shape), ref_logp=number(*shape), value=number(*shape))
  policy = PolicyEval(
    logp=number(*shape),
    entropy=number(*shape),
    value=number(*shape),
    value_logits=number(*shape, BINS),
  )
  next_turn, next_sample = 0, 0
  for new, r in enumerate(order):
    one, new = trajectories[r], new * gap
    ids = [next_turn + k * gap for k in range(len(one.rewards))]
    next_turn += len(ids) * gap
    batch.turn_reward[ids] = one.rewards
    batch.turn_traj[ids] = new
    batch.traj_group[new] = one.group * gap if one.group >= 0 else -1
    batch.traj_truncated[new] = one.truncated
    for s, piece in enumerate(one.streams):
      if (r, s) not in layout.places:
        continue
      row, start = layout.places[r, s]
      here = np.s_[row, start : start + len(piece)]
      local = np.array(piece.turn)
      action = local >= 0
      batch.tokens[here] = piece.tokens
      batch.position[here] = np.arange(len(piece))
      batch.sample[here] = next_sample
      next_sample += gap
      batch.traj[here] = new
      batch.turn[here] = [ids[k] if k >= 0 else -1 for k in piece.turn]
      batch.action[here] = action
      batch.behavior_version[here] = np.where(action, 0, -1)
      for array, name in [
        (batch.behavior_logp, "behavior"), (aux.old_logp, "old"), (aux.ref_logp, "ref"),
        (policy.logp, "logp"), (policy.entropy, "entropy"), (policy.value, "value"),
        (aux.value, "old_value"),
      ]:  # fmt: skip
        array[here] = np.where(action, np.array(getattr(piece, name), np.float32), bad)
      logits = np.array([piece.value, piece.logp, piece.entropy], np.float32).T
      policy.value_logits[here] = np.where(action[:, None], logits, bad)
      if one.truncated and s == len(one.streams) - 1:
        aux.value[row, start + len(piece) - 1] = piece.old_value[-1]
  return Made(batch, aux, policy, layout)


def split(trajectories: list[Trajectory], parts: int) -> list[list[int]]:
  """Indices of trajectories of each micro-batch, of uneven sizes."""
  cuts = [0, *sorted({len(trajectories) * (i + 1) ** 2 // parts**2 for i in range(parts)})]
  return [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
