"""A push of weights that lie on several processes: each writes its own shards, the first leads.

Every process makes the same plan from the layouts, which all of them know, and writes the copies
whose sender is one of its devices into staging that the leader made. Nothing is told to a server
before all have answered that their part is written. They speak through the key-value store of
`jax.distributed`, on the host: a process that is dead or slow is named within the deadline, where a
collective would wait for it. Only words go that way, and the block maxima of FP8; never weights.
"""

import concurrent.futures
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed  # the store has no public name; Orbax reads it here, too

from agentrl_jax.models.model import Model
from agentrl_jax.ops.quantize import Quantization
from agentrl_jax.transfer.engine_layout import push_plan
from agentrl_jax.transfer.plan import Plan
from agentrl_jax.transfer.report import PushError
from agentrl_jax.transfer.stage import Staged, Sums, compare_replicas, fill, source_layout, stage
from agentrl_jax.transfer.transports import SharesStaging
from agentrl_jax.transfer.transports.disk import open_files

_WAIT_SECONDS = 6 * 3600.0  # for the first word of a round: longer than any rollout
_FAILED, _WELL = b"!", b"="


class SourceError(PushError):
  """A process that holds some of the shards failed, or gave no word in time."""


class Task(NamedTuple):
  """What makes the plan and the staging of a round on every process."""

  key: str
  digest: str  # of the plan
  dtype: str
  bucket_bytes: int
  align: int
  quantization: Quantization | None
  staging: str  # the directory that holds it
  seconds: float  # that any process waits for another


