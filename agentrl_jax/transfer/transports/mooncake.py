"""One-sided writes with Mooncake's transfer engine: RDMA where it finds a card for it, else TCP.

A write is done when the other side has it in memory, on TCP by an acknowledgement.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.transports.window import Aim, Writer

_AT_ONCE = 64  # writes that the engine has at a time: it refuses more than its queue holds
_DONE = 1  # of a write's status; 0 is on the way, below it failed
_NO_NUMBER = 1 << 63  # from here on, and 0, what stands for a write is an error


class Mooncake:
  """See `window.Library`. A server's engine is kept from round to round while all goes well and its
  windows have the same sessions: ending one takes up to a second.
  """

  name = "mooncake"

  def __init__(self):
    self._idle: dict[str, _Kept] = {}

  def why_not(self) -> str:
    """Why Mooncake does not work in this process, or ""."""
    try:
      _engine_type()
    except ImportError as error:
      return str(error)
    return ""

  def writer(self, peer: str, buffers: Sequence[np.ndarray], aims: Sequence[Aim]) -> Writer:
    """Registers the buffers and sees that every rank's engine answers."""
    sessions = tuple(aim.found["session"] for aim in aims)
    kept = self._idle.pop(peer, None)
    if kept is None or kept.sessions != sessions:
      kept = _Kept(sessions, _start(aims[0]))
    return _Writer(kept, buffers, aims, peer, self._idle)

  def close(self) -> None:
    """Ends every engine."""
    self._idle.clear()


class _Kept(NamedTuple):
  """An engine, and the sessions that it writes to."""

  sessions: tuple[str, ...]
  engine: Any


class _Writer:
  """One round's writes into one server. Its engine goes to `idle` when all went well, and ends with
  the writer otherwise. Raises CallError.
  """

  def __init__(
    self,
    kept: _Kept,
    buffers: Sequence[np.ndarray],
    aims: Sequence[Aim],
    peer: str,
    idle: dict[str, _Kept],
  ):
    for aim in aims:
      session = aim.found["session"]
      if not kept.engine.get_first_buffer_address(session):  # now, as a first write would ask
        raise CallError("unreachable", f"{aim.where}: no Mooncake answers at {session}")
    self._addresses = [buffer.ctypes.data for buffer in buffers]
    sizes = [buffer.nbytes for buffer in buffers]
    if kept.engine.batch_register_memory(self._addresses, sizes):
      message = f"{aims[0].where}: Mooncake could not register {sum(sizes)} bytes of this process"
      raise CallError("refused", message)
    self._kept: Any = kept  # None once it is closed
    self._buffers, self._peer, self._idle = buffers, peer, idle
    self._waiting = [(aim.found["session"], write) for aim in aims for write in aim.writes]
    self._running: list[int] = []
    self._failed = False

  def start(self) -> None:
    """See `window.Writer`."""
    self._submit()

  def state(self) -> Literal["running", "done", "failed"]:
    """See `window.Writer`."""
    codes = {number: self._kept.engine.transfer_check_status(number) for number in self._running}
    self._running = [number for number, code in codes.items() if not code]
    self._failed |= any(code not in (0, _DONE) for code in codes.values())
    self._submit()
    if self._failed:
      return "failed"
    return "running" if self._running else "done"

  def close(self) -> None:
    """Ends the engine where writes may go on: what they had not written then they never will."""
    kept, self._kept = self._kept, None
    if kept is None or self._running or self._failed:
      return
    if not kept.engine.batch_unregister_memory(self._addresses):
      self._idle[self._peer] = kept

  def _submit(self) -> None:
    while self._waiting and len(self._running) < _AT_ONCE and not self._failed:
      session, write = self._waiting.pop()
      number = self._kept.engine.transfer_submit_write(session, *write)
      if 0 < number < _NO_NUMBER:
        self._running.append(number)
      else:
        self._failed = True


def _start(aim: Aim) -> Any:
  """An engine that can reach a window. Raises CallError where it cannot use the window's protocol.

  Mooncake chooses by the cards it finds, whatever protocol it is given; only its environment says
  otherwise.
  """
  protocol = aim.found["protocol"]
  if forced := {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}.get(protocol):
    os.environ[forced] = "1"
  engine = _engine_type()()
  if engine.initialize(aim.here, "P2PHANDSHAKE", protocol or "rdma", ""):
    chosen = f"protocol {protocol}" if protocol else "any protocol"
    raise CallError("refused", f"{aim.where}: Mooncake does not start here with {chosen}")
  return engine


def _engine_type() -> Any:
  """Mooncake's class of engines."""
  os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when it is loaded
  try:
    return importlib.import_module("mooncake.engine").TransferEngine
  except ImportError as error:
    raise ImportError(
      f"Mooncake is not installed ({error}): pip install --no-deps "
      "mooncake-transfer-engine-non-cuda, and with it Debian's libibverbs1, libnuma1, "
      "libnl-3-200 and libnl-route-3-200"
    ) from error
