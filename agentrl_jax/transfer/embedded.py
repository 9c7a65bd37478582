"""The embedded sampler as a receiver: the same round, without a wire."""

import asyncio
import time
from typing import Any, Protocol

import jax

from agentrl_jax.transfer.report import Clock, PushError, PushReport, State


class InProcessReceiver(Protocol):
  """What an engine in this process must offer to be published to."""

  name: str

  async def load(self, weights: Any, version: int) -> None:
    """Serves a copy of `weights` from now on; requests go on under it, no old cache is reused.

    Raises, having changed nothing, when it cannot serve them.
    """
    ...

  async def version(self) -> int: ...


def embedded_publisher(
  engine: InProcessReceiver, *, deadline: float = 300.0
) -> "EmbeddedPublisher":
  """A publisher for an engine of this process; `deadline` in seconds for each call to it."""
  return EmbeddedPublisher(engine, deadline)


class EmbeddedPublisher:
  """Hands the tree over and checks what the engine says that it serves."""

  def __init__(self, engine: InProcessReceiver, deadline: float):
    self.engine, self.deadline = engine, deadline
    self.blocked = ""

  async def publish(self, weights: Any, version: int) -> PushReport:
    """See `Publisher.publish`. Versions increase; the version that the engine holds is a no-op."""
    if self.blocked:
      raise PushError(f"{self.engine.name}: {self.blocked}; recover() first")
    clock = Clock()
    with clock.phase("prepare"):
      held = await self._within(self.engine.version(), "its version")
      if version < held:
        raise PushError(f"{self.engine.name} holds version {held}, refusing to publish {version}")
    if version == held:
      return self._report(version, State.COMMITTED, clock, 0.0, "already held")
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    start = time.perf_counter()
    try:
      with clock.phase("send", nbytes):
        await self._within(self.engine.load(weights, version), f"load of version {version}")
      with clock.phase("verify"):
        held = await self._within(self.engine.version(), "its version")
    except PushError as error:
      self.blocked = str(error)
      return self._report(version, State.UNKNOWN, clock, time.perf_counter() - start, str(error))
    idle = time.perf_counter() - start
    if held != version:
      self.blocked = f"reports version {held} after a push of {version}"
      return self._report(version, State.FENCED, clock, idle, self.blocked)
    return self._report(version, State.COMMITTED, clock, idle)

  async def recover(self) -> None:
    """See `Publisher.recover`: the engine must answer within the deadline."""
    await self._within(self.engine.version(), "its version")
    self.blocked = ""

  async def close(self) -> None:
    """Nothing to release."""

  async def _within(self, call, what: str):
    try:
      return await asyncio.wait_for(call, self.deadline)
    except TimeoutError as error:
      raise PushError(
        f"{self.engine.name} did not answer within {self.deadline:g} s, waited for {what}"
      ) from error

  def _report(self, version, state, clock, idle, message="") -> PushReport:
    return PushReport(
      version, state, "memory", clock.phases, "", idle, {self.engine.name: state}, message
    )
