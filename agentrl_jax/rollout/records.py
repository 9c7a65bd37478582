"""Host-side records of what was sampled: token ids are truth and every length is checked once,
here.

A `Sample` is one token stream: prompt, then actions interleaved with observations and template
glue. An `Episode` is one run of an environment: usually one sample, several when a context edit
forced a fork. Nothing here re-encodes text, and no other constructor of a sample exists.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Ids = np.ndarray  # int32 [n]


class Kind(enum.StrEnum):
  """Where a segment's tokens came from; only ACTION tokens may carry loss."""

  PROMPT = "prompt"
  ACTION = "action"
  OBSERVATION = "observation"
  GLUE = "glue"


class Outcome(enum.StrEnum):
  """SUCCESS and FAILURE were scored; a FAULT is the machinery's and enters no statistic."""

  SUCCESS = "success"
  FAILURE = "failure"
  FAULT = "fault"


@dataclasses.dataclass(frozen=True)
class Task:
  """Fully determines an environment's initial state."""

  family: str
  split: str
  seed: int
  params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of tokens of one kind. `turn` is the turn's index in its episode (actions), else -1."""

  kind: Kind
  ids: Ids
  turn: int = -1
  logp: np.ndarray | None = (
    None  # float32 [n], natural log at the sampling temperature; actions only
  )
  version: np.ndarray | None = (
    None  # int32 [n], weight version that sampled each token; actions only
  )


@dataclasses.dataclass(frozen=True)
class Sample:
  """One token stream.

  Raises:
    ValueError: naming the sample, turn and position, when lengths differ, an id is outside the
      vocabulary, turns do not increase, an action lacks a finite log-prob <= 1e-6, or another
      segment has one.
  """

  segments: tuple[Segment, ...]
  vocab_size: int
  trajectory_id: str
  sample_index: int = 0
  fork_reason: str | None = None

  def __post_init__(self):
    last_turn, checked = -1, []
    for i, segment in enumerate(self.segments):
      where = f"sample {self.trajectory_id}/{self.sample_index}, segment {i} ({segment.kind})"
      ids = _vector(segment.ids, np.int32, where, "ids")
      bad = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
      if bad.size:
        raise ValueError(f"{where}: id {ids[bad[0]]} at {bad[0]} is outside [0, {self.vocab_size})")
      if segment.kind is not Kind.ACTION:
        if segment.logp is not None or segment.version is not None or segment.turn != -1:
          raise ValueError(f"{where}: log-probs, versions and turns belong to actions only")
        checked.append(dataclasses.replace(segment, ids=ids))
        continue
      where = f"{where}, turn {segment.turn}"
      if segment.turn <= last_turn:
        raise ValueError(f"{where}: turns must increase, the one before is {last_turn}")
      last_turn = segment.turn
      if not ids.size:
        raise ValueError(f"{where}: an action without tokens is no turn at all")
      logp = _vector(segment.logp, np.float32, where, "logp", len(ids))
      version = _vector(segment.version, np.int32, where, "version", len(ids))
      bad = np.flatnonzero(~(np.isfinite(logp) & (logp <= 1e-6)))
      if bad.size:
        raise ValueError(f"{where}: log-prob {logp[bad[0]]} at {bad[0]} is not finite and <= 0")
      logp = np.minimum(logp, 0.0).astype(np.float32)
      checked.append(dataclasses.replace(segment, ids=ids, logp=logp, version=version))
    object.__setattr__(self, "segments", tuple(checked))

  def __len__(self) -> int:
    return sum(len(s.ids) for s in self.segments)

  @property
  def ids(self) -> Ids:
    """All tokens, int32 [n]."""
    return (
      np.concatenate([s.ids for s in self.segments]) if self.segments else np.zeros(0, np.int32)
    )

  def column(self, name: str) -> np.ndarray:
    """Per-token `turn` (int32, -1 elsewhere), `action` (bool), `logp` (float32, 0) or `version`
    (-1).
    """
    parts = [_column(s, name) for s in self.segments]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Fault:
  """What the machinery did wrong: `kind` is a short stable name, counted beside every pass rate."""

  kind: str
  detail: str


