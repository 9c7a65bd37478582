"""A push of weights that lie on several processes: each sends its own shards, the first leads.

Every process makes the same plan from the layouts, which all of them know, and stages the copies
whose sender is one of its devices: into files that the first one made and all of them map, or, to
be delivered over its own connections, into memory of its own. Nothing is told to a server before
all have answered that their part is there. They speak through the key-value store of
`jax.distributed`, on the host: a process that is dead or slow is named within the deadline, where a
collective would wait for it. Only words go that way, hashes, and the block maxima of FP8; never
weights.
"""

import concurrent.futures
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed  # the store has no public name; Orbax reads it here, too

from agentrl_jax.models.model import Model
from agentrl_jax.ops.quantize import Quantization
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.engine_layout import push_plan
from agentrl_jax.transfer.plan import Plan, in_parts, published_shapes
from agentrl_jax.transfer.report import PushError
from agentrl_jax.transfer.stage import Staged, Sums, compare_replicas, fill, source_layout, stage
from agentrl_jax.transfer.transports import SendsParts, SharesStaging, Transport
from agentrl_jax.transfer.transports.disk import open_files
from agentrl_jax.transfer.transports.tcp import Joining, join, reaches

_WAIT_SECONDS = 6 * 3600.0  # for the first word of a round: longer than any rollout
_FAILED, _WELL = b"!", b"="


class SourceError(PushError):
  """A process that holds some of the shards failed, or gave no word in time."""


# What a part may fail by: JAX's own is, above all, a device without memory for a cast.
STAGE_ERRORS = (SourceError, ValueError, OSError, MemoryError, jax.errors.JaxRuntimeError)


class Task(NamedTuple):
  """What makes the plan and the staging of a round on every process."""

  key: str
  digest: str  # of the plan
  dtype: str
  bucket_bytes: int
  align: int
  quantization: Quantization | None
  staging: str  # the directory that all write to; "": each sends its own part
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
    self._oldest = 1  # round whose words are in the store
    self._lock = threading.Lock()
    self._planned: tuple[Any, Plan] | None = None  # what the last plan was made of, and it
    self._parts: tuple[str, Plan, tuple[int, ...]] | None = None  # its digest, it in parts, senders

  def share(self, transport: Any) -> bool:
    """Whether all can push by the first process's transport: every process sees the directory of
    its staging, or reaches the receivers of its parts. All of them call this; `transport` is read
    on the first.

    Raises:
      SourceError: a process gave no word.
    """
    if self.count == 1:
      return False
    self._open_round()
    if self.process:
      asked = json.loads(self._word(0, _WAIT_SECONDS))
      able = Path(asked["probe"]).exists() if asked["probe"] else bool(asked["receivers"])
      for address in asked["receivers"]:
        able = able and reaches(address, asked["token"], self.seconds / 2)
      self._tell(json.dumps(able).encode())
      return bool(json.loads(self._word(0)))
    probe = transport.probe() if isinstance(transport, SharesStaging) else None
    receivers, token = (), ""
    if isinstance(transport, SendsParts):
      receivers, token = transport.parts_go_to(), transport.token
    asked = {"probe": str(probe or ""), "receivers": receivers, "token": token}
    self._tell(json.dumps(asked).encode())
    try:
      able = all([json.loads(words) for words in self._answers()])
    finally:
      if probe is not None:
        probe.unlink()
    self._tell(json.dumps(able).encode())
    return able

  def stage(self, task: Task, plan: Plan, weights: Any, transport: Transport) -> Staged:
    """The first process's part of a round, and the others'.

    Raises:
      SourceError: another process failed, or gave no word in time; it is named.
      ValueError: as of `stage`.
      OSError: as of the transport's `allocate`.
    """
    if task.staging:
      buffers = transport.allocate(plan, task.key)
    else:
      plan, buffers = self._part(task, plan, weights)
    self._open_round(task.seconds)
    self._tell(json.dumps(task._asdict()).encode())
    try:
      staged = stage(plan, weights, buffers, task.key, _Leading(self, task))
    except BaseException as error:
      self._say(_FAILED + str(error).encode())  # they may be waiting for a word of ours
      raise
    for number in range(self._oldest, self._round):  # all have answered in this one
      _store().key_value_delete(f"{self.name}/{number}/")
    self._oldest = self._round
    return staged if task.staging else staged._replace(join=self._have_join)

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
      except STAGE_ERRORS as error:
        self._say(_FAILED + str(error).encode())

  def _take_part(self, task: Task, model: Model, weights: Any) -> None:
    self.seconds = task.seconds
    plan = self._plan(task, model, weights)
    if plan.digest != task.digest:
      raise ValueError(f"its plan is {plan.digest}, that of process 0 {task.digest}")
    if task.staging:
      buffers = open_files(Path(task.staging), plan)
      with concurrent.futures.ThreadPoolExecutor() as pool:
        fill(plan, weights, buffers, pool, together=_Following(self, task))
      return
    plan, buffers = self._part(task, plan, weights)
    staged = stage(plan, weights, buffers, task.key, _Following(self, task))
    while (joining := json.loads(self._word(0, _WAIT_SECONDS))) is not None:
      try:
        join(Joining(**joining), staged)
      except CallError as error:
        self._tell(str(error).encode())
      else:
        self._tell(b"")

  def _plan(self, task: Task, model: Model, weights: Any) -> Plan:
    options = (task.dtype, task.quantization, task.bucket_bytes, task.align)
    source = source_layout(weights)
    if self._planned is None or self._planned[0] != (source, options):
      plan = push_plan(
        model,
        source,
        task.dtype,
        quantization=task.quantization,
        bucket_bytes=task.bucket_bytes,
        align=task.align,
      )
      self._planned = (source, options), plan
    return self._planned[1]

  def _part(
    self, task: Task, plan: Plan, weights: Any
  ) -> tuple[Plan, Mapping[tuple[int, int], np.ndarray]]:
    """The plan in parts, and memory for those of this process."""
    if self._parts is None or self._parts[0] != plan.digest:
      devices = {d for leaf in jax.tree.leaves(weights) for d in leaf.sharding.device_set}
      made, owners = in_parts(
        plan,
        {device.id: device.process_index for device in devices},
        published_shapes(plan),
        bucket_bytes=task.bucket_bytes,
        align=task.align,
      )
      self._parts = plan.digest, made, owners
    _, made, owners = self._parts
    mine = [b for b, owner in zip(made.buckets, owners, strict=True) if owner == self.process]
    return made, {(b.rank, b.index): np.zeros(b.nbytes, np.uint8) for b in mine}

  def _have_join(self, joining: Joining | None) -> None:
    """Has all others send their part of a delivery, or tells that there is no more to deliver.
    Raises CallError where one of them fails.
    """
    with self._lock:  # one server after the other: words have an order
      self._tell(json.dumps(joining and joining._asdict()).encode())
      if joining is None:
        return
      try:
        failed = [words.decode() for words in self._answers() if words]
      except SourceError as error:
        raise CallError("lost", f"{joining.where}: {error}") from error
    if failed:
      raise CallError("lost", f"{joining.where}, from another process: {failed[0]}")

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
    """The next word of each of the others. Where one of them fails, those after it are taken as
    heard, too: what they say would else be read as the answer to the next question.
    """
    numbers = {process: self._next(process) for process in range(1, self.count)}
    return [self._word(process, number=number) for process, number in numbers.items()]

  def _next(self, process: int) -> int:
    number = self._heard.get(process, 0)
    self._heard[process] = number + 1
    return number

  def _word(self, process: int, seconds: float | None = None, number: int | None = None) -> bytes:
    """A process's next word in this round. Raises SourceError where there is none, or a failure."""
    seconds = seconds or self.seconds
    number = self._next(process) if number is None else number
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


