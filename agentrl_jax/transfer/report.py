"""How a push ended and what each phase cost: the words that every publisher answers in."""

import contextlib
import enum
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol


class State(enum.StrEnum):
  """End state of a round, and of each receiver in it."""

  COMMITTED = "committed"  # serves the new version, caches of the old one gone
  ABORTED = "aborted"  # nothing changed: still serves the old version
  PARTIAL = "partial"  # some receivers committed, the others do not serve
  FENCED = "fenced"  # paused with doubtful weights: needs a full push, never answers until then
  UNKNOWN = "unknown"  # a transfer call got no answer and may still be writing


class PushError(Exception):
  """A round could not be done; the message names the receiver, the phase and the reason."""


class Phase(NamedTuple):
  """What one phase took."""

  seconds: float
  nbytes: int


class PushReport(NamedTuple):
  """One round. `idle_seconds` is the longest time that a receiver could not generate."""

  version: int
  state: State
  transport: str
  phases: Mapping[str, Phase]
  fingerprint: (
    str  # hash over sorted (name, shape, dtype, tensor hash); "" where nothing was packed
  )
  idle_seconds: float
  receivers: Mapping[str, State]
  message: str = ""  # why it is not committed
  delivered: tuple[str, ...] = ()  # how bytes went before the pause, where there is a choice

  @property
  def delivered_share(self) -> float | None:
    """Bytes delivered before the pause, over those of the weights; None where none are delivered
    or no server was written.
    """
    moved, made = (self.phases.get(name, Phase(0.0, 0)).nbytes for name in ("deliver", "send"))
    return moved / made if self.delivered and made else None

  def __str__(self) -> str:
    seconds = sum(phase.seconds for phase in self.phases.values())
    nbytes = max((phase.nbytes for phase in self.phases.values()), default=0)
    phases = " ".join(f"{name} {phase.seconds:.2f}" for name, phase in self.phases.items())
    speed = nbytes / 1e9 / max(seconds, 1e-9)
    line = (
      f"push v{self.version} {self.state} by {self.transport}: {nbytes / 1e6:.0f} MB in "
      f"{seconds:.2f} s ({speed:.2f} GB/s), idle {self.idle_seconds:.2f} s [{phases}]"
    )
    if self.delivered:
      share = "" if self.delivered_share is None else f"{self.delivered_share:.3f} of the bytes "
      line += f"; delivered {share}{', '.join(self.delivered)}"
    return f"{line}; {self.message}" if self.message else line


class Publisher(Protocol):
  """Brings every receiver from its version to `version`; one call, one transaction."""

  async def publish(self, weights: Any, version: int) -> PushReport:
    """Pushes a weight tree.

    Raises:
      PushError: before anything changed, when the round must not start: the version does not
        increase, a receiver belongs to another run, or an earlier round has not been recovered
        from.
    """
    ...

  async def recover(self) -> None:
    """After PARTIAL, FENCED or UNKNOWN: proves that no receiver is still being written.

    The next `publish` then brings all of them to one version. Raises PushError naming who is gone.
    """
    ...

  async def close(self) -> None:
    """Releases connections and staging; idempotent."""
    ...


class Clock:
  """Adds up seconds and bytes by phase name, in order of first use."""

  def __init__(self):
    self.phases: dict[str, Phase] = {}

  @contextlib.contextmanager
  def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
    """Times the body, also when it raises."""
    start = time.perf_counter()
    try:
      yield
    finally:
      before = self.phases.get(name, Phase(0.0, 0))
      self.phases[name] = Phase(
        before.seconds + time.perf_counter() - start, before.nbytes + nbytes
      )

  def count(self, name: str, nbytes: int) -> None:
    """Adds to the bytes of a phase, while or after it is timed."""
    seconds, before = self.phases.get(name, Phase(0.0, 0))
    self.phases[name] = Phase(seconds, before + nbytes)
