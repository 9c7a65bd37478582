"""One-sided writes with Mooncake's transfer engine: RDMA where it finds a card for it, else TCP.

A write is done when the other side has it in memory, on TCP by an acknowledgement.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.transports.window import Aim, Writer

_AT_ONCE = 64  # writes that the engine has at a time: it refuses more than its queue holds
_DONE = 1  # of a write's status; 0 is on the way, below it failed
_NO_NUMBER = 1 << 63  # from here on, and 0, what stands for a write is an error


class Mooncake:
  """See `window.Library`. Each server's engine is kept while its windows have the same sessions:
  ending one takes up to a second.
  """

  name = "mooncake"

  def __init__(self):
    self._engines: dict[str, tuple[tuple[str, ...], Any]] = {}

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
    if self._engines.get(peer, ((), None))[0] != sessions:
      self._drop(peer)
      self._engines[peer] = sessions, _start(aims[0])
    try:
      return _Writer(self._engines[peer][1], buffers, aims, lambda: self._drop(peer))
    except CallError:
      self._drop(peer)
      raise

  def close(self) -> None:
    """Ends every engine."""
    self._engines.clear()

  def _drop(self, peer: str) -> None:
    self._engines.pop(peer, None)


class _Writer:
  """One round's writes into one server, with an engine that `drop` ends. Raises CallError."""

  def __init__(
    self,
    engine: Any,
    buffers: Sequence[np.ndarray],
    aims: Sequence[Aim],
    drop: Callable[[], None],
  ):
    for aim in aims:
      session = aim.found["session"]
      if engine.send_probe(session):
        raise CallError("unreachable", f"{aim.where}: no Mooncake answers at {session}")
    self._addresses = [buffer.ctypes.data for buffer in buffers]
    sizes = [buffer.nbytes for buffer in buffers]
    if engine.batch_register_memory(self._addresses, sizes):
      message = f"{aims[0].where}: Mooncake could not register {sum(sizes)} bytes of this process"
      raise CallError("refused", message)
    self._engine, self._buffers, self._drop = engine, buffers, drop
    self._waiting = [(aim.found["session"], write) for aim in aims for write in aim.writes]
    self._running: list[int] = []
    self._failed = False

  def start(self) -> None:
    """See `window.Writer`."""
    self._submit()

  def state(self) -> Literal["running", "done", "failed"]:
    """See `window.Writer`."""
    codes = {number: self._engine.transfer_check_status(number) for number in self._running}
    self._running = [number for number, code in codes.items() if not code]
    self._failed |= any(code not in (0, _DONE) for code in codes.values())
    self._submit()
    if self._failed:
      return "failed"
    return "running" if self._running else "done"

  def close(self) -> None:
    """Ends the engine where writes may go on: what they had not written then they never will."""
    engine, self._engine = self._engine, None
    if engine is None:
      return
    if self._running or self._failed or engine.batch_unregister_memory(self._addresses):
      self._drop()

  def _submit(self) -> None:
    while self._waiting and len(self._running) < _AT_ONCE and not self._failed:
      session, write = self._waiting.pop()
      number = self._engine.transfer_submit_write(session, *write)
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
