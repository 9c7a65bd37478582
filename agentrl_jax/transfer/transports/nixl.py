"""One-sided writes with NIXL: staged bytes go straight into each rank's parameters.

The server runs our plug-in (`third_party/sglang/nixl_window`), which registers its parameters'
memory and tells where it lies; it takes no part in the writes. NIXL chooses how: RDMA where there
is a fabric, process-to-process copies on one machine, else TCP. Connections and descriptors are
made before the server pauses, so that it waits for the bytes alone.
"""

import asyncio
import base64
import importlib
import importlib.util
import json
import logging
import socket
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import Plan
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports import Delivery
from agentrl_jax.transfer.transports.tensor import session

_POLL_SECONDS = 0.001


class NixlTransport:
  """Writes into the parameters that servers have opened.

  Args:
    windows: HOST:PORT of rank 0's window by server URL; rank r has the r-th port after it.
    token: that the servers were given.
    bucket_bytes: most bytes of a staging buffer, unless one parameter is larger.
  """

  name = "nixl"
  per_rank = True
  align = 16

  def __init__(self, windows: Mapping[str, str], token: str, *, bucket_bytes: int = 1 << 30):
    self.windows = {url.rstrip("/"): address for url, address in windows.items()}
    self.token, self.bucket_bytes = token, bucket_bytes
    self._writers: dict[str, dict[str, _Writer]] = {}  # by round and server

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Ordinary memory, which writers register."""
    del key
    return allocate(plan)

  async def deliver(self, staged: Staged, peer: Control, version: int) -> Delivery:
    """Asks where the parameters lie, checks that they are those of the plan, and connects.

    Raises:
      CallError: naming the server and its window, or the parameter that differs.
    """
    del version
    window = self.windows.get(peer.url)
    if window is None:
      raise CallError("unreachable", f"{peer.url} has no window, there are {self.windows}")
    self._drop(staged.key, peer.url)
    writer = await asyncio.to_thread(_Writer, staged, peer, window, self.token)
    self._writers.setdefault(staged.key, {})[peer.url] = writer
    return Delivery()

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, all writes, end. A failure ends the writer first."""
    del ranks
    writer = self._writers[staged.key][peer.url]
    try:
      async with session(peer):
        await writer.write(peer)
    except BaseException:
      self._drop(staged.key, peer.url)
      raise

  def release(self, key: str) -> None:
    """Ends the round's writers, and with them every write that might go on."""
    for url in list(self._writers.get(key, {})):
      self._drop(key, url)
    self._writers.pop(key, None)

  def close(self) -> None:
    """Ends every writer."""
    for key in list(self._writers):
      self.release(key)

  def _drop(self, key: str, url: str) -> None:
    if writer := self._writers.get(key, {}).pop(url, None):
      writer.close()


class _Writer:
  """A NIXL agent with one round's writes into one server, prepared. Raises CallError."""

  def __init__(self, staged: Staged, peer: Control, window: str, token: str):
    api = _api()
    self._agent: Any = api.nixl_agent(f"writer-{uuid.uuid4().hex}", api.nixl_agent_config())
    self._buffers = staged.buffers  # as long as the agent may read them
    places = [(a.ctypes.data, a.nbytes, 0, "") for a in staged.buffers.values() if a.nbytes]
    self._agent.register_memory(places, "DRAM")
    self._handles: list[Any] = []
    host, _, port = window.rpartition(":")
    for rank in sorted({bucket.rank for bucket in staged.plan.buckets}):
      where = f"{peer.url}: window {host}:{int(port) + rank}"
      found = _ask(where, host.strip("[]"), int(port) + rank, token, peer.deadline)
      local, remote = _pairs(staged, rank, found, where)
      try:
        other = self._agent.add_remote_agent(base64.b64decode(found["agent"]))
        self._agent.make_connection(other)
        self._handles.append(
          self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(local, "DRAM"),
            self._agent.get_xfer_descs(remote, found["memory"]),
            other,
          )
        )
      except Exception as error:  # its exceptions have no common base
        raise CallError("unreachable", f"{where}: NIXL: {type(error).__name__} {error}") from error

  async def write(self, peer: Control) -> None:
    """All writes, at once, within the server's deadline."""
    states = {handle: self._agent.transfer(handle) for handle in self._handles}
    loop = asyncio.get_running_loop()
    end = loop.time() + peer.deadline
    while "PROC" in states.values():
      if loop.time() > end:
        message = f"{peer.url}: one-sided writes did not end within {peer.deadline:g} s"
        raise CallError("lost", message)
      await asyncio.sleep(_POLL_SECONDS)
      states = {
        handle: self._agent.check_xfer_state(handle) if state == "PROC" else state
        for handle, state in states.items()
      }
    if "ERR" in states.values():
      raise CallError("refused", f"{peer.url}: a one-sided write failed")

  def close(self) -> None:
    """Ends the agent: what it had not written by now it never will. Idempotent."""
    self._handles.clear()
    self._agent = None


def _ask(where: str, host: str, port: int, token: str, deadline: float) -> Mapping[str, Any]:
  """What a window says. Raises CallError."""
  try:
    with socket.create_connection((host, port), deadline) as connection:
      connection.settimeout(deadline)
      connection.sendall(f"{token}\n".encode())
      data = b""
      while chunk := connection.recv(1 << 20):
        data += chunk
  except OSError as error:
    raise CallError("unreachable", f"{where}: {error}") from error
  try:
    found = json.loads(data)
  except ValueError as error:
    raise CallError("refused", f"{where} told nothing: is the token its own?") from error
  if "error" in found:
    raise CallError("refused", f"{where}: {found['error']}")
  return found


def _pairs(
  staged: Staged, rank: int, found: Mapping[str, Any], where: str
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
  """From where to where a rank's writes go: (address, bytes, device) of each.

  Raises:
    CallError: naming a parameter that the server does not have, or has otherwise.
  """
  local, remote = [], []
  for segment in staged.plan.segments:
    if segment.rank != rank or not segment.nbytes:
      continue
    if segment.name not in found["parameters"]:
      raise CallError("refused", f"{where} has no {segment.name}")
    address, nbytes, dtype, shape = found["parameters"][segment.name]
    want = (segment.nbytes, segment.dtype, segment.shape)
    if (nbytes, dtype, tuple(shape)) != want:
      message = f"{segment.name} is {nbytes} bytes of {dtype} {tuple(shape)}, the plan has {want}"
      raise CallError("refused", f"{where}: {message}")
    start = staged.buffers[rank, segment.bucket].ctypes.data + segment.offset
    local.append((start, nbytes, 0))
    remote.append((address, nbytes, found["device"]))
  return local, remote


def why_not() -> str:
  """Why NIXL does not work in this process, or ""."""
  try:
    _api()
  except ImportError as error:
    return str(error)
  return ""


def _api() -> Any:
  """NIXL's Python interface, by the name that the package for this CUDA gives it."""
  for name in ("nixl_cu13", "nixl_cu12"):
    if importlib.util.find_spec(name):
      api = importlib.import_module(f"{name}._api")
      logging.getLogger("nixl").setLevel(logging.WARNING)
      return api
  raise ImportError("NIXL is not installed: pip install --no-deps nixl-cu13")
