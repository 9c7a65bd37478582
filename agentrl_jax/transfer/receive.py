"""The receiving end of `transports.tcp`: beside a server, from connections into files of memory.

    python -m agentrl_jax.transfer.receive --host=HOST --port=PORT --root=DIRECTORY

A bucket is checked before a byte of it is written, and the server sees a round's files only when
END has proved that all of them are there. They stay as long as the round's first connection: what a
trainer that is gone had sent goes with it, and what a killed receiver held goes when the next one
starts.
"""

import argparse
import contextlib
import hmac
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agentrl_jax.transfer import wire
from agentrl_jax.transfer.ledger import Announcement
from agentrl_jax.transfer.owned import sweep
from agentrl_jax.transfer.received import Received
from agentrl_jax.transfer.transports.disk import SHARED_MEMORY
from agentrl_jax.transfer.wire import BaseError, Command, Frame, WireError

TOKEN = "AGENTRL_TRANSFER_TOKEN"  # the environment variable that both ends read it from
DEFAULT_ROOT = f"{SHARED_MEMORY}-received"
_START_SECONDS = 120.0  # for a process to say where it receives
_ACCEPT_SECONDS = 0.1  # before it is tried again


class FileReceiver:
  """Listens until `close`; a thread for each connection.

  Args:
    root: directory in a memory file system that the server sees; made if absent. What dead
      receivers left there is removed.
    token: what a sender must know. It travels as it is: it keeps out mistakes, not eavesdroppers.
    host: the interface to listen on.
    port: 0 takes a free one; `address` says which.
    bucket_bytes: of the largest payload that is taken.
    connections: at once; more are closed unanswered.
    stall_seconds: a sender that stops inside a frame is given up after so long.
  """

  def __init__(
    self,
    root: str | os.PathLike[str],
    token: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    bucket_bytes: int = 4 << 30,
    connections: int = 64,
    stall_seconds: float = 60.0,
  ):
    self.root, self.token = Path(root), token
    self.bucket_bytes, self.connections = bucket_bytes, connections
    self.stall_seconds = stall_seconds
    self._rounds: dict[tuple[int, int], Received] = {}
    self._lock = threading.Lock()
    self._sockets: set[socket.socket] = set()
    self._closed = False
    self.root.mkdir(parents=True, mode=0o700, exist_ok=True)
    sweep(self.root)
    self._listener = listen(host, port, backlog=connections)
    threading.Thread(target=self._accept, name="receive", daemon=True).start()

  @property
  def address(self) -> str:
    """HOST:PORT."""
    host, port = self._listener.getsockname()[:2]
    return f"{bracketed(host)}:{port}"

  def close(self) -> None:
    """Stops listening and drops every round. Idempotent."""
    with self._lock:
      self._closed = True
      sockets, self._sockets = self._sockets, set()
      rounds, self._rounds = self._rounds, {}
    _shut(self._listener)
    self._listener.close()
    for connection in sockets:
      _shut(connection)
    for round in rounds.values():
      round.drop()

  def _accept(self) -> None:
    while True:
      try:
        connection, _ = self._listener.accept()
      except OSError:
        if self._closed:
          return
        time.sleep(_ACCEPT_SECONDS)  # who came is gone again, or no descriptor is free
        continue
      with self._lock:
        room = len(self._sockets) < self.connections and not self._closed
        if room:
          self._sockets.add(connection)
      if not room:
        connection.close()
        continue
      threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

  def _serve(self, connection: socket.socket) -> None:
    """One connection, from its first frame to its end, whoever ends it."""
    began: list[Received] = []
    try:
      set_options(connection)
      self._talk(connection, began)
    except (WireError, OSError) as error:
      answer = wire.encode_no_base if isinstance(error, BaseError) else wire.encode_abort
      with contextlib.suppress(OSError):
        connection.sendall(answer(0, 0, str(error) or type(error).__name__))
        connection.shutdown(socket.SHUT_WR)
        _drain(connection)  # closing on unread bytes would take back the answer
    finally:
      for round in began:
        round.drop()  # before `close` can take it for gone and end the process
        with self._lock:
          self._rounds.pop(round.id, None)
      with self._lock:
        self._sockets.discard(connection)
      connection.close()

  def _talk(self, connection: socket.socket, began: list[Received]) -> None:
    stream = _Frames(connection, self.stall_seconds)
    first = stream.read(0, self.stall_seconds)
    if first is None:
      return
    if not hmac.compare_digest(_encoded(first.token), _encoded(self.token)):
      raise WireError("the token is not this receiver's")
    id = (first.round, first.version)
    if first.begin is not None:
      announced = Announcement(first)
      while announced.left:
        connection.sendall(wire.encode_done(*id))
        if (frame := stream.read(0, self.stall_seconds)) is None:
          return
        announced.add(frame)
      round = self._begin(announced)
      began.append(round)
    else:
      with self._lock:
        found = self._rounds.get(id)
      if found is None:
        raise WireError(f"round {first.round} was not begun")
      round = found
    connection.sendall(wire.encode_done(*id))
    while (frame := stream.read(self.bucket_bytes)) is not None:
      connection.sendall(wire.encode_done(*id, round.take(frame)))

  def _begin(self, announced: Announcement) -> Received:
    id, base = (announced.round, announced.version), announced.begin.base
    with self._lock:
      if self._closed:
        raise WireError("this receiver is closing")
      if id in self._rounds:  # its files have the same names
        raise WireError(f"round {announced.round} was begun before")
      held = None if base is None else self._rounds.get((base.round, base.version))
      self._rounds[id] = Received(announced, self.root, held)
      return self._rounds[id]