@dataclasses.dataclass(frozen=True)
class Episode:
  """One run of one environment, scored or faulted.

  `reward_parts[k]` are the named parts caused by turn k and `turn_rewards[k]` their combined
  scalar; both have one entry a turn. `text` keeps the messages for viewing only.
  `state_hash` is the environment's initial one, None if it was never built.
  """

  task: Task
  trajectory_id: str
  group_id: str
  samples: tuple[Sample, ...]
  reward_parts: tuple[Mapping[str, float], ...]
  turn_rewards: tuple[float, ...]
  outcome: Outcome
  terminated: bool
  truncated: bool
  cut_reason: str | None = None
  fault: Fault | None = None
  text: tuple[Mapping[str, Any], ...] = ()
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)  # numbers worth averaging
  timings: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds
  state_hash: str | None = None

  def __post_init__(self):
    turns = sum(s.kind is Kind.ACTION for sample in self.samples for s in sample.segments)
    if not turns == len(self.reward_parts) == len(self.turn_rewards):
      raise ValueError(
        f"episode {self.trajectory_id}: {turns} turns, {len(self.reward_parts)} reward parts, "
        f"{len(self.turn_rewards)} turn rewards"
      )
    bad = [k for k, reward in enumerate(self.turn_rewards) if not math.isfinite(reward)]
    if bad:
      raise ValueError(
        f"episode {self.trajectory_id}: reward of turn {bad[0]} is {self.turn_rewards[bad[0]]}"
      )
    if (self.outcome is Outcome.FAULT) != (self.fault is not None):
      raise ValueError(
        f"episode {self.trajectory_id}: outcome {self.outcome} with fault {self.fault}"
      )

  @property
  def reward(self) -> float:
    """The episode's return: the sum of its turn rewards."""
    return float(sum(self.turn_rewards))

  @property
  def action_tokens(self) -> int:
    """How many tokens the policy sampled."""
    return int(sum(len(s.ids) for s in self.segments() if s.kind is Kind.ACTION))

  def segments(self) -> Iterator[Segment]:
    """All segments in order, over all samples."""
    for sample in self.samples:
      yield from sample.segments


def to_json(episode: Episode) -> str:
  """One line of JSON that `from_json` turns back into an equal episode (float32 exact)."""

  def plain(value):
    match value:
      case np.ndarray():
        return value.tolist()
      case np.generic():
        return value.item()
      case Mapping():
        return {k: plain(v) for k, v in value.items()}
      case tuple() | list():
        return [plain(v) for v in value]
      case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
      case _:
        return value

  return json.dumps(plain(episode), allow_nan=False)


def from_json(line: str) -> Episode:
  """Inverse of `to_json`. Raises ValueError naming what is missing or of the wrong kind."""
  try:
    data = json.loads(line)
    for name in ("terminated", "truncated"):
      if not isinstance(data[name], bool):
        raise ValueError(f"{name} is {data[name]!r}, expected true or false")
    for name in ("info", "timings"):
      _check_numbers(data.get(name, {}), name)
    for turn, parts in enumerate(data["reward_parts"]):
      _check_numbers(parts, f"reward_parts of turn {turn}")
    samples = tuple(
      Sample(**(s | {"segments": tuple(_segment(x) for x in s["segments"])}))
      for s in data["samples"]
    )
    return Episode(
      **(
        data
        | {
          "task": Task(**data["task"]),
          "samples": samples,
          "reward_parts": tuple(data["reward_parts"]),
          "turn_rewards": tuple(data["turn_rewards"]),
          "outcome": Outcome(data["outcome"]),
          "fault": Fault(**data["fault"]) if data["fault"] else None,
          "text": tuple(data["text"]),
        }
      )
    )
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ValueError(f"not an episode record: {error!r}") from error


def _segment(data: Mapping[str, Any]) -> Segment:
  logp, version = data["logp"], data["version"]
  return Segment(
    kind=Kind(data["kind"]),
    ids=_integers(data["ids"], "id"),
    turn=data["turn"],
    logp=None if logp is None else np.asarray(logp, np.float32),
    version=None if version is None else _integers(version, "version"),
  )


def _integers(values: Sequence[Any], name: str) -> np.ndarray:
  for k, value in enumerate(values):
    if type(value) is not int or not -(2**31) <= value < 2**31:
      raise ValueError(f"{name} {value!r} at {k}, expected an integer of 32 bits")
  return np.asarray(values, np.int32)


def _check_numbers(value: Any, name: str) -> None:
  if not isinstance(value, dict):
    raise ValueError(f"{name} is {value!r}, expected named numbers")
  for key, number in value.items():
    if not isinstance(number, int | float):
      raise ValueError(f"{name} has {key}={number!r}, expected a number")


def _vector(
  value: np.ndarray | Sequence[float] | None,
  dtype: type,
  where: str,
  name: str,
  size: int | None = None,
) -> np.ndarray:
  if value is None:
    raise ValueError(f"{where}: {name} is missing")
  array = np.asarray(value)
  if array.ndim != 1 or (size is not None and len(array) != size):
    raise ValueError(
      f"{where}: {name} has shape {array.shape}, expected ({size if size is not None else 'n'},)"
    )
  if np.issubdtype(dtype, np.integer) and array.size and not np.issubdtype(array.dtype, np.integer):
    raise ValueError(f"{where}: {name} has dtype {array.dtype}, expected integers")
  return array.astype(dtype)


def _column(segment: Segment, name: str) -> np.ndarray:
  n, action = len(segment.ids), segment.kind is Kind.ACTION
  match name:
    case "turn":
      return np.full(n, segment.turn, np.int32)
    case "action":
      return np.full(n, action, bool)
    case "logp":
      return segment.logp if segment.logp is not None else np.zeros(n, np.float32)
    case "version":
      return segment.version if segment.version is not None else np.full(n, -1, np.int32)
  raise ValueError(f"no column {name!r}; there are turn, action, logp, version")
