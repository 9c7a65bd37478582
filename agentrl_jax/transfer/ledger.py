"""What a receiver notes of a round: what was announced, what came of it, and if that is all."""

import math
from collections.abc import Mapping

from agentrl_jax.transfer.boxes import Boxes
from agentrl_jax.transfer.layout import intersect
from agentrl_jax.transfer.stage import fingerprint_of
from agentrl_jax.transfer.wire import Announced, Command, End, Entry, Frame, WireError


class Announcement:
  """The tensors that BEGIN, and MORE frames after it, say a round will send: shape and dtype by
  name.
  """

  def __init__(self, first: Frame):
    assert first.begin is not None
    self.round, self.version, self.begin = first.round, first.version, first.begin
    self.left = first.begin.further  # to be announced
    self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    self._note(first.begin.tensors)

  def add(self, frame: Frame) -> None:
    """Takes the next frame. Raises WireError where it is no MORE, of another round, or announces
    what it may not.
    """
    if frame.command is not Command.MORE or frame[1:3] != (self.round, self.version):
      raise WireError(
        f"{frame.command.name} of round {frame.round}, round {self.round} has {self.left} tensors "
        "to announce"
      )
    if not 0 < len(frame.more) <= self.left:
      raise WireError(f"{len(frame.more)} tensors are announced, {self.left} were to come")
    self._note(frame.more)
    self.left -= len(frame.more)

  def _note(self, tensors: tuple[Announced, ...]) -> None:
    for name, shape, dtype in tensors:
      if name in self.tensors:
        raise WireError(f"{name} is announced twice")
      self.tensors[name] = shape, dtype


class Ledger:
  """Checks one round's frames: each part of each expected tensor once, nothing else, then END.

  Args:
    expected: shape and dtype by name.
  """

  def __init__(self, round: int, version: int, expected: Mapping[str, tuple[tuple[int, ...], str]]):
    self.round, self.version, self.expected = round, version, dict(expected)
    self.parts: dict[str, dict[int, Entry]] = {}
    self.buckets = self.nbytes = 0
    self.done = False

  def accept(self, frame: Frame) -> None:
    """Takes note of one frame, or raises WireError and changes nothing."""
    if (frame.round, frame.version) != (self.round, self.version):
      raise WireError(
        f"frame of round {frame.round} version {frame.version}, "
        f"this is round {self.round} version {self.version}"
      )
    if self.done:
      raise WireError(f"a frame after the end of round {self.round}")
    match frame.command:
      case Command.ABORT:
        self.done, self.parts = True, {}
      case Command.END:
        assert frame.end is not None
        self._check_end(frame.end)
        self.done = True
      case Command.BUCKET:
        self._check_bucket(frame)
        for entry in frame.entries:
          self.parts.setdefault(entry.name, {})[entry.part[0]] = entry
        self.buckets += 1
        self.nbytes += sum(entry.nbytes for entry in frame.entries)
      case other:
        raise WireError(f"{other.name} inside round {self.round}")

  def _check_bucket(self, frame: Frame) -> None:
    for entry in frame.entries:
      if entry.name not in self.expected:
        raise WireError(f"{entry.name} is not expected")
      shape, dtype = self.expected[entry.name]
      if entry.dtype != dtype:
        raise WireError(f"{entry.name}: dtype {entry.dtype}, expected {dtype}")
      if len(entry.shape) != len(shape) or any(
        stop > size for (_, stop), size in zip(entry.dst_index, shape, strict=True)
      ):
        raise WireError(f"{entry.name}: index {entry.dst_index} is outside shape {shape}")
      if entry.part[0] in self.parts.get(entry.name, {}):
        raise WireError(f"{entry.name}: part {entry.part[0]} was received before")

  def _check_end(self, end: End) -> None:
    if missing := sorted(set(self.expected) - set(self.parts)):
      raise WireError(f"{missing[0]} was not received ({len(missing)} missing)")
    rows = []
    for name, parts in self.parts.items():
      entries = [parts[k] for k in sorted(parts)]
      boxes = Boxes([entry.dst_index for entry in entries])
      for number, entry in enumerate(entries):
        if entry.part[1] != len(entries):
          raise WireError(f"{name}: {len(entries)} of its {entry.part[1]} parts were received")
        for other in boxes.meeting(entry.dst_index):
          if other < number and intersect(entries[other].dst_index, entry.dst_index) is not None:
            raise WireError(f"{name}: parts {entries[other].part[0]} and {entry.part[0]} overlap")
      got, wanted = sum(math.prod(e.shape) for e in entries), math.prod(self.expected[name][0])
      if got != wanted:
        raise WireError(f"{name}: its parts have {got} elements, its shape {wanted}")
      rows += [(0, e.name, e.part, e.shape, e.dtype, e.hash) for e in entries]
    got = End(self.buckets, len(self.parts), self.nbytes, fingerprint_of(rows))
    if got != end:
      raise WireError(f"received {got}, the sender says {end}")
