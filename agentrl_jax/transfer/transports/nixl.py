"""One-sided writes with NIXL, which chooses how: RDMA where there is a fabric, process-to-process
copies on one machine, else TCP.
"""

import base64
import contextlib
import ctypes
import importlib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from agentrl_jax.transfer.control import CallError, Failure
from agentrl_jax.transfer.transports.window import Aim, Writer


class Nixl:
  """See `window.Library`. Nothing is kept from round to round."""

  name = "nixl"

  def why_not(self) -> str:
    """Why NIXL does not work in this process, or ""."""
    try:
      _api()
    except ImportError as error:
      return str(error)
    return ""

  def writer(self, peer: str, buffers: Sequence[np.ndarray], aims: Sequence[Aim]) -> Writer:
    """An agent for this round and server alone, so that its writes end with it."""
    del peer
    return _Writer(buffers, aims)

  def close(self) -> None:
    """Nothing was kept."""


class _Writer:
  """A NIXL agent with one round's writes into one server, prepared. Raises CallError."""

  def __init__(self, buffers: Sequence[np.ndarray], aims: Sequence[Aim]):
    api = _api()
    self._buffers = buffers  # as long as the agent may read them
    try:
      self._agent: Any = api.nixl_agent(f"writer-{uuid.uuid4().hex}", api.nixl_agent_config())
      self._agent.register_memory([(b.ctypes.data, b.nbytes, 0, "") for b in buffers], "DRAM")
    except Exception as error:  # its exceptions have no common base
      raise _failed("refused", aims[0].where, error) from error
    self._states: dict[Any, str] = {}
    self._where: dict[Any, str] = {}
    for aim in aims:
      local = [(write.source, write.nbytes, 0) for write in aim.writes]
      remote = [(write.target, write.nbytes, aim.found["device"]) for write in aim.writes]
      try:
        other = self._agent.add_remote_agent(base64.b64decode(aim.found["agent"]))
        self._agent.make_connection(other)
        handle = self._agent.initialize_xfer(
          "WRITE",
          self._agent.get_xfer_descs(local, "DRAM"),
          self._agent.get_xfer_descs(remote, aim.found["memory"]),
          other,
        )
      except Exception as error:  # as above
        raise _failed("unreachable", aim.where, error) from error
      self._states[handle], self._where[handle] = "PROC", aim.where

  def start(self) -> None:
    """See `window.Writer`."""
    self._advance(self._agent.transfer)

  def state(self) -> Literal["running", "done", "failed"]:
    """See `window.Writer`."""
    self._advance(self._agent.check_xfer_state)
    if "PROC" in self._states.values():
      return "running"
    return "failed" if "ERR" in self._states.values() else "done"

  def _advance(self, call: Callable[[Any], str]) -> None:
    for handle, state in self._states.items():
      if state == "PROC":
        try:
          self._states[handle] = call(handle)
        except Exception as error:  # as above
          raise _failed("refused", self._where[handle], error) from error

  def close(self) -> None:
    """Ends the agent: what it had not written by now it never will."""
    self._states.clear()
    self._agent = None


def _failed(failure: Failure, where: str, error: Exception) -> CallError:
  return CallError(failure, f"{where}: NIXL: {type(error).__name__} {error}")


def _api() -> Any:
  """NIXL's Python interface, by the name that the package for this CUDA gives it."""
  for name in ("nixl_cu13", "nixl_cu12"):
    if importlib.util.find_spec(name):
      # Before the copy that NIXL brings: where both are loaded the other way round, as NIXL alone
      # does, the process crashes when it ends.
      with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
      api = importlib.import_module(f"{name}._api")
      logging.getLogger("nixl").setLevel(logging.WARNING)
      return api
  raise ImportError("NIXL is not installed: pip install --no-deps nixl-cu13")
