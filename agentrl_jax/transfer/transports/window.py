"""One-sided writes: staged bytes go straight into each rank's parameters.

The server runs our plug-in (`third_party/sglang/window`), which registers its parameters' memory
with the library that writes, and tells where it lies; it takes no part in the writes. Connections
and descriptors are made before the server pauses, so that it waits for the bytes alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import Plan
from agentrl_jax.transfer.receive import TOKEN
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports import Delivery
from agentrl_jax.transfer.transports.tensor import session

_POLL_SECONDS = 0.001
_ASK_SECONDS = 120.0  # for an interpreter to say which libraries it has
PLUGIN = "third_party/sglang/window"


class Write(NamedTuple):
  """Bytes to copy from an address here to one there."""

  source: int
  target: int
  nbytes: int


class Aim(NamedTuple):
  """One rank's parameters, as its window described them.

  Args:
    where: the server and the window, for errors.
    here: this machine's address on the way there.
    found: what the library of that side added.
    writes: all that the round brings to this rank.
  """

  where: str
  here: str
  found: Mapping[str, Any]
  writes: Sequence[Write]


class Writer(Protocol):
  """One round's writes into one server: connected, memory registered, nothing written."""

  def start(self) -> None:
    """Begins all of them. Raises CallError."""
    ...

  def state(self) -> Literal["running", "done", "failed"]:
    """How they stand; asked again and again while they run. Raises CallError."""
    ...

  def close(self) -> None:
    """Gives memory free, and ends first what still runs. Idempotent."""
    ...


class Library(Protocol):
  """What moves the bytes.

  `name` is what windows and people call it.
  """

  name: str

  def why_not(self) -> str:
    """Why it does not work in this process, or ""."""
    ...

  def writer(self, peer: str, buffers: Sequence[np.ndarray], aims: Sequence[Aim]) -> Writer:
    """Prepares writes out of `buffers` into the server at `peer`. Raises CallError."""
    ...

  def close(self) -> None:
    """Ends what was kept from round to round. Idempotent."""
    ...


class OneSidedTransport:
  """Writes into the parameters that servers have opened.

  Args:
    library: that writes.
    windows: HOST:PORT of rank 0's window by server URL; rank r has the r-th port after it.
    token: that the servers were given.
    bucket_bytes: most bytes of a staging buffer, unless one parameter is larger.
  """

  per_rank = True
  align = 16

  def __init__(
    self, library: Library, windows: Mapping[str, str], token: str, *, bucket_bytes: int = 1 << 30
  ):
    self.library, self.name = library, library.name
    self.windows = {url.rstrip("/"): address for url, address in windows.items()}
    self.token, self.bucket_bytes = token, bucket_bytes
    self._writers: dict[str, dict[str, Writer]] = {}  # by round and server

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
    writer = await asyncio.to_thread(self._prepare, staged, peer, window)
    self._writers.setdefault(staged.key, {})[peer.url] = writer
    return Delivery()

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, all writes, end. The writer ends with it: a library's threads
    would go on polling while the server computes its checksums.
    """
    del ranks
    try:
      async with session(peer):
        await _write(self._writers[staged.key][peer.url], peer)
    finally:
      self._drop(staged.key, peer.url)

  def release(self, key: str) -> None:
    """Ends the round's writers, and with them every write that might go on."""
    for url in list(self._writers.get(key, {})):
      self._drop(key, url)
    self._writers.pop(key, None)

  def close(self) -> None:
    """Ends every writer, and the library's own."""
    for key in list(self._writers):
      self.release(key)
    self.library.close()

  def _prepare(self, staged: Staged, peer: Control, window: str) -> Writer:
    aims = []
    for rank in sorted({bucket.rank for bucket in staged.plan.buckets}):
      address = of_rank(window, rank)
      where = f"{peer.url}: window {address}"
      here, found = ask(where, address, f"{self.token} {self.name}", peer.deadline)
      aims.append(Aim(where, here, found, writes(staged, rank, found, where)))
    buffers = [buffer for buffer in staged.buffers.values() if buffer.nbytes]
    return self.library.writer(peer.url, buffers, aims)

  def _drop(self, key: str, url: str) -> None:
    if writer := self._writers.get(key, {}).pop(url, None):
      writer.close()