class _End:
  """What both ends of a round know of it."""

  def __init__(self, sources: Sources, task: Task):
    self.sources, self.same_buffers = sources, bool(task.staging)


class _Leading(_End):
  """The first process's end, as `stage` knows it."""

  def largest(self, amax: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    flat = _flat(amax)
    for words in self.sources._answers():
      flat = np.maximum(flat, np.frombuffer(words, np.float32))
    self.sources._tell(flat.tobytes())
    return _unflat(flat, amax)

  def hashes(self, mine: Mapping[int, str]) -> Mapping[int, str]:
    found = dict(mine)
    for words in self.sources._answers():
      found |= {int(number): digest for number, digest in json.loads(words).items()}
    return found

  def written(self, sums: Sums) -> None:
    everyone = {key: dict(copies) for key, copies in sums.items()}
    for words in self.sources._answers():
      for key, copies in json.loads(words).items():
        everyone.setdefault(key, {}).update({int(d): bits for d, bits in copies.items()})
    compare_replicas(everyone)


class _Following(_End):
  """The end of one of the others."""

  def largest(self, amax: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    self.sources._tell(_flat(amax).tobytes())
    return _unflat(np.frombuffer(self.sources._word(0), np.float32), amax)

  def hashes(self, mine: Mapping[int, str]) -> Mapping[int, str]:
    self.sources._tell(json.dumps(mine).encode())
    return mine

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
  how = words["quantization"]
  if how is not None:  # a tuple, which JSON gives back as a list
    dtype, block, scale, top = how
    how = Quantization(dtype, block and tuple(block), scale, top)
  return Task(**{**words, "quantization": how})


def _store() -> Any:
  """The key-value store of `jax.distributed`."""
  client = distributed.global_state.client
  if client is None:
    raise SourceError("jax.distributed is not initialised, several processes push by its store")
  return client
