"""One round at its receiver: files that the server sees once all of them are there.

Tensors that come in parts, from several processes, have a file each, into which their boxes are
written. A delta is applied to a copy of its base, so that none can be applied twice, and every
tensor it makes is checked against the hash that it must have.
"""

import itertools
import math
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl_jax.transfer import delta
from agentrl_jax.transfer.layout import full, slices
from agentrl_jax.transfer.ledger import Announcement, Ledger
from agentrl_jax.transfer.owned import make_owned
from agentrl_jax.transfer.plan import ITEM_BYTES
from agentrl_jax.transfer.stage import NUMPY_DTYPES, tensor_hash
from agentrl_jax.transfer.transports.disk import safetensors_header
from agentrl_jax.transfer.wire import Base, BaseError, Command, Entry, Frame, WireError

_DROP_SECONDS = 3.0  # for buckets that are being written into memory


class _Place(NamedTuple):
  """Where a tensor lies in a round's files."""

  file: str
  offset: int
  nbytes: int


class Received:
  """One round's files. Raises WireError where a sender is wrong, OSError where they do not fit.

  Args:
    held: the round that its deltas are to be applied to, where the sender named one; it is checked
      here.
  """

  def __init__(self, announced: Announcement, root: Path, held: "Received | None" = None):
    self.id, expected = (announced.round, announced.version), announced.tensors
    self.base = _checked(announced.begin.base, held, expected)
    self.fingerprint = ""  # until END
    self.ledger = Ledger(*self.id, expected)
    nbytes = sum(ITEM_BYTES[dtype] * math.prod(shape) for shape, dtype in expected.values())
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    if nbytes > free:
      raise WireError(
        f"{root} has {free / 1e6:.0f} MB free, the weights need {nbytes / 1e6:.0f} MB"
      )
    self.directory = root / f"{announced.begin.key}-{announced.round:016x}"
    self.partial = self.directory.with_name(f"{self.directory.name}.partial")
    self._owned: int | None = make_owned(self.partial)
    self._numbers = itertools.count(1)
    self._places: dict[str, _Place] = {}
    self._mapped: dict[str, np.ndarray] = {}  # of what comes in parts
    self._lock = threading.Condition()
    self._writing = 0
    self._given_up = ""  # why it takes nothing more

  def take(self, frame: Frame) -> str:
    """Takes one checked frame. Returns where the files are after END, else ""."""
    if frame.command is Command.DELTA:
      frame = self._applied(frame)
    with self._lock:
      if self._given_up:
        raise WireError(f"round {self.id[0]} was given up{self._given_up}")
      if frame.command is Command.END and self._writing:
        raise WireError("END while a bucket is still being written")
      self.ledger.accept(frame)
      if frame.command is Command.END:
        assert frame.end is not None
        self._mapped = {}
        self.partial.rename(self.directory)
        self.fingerprint = frame.end.fingerprint
        return str(self.directory)
      if frame.command is Command.ABORT:
        raise WireError(f"given up by the sender: {frame.reason}")
      self._writing += 1
      path = self.partial / f"model-{next(self._numbers):05}.safetensors"
    places, failed = {}, ": a bucket was not written"
    try:
      both = list(zip(frame.entries, frame.tensors, strict=True))
      if whole := [pair for pair in both if pair[0].part == (0, 1)]:
        places = _write(path, whole)
      for entry, tensor in both:
        if entry.part != (0, 1):
          self._target(entry.name)[slices(entry.dst_index)] = tensor
      failed = ""
    finally:
      with self._lock:
        self._places |= places
        self._given_up = self._given_up or failed
        self._writing -= 1
        self._lock.notify_all()
    return ""

  def _target(self, name: str) -> np.ndarray:
    """A tensor that comes in parts, in a file of its own."""
    with self._lock:
      if name not in self._mapped:
        shape, dtype = self.ledger.expected[name]
        nbytes = ITEM_BYTES[dtype] * math.prod(shape)
        header = safetensors_header([Entry(name, (0, 1), dtype, shape, full(shape), 0, nbytes, "")])
        path = self.partial / f"model-{next(self._numbers):05}.safetensors"
        with path.open("xb") as file:
          file.write(header)
          os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
        mapped = np.memmap(path, np.uint8, "r+", offset=len(header), shape=(nbytes,))
        self._mapped[name] = mapped.view(NUMPY_DTYPES[dtype]).reshape(shape)
        self._places[name] = _Place(path.name, len(header), nbytes)
      return self._mapped[name]

  def read(self, name: str) -> np.ndarray:
    """The bytes of a tensor after END. Raises BaseError where they are gone."""
    place = self._places[name]
    try:
      data = np.fromfile(self.directory / place.file, np.uint8, place.nbytes, offset=place.offset)
    except OSError as error:
      raise BaseError(f"the base {self.id} is gone: {error}") from error
    if len(data) != place.nbytes:
      raise BaseError(f"{name} of the base {self.id} has {len(data)} of {place.nbytes} bytes")
    return data

  def _applied(self, frame: Frame) -> Frame:
    """The bucket that a delta stands for."""
    if self.base is None:
      raise WireError(f"a delta in round {self.id[0]}, which was begun without a base")
    entries, tensors = [], []
    for entry, data, change in zip(frame.entries, frame.tensors, frame.changes, strict=True):
      if entry.name not in self.ledger.expected:
        raise WireError(f"{entry.name} is not expected")
      shape, dtype = self.ledger.expected[entry.name]
      base = self.base.read(entry.name)
      try:
        made = delta.decode(change.encoding, data, base, ITEM_BYTES[dtype])
      except ValueError as error:
        raise WireError(f"{entry.name}: {error}") from error
      if tensor_hash(made) != change.target:
        raise BaseError(f"{entry.name}: the base does not give the bytes that version {self.id[1]} "
                        "has")  # fmt: skip
      entries.append(
        Entry(entry.name, (0, 1), dtype, shape, full(shape), 0, len(made), change.target)
      )
      tensors.append(made.view(NUMPY_DTYPES[dtype]).reshape(shape))
    return Frame(Command.BUCKET, frame.round, frame.version, tuple(entries), tuple(tensors))

  def drop(self) -> None:
    """Removes the files; when it returns they are gone, whoever removed them."""
    with self._lock:
      self._given_up = self._given_up or " by its sender"
      self._lock.wait_for(lambda: not self._writing, _DROP_SECONDS)  # a new file would stay
      self._mapped = {}
      for directory in (self.partial, self.directory):
        shutil.rmtree(directory, ignore_errors=True)
      if (descriptor := self._owned) is not None:
        self._owned = None
        os.close(descriptor)