async def _write(writer: Writer, peer: Control) -> None:
  """All writes, within the server's deadline."""
  writer.start()
  loop = asyncio.get_running_loop()
  end = loop.time() + peer.deadline
  while (state := writer.state()) == "running":
    if loop.time() > end:
      message = f"{peer.url}: one-sided writes did not end within {peer.deadline:g} s"
      raise CallError("lost", message)
    await asyncio.sleep(_POLL_SECONDS)
  if state == "failed":
    raise CallError("refused", f"{peer.url}: a one-sided write failed")


def of_rank(window: str, rank: int) -> str:
  """The HOST:PORT of a rank's window. Raises ValueError where `window` is none."""
  host, _, port = window.rpartition(":")
  return f"{host}:{int(port) + rank}"


def ask(where: str, address: str, question: str, deadline: float) -> tuple[str, Mapping[str, Any]]:
  """What a window says, and the address of this machine on the way there. Raises CallError."""
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection((host.strip("[]"), int(port)), deadline) as connection:
      connection.settimeout(deadline)
      here = connection.getsockname()[0]
      connection.sendall(f"{question}\n".encode())
      data = b""
      while chunk := connection.recv(1 << 20):
        data += chunk
  except OSError as error:
    message = f"{where}: {error}: does the server run with the plug-in of {PLUGIN}?"
    raise CallError("unreachable", message) from error
  try:
    found = json.loads(data)
  except ValueError as error:
    raise CallError("refused", f"{where} told nothing: is the token its own?") from error
  if "error" in found:
    raise CallError("refused", f"{where}: {found['error']}")
  return here, found


def writes(staged: Staged, rank: int, found: Mapping[str, Any], where: str) -> tuple[Write, ...]:
  """From where to where a rank's segments go.

  Raises:
    CallError: naming a parameter that the server does not have, or has otherwise.
  """
  made = []
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
    made.append(Write(start, address, nbytes))
  return tuple(made)


@dataclasses.dataclass(frozen=True)
class Opening:
  """How a server on this machine is started so that its parameters are open. It holds the ports of
  its windows until `close`: no other process gets them while the server loads, or loads again.
  """

  address: str  # HOST:PORT of rank 0's window
  token: str
  held: contextlib.ExitStack = dataclasses.field(repr=False)

  def environment(self) -> Mapping[str, str]:
    """What its process finds in its environment."""
    host, _, port = self.address.rpartition(":")
    return {"AGENTRL_WINDOW_HOST": host, "AGENTRL_WINDOW_PORT": port, TOKEN: self.token}

  def close(self) -> None:
    """Gives the ports free. Idempotent."""
    self.held.close()


def opening(ranks: int, ports: Sequence[int]) -> Opening:
  """Neighbouring ports for so many ranks, the first one of `ports`, and a new token.

  Raises OSError where none are free.
  """
  draw = random.SystemRandom()
  for first in draw.sample(ports, min(len(ports), 100)):
    with contextlib.ExitStack() as held, contextlib.suppress(OSError):
      for rank in range(ranks):
        held.enter_context(_held("127.0.0.1", first + rank))
      return Opening(f"127.0.0.1:{first}", secrets.token_urlsafe(16), held.pop_all())
  raise OSError(f"no {ranks} neighbouring ports of {ports} are free on 127.0.0.1")


def _held(host: str, port: int) -> socket.socket:
  """A port that only this user's windows, which share it, can listen at. Raises OSError."""
  holder = socket.socket()
  try:
    holder.bind((host, port))  # not shared yet: another's holder would be in the way
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  except OSError:
    holder.close()
    raise
  return holder


def server_lacks(python: str | Path, names: Sequence[str]) -> Mapping[str, str]:
  """By library, why a server of this interpreter could not be written to; "" where it can."""
  program = (
    "import json, sys, agentrl_sglang_window as w; w.listen; "  # none shares a held port without
    "print(json.dumps({name: w.why_not(name) for name in sys.argv[1:]}))"
  )
  command = [str(python), "-c", program, *names]
  try:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
  except (OSError, subprocess.TimeoutExpired) as error:
    return dict.fromkeys(names, str(error))
  if ran.returncode:
    last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    install = f"{python} -m pip install {PLUGIN}"
    return dict.fromkeys(names, f"{python} has no plug-in ({last}): {install}")
  found = json.loads(ran.stdout.splitlines()[-1])
  return {name: reason and f"{python}: {reason}" for name, reason in found.items()}