class Sources:
  """The processes of `jax.distributed` as the senders of pushes.

  Args:
    name: of this conversation, different from every other's of the run.
    seconds: that `share` waits for each process.
  """

  def __init__(self, name: str, *, seconds: float = 120.0):
    self.name, self.seconds = name, seconds
    self.process, self.count = jax.process_index(), jax.process_count()
    self._round = self._said = 0
    self._heard: dict[int, int] = {}  # words of this round, by process

  def share(self, transport: Any) -> bool:
    """Whether rounds of the first process's transport can be staged by all: its staging is a
    directory that every process sees. All of them call this; `transport` is read on the first.

    Raises:
      SourceError: a process gave no word.
    """
    if self.count == 1:
      return False
    self._open_round()
    if self.process:
      path = self._word(0, _WAIT_SECONDS).decode()
      self._tell(json.dumps(bool(path) and Path(path).exists()).encode())
      return bool(json.loads(self._word(0)))
    probe = transport.probe() if isinstance(transport, SharesStaging) else None
    self._tell(str(probe or "").encode())
    try:
      able = all([json.loads(words) for words in self._answers()])
    finally:
      if probe is not None:
        probe.unlink()
    self._tell(json.dumps(able and probe is not None).encode())
    return able and probe is not None

  def stage(
    self, task: Task, plan: Plan, weights: Any, buffers: Mapping[tuple[int, int], np.ndarray]
  ) -> Staged:
    """The first process's part of a round, and the others'. All buffers are whole afterwards.

    Raises:
      SourceError: another process failed, or gave no word in time; it is named.
      ValueError: as of `stage`.
    """
    self._open_round(task.seconds)
    self._tell(json.dumps(task._asdict()).encode())
    try:
      staged = stage(plan, weights, buffers, task.key, _Leading(self))
      _store().key_value_delete(f"{self.name}/{self._round}/")  # all have answered the last word
      return staged
    except BaseException as error:
      self._say(_FAILED + str(error).encode())  # they may be waiting for a word of ours
      raise

  def release(self) -> None:
    """Lets the other processes go on: `stand_by` returns there."""
    if self.count > 1:
      self._open_round()
      self._tell(b"null")

  def stand_by(self, model: Model, weights: Any) -> None:
    """What all but the first process do while it pushes: their part of each round, until it says
    that there are no more. A part that fails is reported to the first, whose round it ends.

    Raises:
      SourceError: no word came from the first process for hours.
    """
    while True:
      self._open_round()
      words = json.loads(self._word(0, _WAIT_SECONDS))
      if words is None:
        return
      try:
        self._take_part(_task(words), model, weights)
      except (SourceError, ValueError, OSError, MemoryError) as error:
        self._say(_FAILED + str(error).encode())

  def _take_part(self, task: Task, model: Model, weights: Any) -> None:
    self.seconds = task.seconds
    plan = push_plan(
      model,
      source_layout(weights),
      task.dtype,
      quantization=task.quantization,
      bucket_bytes=task.bucket_bytes,
      align=task.align,
    )
    if plan.digest != task.digest:
      raise ValueError(f"its plan is {plan.digest}, that of process 0 {task.digest}")
    buffers = open_files(Path(task.staging), plan)
    with concurrent.futures.ThreadPoolExecutor() as pool:
      fill(plan, weights, buffers, pool, together=_Following(self))

  def _open_round(self, seconds: float | None = None) -> None:
    self._round += 1
    self._said, self._heard = 0, {}
    self.seconds = seconds or self.seconds

  def _tell(self, words: bytes) -> None:
    self._say(_WELL + words)

  def _say(self, words: bytes) -> None:
    key = f"{self.name}/{self._round}/{self.process}/{self._said}"
    self._said += 1
    _store().key_value_set_bytes(key, words)

  def _answers(self) -> list[bytes]:
    """The next word of each of the others."""
    return [self._word(process) for process in range(1, self.count)]

  def _word(self, process: int, seconds: float | None = None) -> bytes:
    """A process's next word in this round. Raises SourceError where there is none, or a failure."""
    seconds = seconds or self.seconds
    number = self._heard.get(process, 0)
    self._heard[process] = number + 1
    key = f"{self.name}/{self._round}/{process}/{number}"
    try:
      words = _store().blocking_key_value_get_bytes(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise SourceError(f"process {process}: {error}") from error
      message = f"process {process} gave no word within {seconds:g} s: it is dead, or slow"
      raise SourceError(message) from error
    if words[:1] == _FAILED:
      raise SourceError(f"process {process}: {words[1:].decode()}")
    return words[1:]


class _Leading:
  """The first process's end, as `stage` knows it."""

  def __init__(self, sources: Sources):
    self.sources = sources

  def largest(self, amax: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    flat = _flat(amax)
    for words in self.sources._answers():
      flat = np.maximum(flat, np.frombuffer(words, np.float32))
    self.sources._tell(flat.tobytes())
    return _unflat(flat, amax)

  def written(self, sums: Sums) -> None:
    everyone = {key: dict(copies) for key, copies in sums.items()}
    for words in self.sources._answers():
      for key, copies in json.loads(words).items():
        everyone.setdefault(key, {}).update({int(d): bits for d, bits in copies.items()})
    compare_replicas(everyone)


class _Following:
  """The end of one of the others."""

  def __init__(self, sources: Sources):
    self.sources = sources

  def largest(self, amax: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    self.sources._tell(_flat(amax).tobytes())
    return _unflat(np.frombuffer(self.sources._word(0), np.float32), amax)

  def written(self, sums: Sums) -> None:
    self.sources._tell(json.dumps(sums).encode())


def _flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


def _unflat(flat: np.ndarray, like: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
  names = sorted(like)
  ends = np.cumsum([like[name].size for name in names])
  parts = np.split(flat, ends[:-1])
  return {n: part.reshape(like[n].shape) for n, part in zip(names, parts, strict=True)}


def _task(words: Mapping[str, Any]) -> Task:
  how = words["quantization"]  # tuples, which JSON gives back as lists
  if how is not None:
    dtype, block, scale, top = how
    how = Quantization(dtype, block and tuple(block), scale, top)
  return Task(**{**words, "quantization": how})


def _store() -> Any:
  """The key-value store of `jax.distributed`."""
  client = distributed.global_state.client
  if client is None:
    raise SourceError("jax.distributed is not initialised, several processes push by its store")
  return client