class _Frames:
  """Reads frames from a connection into memory that the next frame reuses."""

  def __init__(self, connection: socket.socket, stall_seconds: float):
    self.connection, self.stall_seconds = connection, stall_seconds
    self._memory = np.empty(1 << 16, np.uint8)

  def read(self, max_payload_bytes: int, seconds: float | None = None) -> Frame | None:
    """The next frame, checked, or None at the connection's end between frames.

    It must begin within `seconds`; None: a round may rest, and keepalive finds a sender that is
    gone.
    """
    self.connection.settimeout(seconds)
    head = bytearray(wire.HEADER_BYTES)
    got = self.connection.recv_into(head)
    if not got:
      return None
    self.connection.settimeout(self.stall_seconds)
    self._fill(memoryview(head)[got:])
    size = wire.frame_size(bytes(head), max_payload_bytes=max_payload_bytes)
    if size > len(self._memory):
      self._memory = np.empty(size, np.uint8)
    whole = self._memory.data[:size]
    whole[: len(head)] = head
    self._fill(whole[len(head) :])
    return wire.decode(whole, max_payload_bytes=max_payload_bytes)

  def _fill(self, rest: memoryview) -> None:
    while rest:
      got = self.connection.recv_into(rest)
      if not got:
        raise WireError(f"the connection ended {len(rest)} bytes before the frame did")
      rest = rest[got:]


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
  """A socket that listens at an interface, of IPv6 where the address is. Raises OSError."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  return socket.create_server((host, port), family=family, backlog=backlog)


def bracketed(host: str) -> str:
  """The host as it is written before a port."""
  return f"[{host}]" if ":" in host else host


def set_options(connection: socket.socket) -> None:
  """No waiting for more to send, and a peer that is gone without a word is noticed in minutes."""
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  if sys.platform == "linux":
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)


def read_answer(connection: socket.socket) -> Frame:
  """The answer to a frame, within the connection's timeout.

  Raises:
    OSError: no answer came, TimeoutError in time.
    WireError: it is no answer, or says why the frame was refused; BaseError where everything is
      asked for.
  """
  data = bytearray()
  size = wire.HEADER_BYTES
  while len(data) < size:
    chunk = connection.recv(size - len(data))
    if not chunk:
      raise ConnectionResetError("the connection ended before the answer")
    data += chunk
    if len(data) == wire.HEADER_BYTES:
      size = wire.frame_size(bytes(data), max_payload_bytes=0)
  frame = wire.decode(bytes(data), max_payload_bytes=0)
  if frame.command is Command.ABORT:
    raise WireError(frame.reason)
  if frame.command is Command.NO_BASE:
    raise BaseError(frame.reason)
  if frame.command is not Command.DONE:
    raise WireError(f"answered {frame.command.name}, expected DONE")
  return frame


def _shut(connection: socket.socket) -> None:
  with contextlib.suppress(OSError):
    connection.shutdown(socket.SHUT_RDWR)


def _encoded(token: str) -> bytes:
  return token.encode("utf-8", "surrogatepass")  # whatever JSON can hold


def _drain(connection: socket.socket) -> None:
  connection.settimeout(5.0)
  while connection.recv(1 << 20):
    pass


class ReceiverProcess:
  """A receiver on this machine, in a process of its own that ends with this one, and with it what
  it holds.

  Args:
    root: as of `FileReceiver`, as are `host` and `port`.
    token: None makes one.
  Raises:
    OSError: it did not start; the message has its last words.
  """

  def __init__(
    self,
    root: str | os.PathLike[str] = DEFAULT_ROOT,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
  ):
    self.token, self._root = token or secrets.token_hex(16), Path(root)
    self._reviving = threading.Lock()
    self._process, self.address = self._started(host, port)

  def alive(self) -> bool:
    """Whether its process runs. Never blocks."""
    return self._process.poll() is None

  def revive(self) -> None:
    """Starts it again at its address if it has died, with nothing that it held. Raises OSError as
    the first start does.
    """
    with self._reviving:
      if not self.alive():
        self.close()
        host, _, port = self.address.rpartition(":")
        self._process, self.address = self._started(host.strip("[]"), int(port))

  def _started(self, host: str, port: int) -> "tuple[subprocess.Popen[str], str]":
    """The process and its address."""
    command = [sys.executable, "-m", "agentrl_jax.transfer.receive", f"--root={self._root}"]
    command += [f"--host={host}", f"--port={port}", "--with-parent"]
    environment: Mapping[str, str] = os.environ | {TOKEN: self.token}
    process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
      cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    said, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    line = process.stdout.readline().strip() if said else ""
    if not line.startswith("receiving at "):
      self._end(process)
      raise OSError(f"the receiver did not start: {line or 'no word from it'}")
    return process, line.removeprefix("receiving at ")

  def close(self) -> None:
    """Ends it. Idempotent."""
    self._end(self._process)

  def _end(self, process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # its sign to end
    try:
      process.wait(5)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    process.stdout.close()
    sweep(self._root)  # a killed one removed nothing itself


def main() -> None:
  parser = argparse.ArgumentParser(description="Receives weights for a server on this machine.")
  parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
  parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
  parser.add_argument("--root", default=DEFAULT_ROOT, help="directory that the server sees")
  parser.add_argument(
    "--with-parent", action="store_true", help="end when standard input does, not at Ctrl-C"
  )
  arguments = parser.parse_args()
  token = os.environ.get(TOKEN)
  if not token:
    sys.exit(f"${TOKEN} is empty: give both ends the same secret")
  # However it is stopped (docker, SLURM, kill), what it holds in memory must go.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  if arguments.with_parent:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    receiver = FileReceiver(arguments.root, token, host=arguments.host, port=arguments.port)
  except OSError as error:
    print(error, flush=True)  # where whoever started it reads
    sys.exit(1)
  print(f"receiving at {receiver.address}", flush=True)
  with contextlib.suppress(KeyboardInterrupt):
    sys.stdin.read() if arguments.with_parent else threading.Event().wait()
  receiver.close()


if __name__ == "__main__":
  main()