def _checked(
  base: Base | None, held: Received | None, expected: Mapping[str, tuple[tuple[int, ...], str]]
) -> Received | None:
  """The round that a sender named as its base. Raises BaseError unless it is whole and the one."""
  if base is None:
    return None
  if held is None:
    raise BaseError(f"version {base.version}, round {base.round}, is not held here")
  if held.fingerprint != base.fingerprint:
    is_ = held.fingerprint or "not whole yet"
    raise BaseError(f"version {base.version} is {is_} here, the sender's is {base.fingerprint}")
  if held.ledger.expected != expected:
    raise BaseError(f"version {base.version} has other tensors")
  return held


def _write(path: Path, tensors: Sequence[tuple[Entry, np.ndarray]]) -> dict[str, _Place]:
  """Whole tensors as a safetensors file. The format allows no gaps, so they move together."""
  entries: list[Entry] = []
  offset = 0
  for entry, _ in tensors:
    entries.append(entry._replace(offset=offset))
    offset += entry.nbytes
  header = safetensors_header(entries)
  with path.open("xb") as file:
    file.write(header)
    for _, tensor in tensors:
      file.write(tensor.reshape(-1).view(np.uint8).data)
  return {e.name: _Place(path.name, len(header) + e.offset, e.nbytes) for e in entries}
