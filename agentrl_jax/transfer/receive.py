"""The receiving end of `transports.tcp`: beside a server, from connections into files of memory.

    python -m agentrl_jax.transfer.receive --host=HOST --port=PORT --root=DIRECTORY

A bucket is checked before a byte of it is written, and the server sees a round's files only when
END has proved that all of them are there. They stay as long as the round's first connection: what a
trainer that is gone had sent goes with it, and what a killed receiver held goes when the next one
starts. Tensors that come in parts, from several processes, have
a file each, into which their boxes are written. A delta is applied to a copy of its base, so that
none can be applied twice, and every tensor it makes is checked against the hash that it must have.
"""

import argparse
import contextlib
import hmac
import itertools
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl_jax.transfer import delta, wire
from agentrl_jax.transfer.layout import full, slices
from agentrl_jax.transfer.owned import make_owned, sweep
from agentrl_jax.transfer.plan import ITEM_BYTES
from agentrl_jax.transfer.stage import NUMPY_DTYPES, tensor_hash
from agentrl_jax.transfer.transports.disk import SHARED_MEMORY, safetensors_header
from agentrl_jax.transfer.wire import Base, BaseError, Command, Entry, Frame, WireError

TOKEN = "AGENTRL_TRANSFER_TOKEN"  # the environment variable that both ends read it from
DEFAULT_ROOT = f"{SHARED_MEMORY}-received"
_START_SECONDS = 120.0  # for a process to say where it receives
_DROP_SECONDS = 3.0  # for buckets that are being written into memory
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
    self._rounds: dict[tuple[int, int], _Round] = {}
    self._lock = threading.Lock()
    self._sockets: set[socket.socket] = set()
    self._closed = False
    self.root.mkdir(parents=True, mode=0o700, exist_ok=True)
    sweep(self.root)
    self._listener = socket.create_server((host, port), backlog=connections)
    threading.Thread(target=self._accept, name="receive", daemon=True).start()

  @property
  def address(self) -> str:
    """HOST:PORT."""
    host, port = self._listener.getsockname()[:2]
    return f"{host}:{port}"

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
    began: list[_Round] = []
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

  def _talk(self, connection: socket.socket, began: "list[_Round]") -> None:
    stream = _Frames(connection, self.stall_seconds)
    first = stream.read(0, self.stall_seconds)
    if first is None:
      return
    if not hmac.compare_digest(_encoded(first.token), _encoded(self.token)):
      raise WireError("the token is not this receiver's")
    id = (first.round, first.version)
    if first.begin is not None:
      while (opened := first.begin).further:
        connection.sendall(wire.encode_done(*id))
        if (frame := stream.read(0, self.stall_seconds)) is None:
          return
        first = wire.with_more(first, frame)
        assert first.begin is not None
      base = opened.base
      with self._lock:
        if id in self._rounds:  # its files have the same names
          raise WireError(f"round {first.round} was begun before")
        held = None if base is None else self._rounds.get((base.round, base.version))
      round = _Round(first, self.root, held)
      began.append(round)
      with self._lock:
        self._rounds[id] = round
    else:
      with self._lock:
        found = self._rounds.get(id)
      if found is None:
        raise WireError(f"round {first.round} was not begun")
      round = found
    connection.sendall(wire.encode_done(*id))
    while (frame := stream.read(self.bucket_bytes)) is not None:
      connection.sendall(wire.encode_done(*id, round.take(frame)))


class _Place(NamedTuple):
  """Where a tensor lies in a round's files."""

  file: str
  offset: int
  nbytes: int


class _Round:
  """One round's files. Raises WireError where a sender is wrong, OSError where they do not fit.

  Args:
    held: the round that its deltas are to be applied to, where the sender named one; it is checked
      here.
  """

  def __init__(self, first: Frame, root: Path, held: "_Round | None" = None):
    assert first.begin is not None
    self.id = (first.round, first.version)
    expected = {name: (shape, dtype) for name, shape, dtype in first.begin.tensors}
    self.base = _checked(first.begin.base, held, expected)
    self.fingerprint = ""  # until END
    self.ledger = wire.Ledger(first.round, first.version, expected)
    nbytes = sum(ITEM_BYTES[dtype] * math.prod(shape) for shape, dtype in expected.values())
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    if nbytes > free:
      raise WireError(
        f"{root} has {free / 1e6:.0f} MB free, the weights need {nbytes / 1e6:.0f} MB"
      )
    self.directory = root / f"{first.begin.key}-{first.round:016x}"
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
  base: Base | None, held: _Round | None, expected: Mapping[str, tuple[tuple[int, ...], str]]
) -> _Round | None:
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

  Raises:
    OSError: it did not start; the message has its last words.
  """

  def __init__(self, root: str | os.PathLike[str] = DEFAULT_ROOT):
    self.token, self._root = secrets.token_hex(16), Path(root)
    command = [sys.executable, "-m", "agentrl_jax.transfer.receive", f"--root={root}"]
    environment: Mapping[str, str] = os.environ | {TOKEN: self.token}
    self._process = subprocess.Popen(
      [*command, "--with-parent"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
      cwd=Path(__file__).parents[2],
    )
    assert self._process.stdout is not None
    said, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
    line = self._process.stdout.readline().strip() if said else ""
    if not line.startswith("receiving at "):
      self.close()
      raise OSError(f"the receiver did not start: {line or 'no word from it'}")
    self.address = line.removeprefix("receiving at ")

  def close(self) -> None:
    """Ends it. Idempotent."""
    process = self._process
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
  receiver = FileReceiver(arguments.root, token, host=arguments.host, port=arguments.port)
  print(f"receiving at {receiver.address}", flush=True)
  with contextlib.suppress(KeyboardInterrupt):
    sys.stdin.read() if arguments.with_parent else threading.Event().wait()
  receiver.close()


if __name__ == "__main__":
  main()
