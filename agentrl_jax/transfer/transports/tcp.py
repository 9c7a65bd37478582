"""Framed buckets over several TCP connections into a receiver beside each server: nothing is shared
but the network.

Bytes arrive before the server pauses, each bucket checked and answered; the server then loads the
receiver's files. What a receiver holds lives as long as the round's first connection, so freeing
it, here or by dying, is closing that.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import secrets
import socket
from collections.abc import Mapping

import numpy as np

from agentrl_jax.transfer import wire
from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import Bucket, Plan
from agentrl_jax.transfer.receive import ReceiverProcess, read_answer, set_options
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports.disk import load_files
from agentrl_jax.transfer.wire import Begin, End, Frame, WireError


class TcpTransport:
  """Pushes through `agentrl_jax.transfer.receive`.

  Args:
    receivers: HOST:PORT of the receiver beside each server, by the server's URL.
    token: that the receivers were given.
    connections: to each receiver; one bucket at a time travels on each.
    bucket_bytes: most bytes of a frame, unless one tensor is larger.
    process: a receiver that was started for this transport; it is ended by `close`.
  """

  name = "tcp"
  per_rank = False
  align = wire.ALIGN

  def __init__(
    self,
    receivers: Mapping[str, str],
    token: str,
    *,
    connections: int = 4,
    bucket_bytes: int = 64 << 20,
    process: ReceiverProcess | None = None,
  ):
    if connections < 1:
      raise ValueError(f"connections is {connections}, expected at least 1")
    self.receivers = {url.rstrip("/"): address for url, address in receivers.items()}
    self.token, self.connections, self.bucket_bytes = token, connections, bucket_bytes
    self._process = process
    self._links: dict[str, dict[str, _Link]] = {}  # by round and server

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Ordinary memory, freed with the staged weights."""
    del key
    return allocate(plan)

  async def deliver(self, staged: Staged, peer: Control, version: int) -> int:
    """Brings all buckets to the receiver, which checks them. The server goes on meanwhile.

    Raises:
      CallError: naming server and receiver; nothing has changed on the server.
    """
    address = self.receivers.get(peer.url)
    if address is None:
      raise CallError("unreachable", f"{peer.url} has no receiver, there are {self.receivers}")
    link = _Link(f"{peer.url}: receiver {address}", address, peer.deadline, version)
    if before := self._links.setdefault(staged.key, {}).pop(peer.url, None):
      before.close()
    self._links[staged.key][peer.url] = link
    try:
      await asyncio.to_thread(link.deliver, staged, self.token, self.connections)
    except BaseException:  # cancelled too: the thread ends when its connections do
      link.close()
      raise
    return staged.plan.nbytes

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """Has the server load what its receiver holds; every rank slices what it needs."""
    del ranks
    await load_files(peer, self._links[staged.key][peer.url].path)

  def release(self, key: str) -> None:
    """Lets the receivers drop the round's files."""
    for link in self._links.pop(key, {}).values():
      link.close()

  def close(self) -> None:
    """Ends the receiver that was started for this transport, and every connection."""
    for key in list(self._links):
      self.release(key)
    if self._process is not None:
      self._process.close()


class _Link:
  """One round's connections to one receiver; `where` names both in errors."""

  def __init__(self, where: str, address: str, deadline: float, version: int):
    self.where, self.address, self.deadline, self.version = where, address, deadline, version
    self.round = secrets.randbits(63)  # no two attempts share it: a late frame belongs to none
    self.path = ""
    self._sockets: list[socket.socket] = []
    self._closed = False

  def deliver(self, staged: Staged, token: str, connections: int) -> None:
    """Opens the round, sends every bucket, and has END checked. Raises CallError."""
    tensors = tuple((s.name, s.shape, s.dtype) for s in staged.plan.segments)
    begin = Begin(token, staged.key, tensors)
    control = self._connect()
    self._exchange(control, wire.encode_begin(self.round, self.version, begin))
    waiting: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
    for bucket in staged.plan.buckets:
      waiting.put(bucket)
    further = min(connections, len(staged.plan.buckets)) - 1
    with concurrent.futures.ThreadPoolExecutor(1 + further) as pool:
      work = [pool.submit(self._send, control, staged, waiting)]
      work += [pool.submit(self._join, token, staged, waiting) for _ in range(further)]
      for done in concurrent.futures.as_completed(work):
        if error := done.exception():
          self.close()  # so that the others end, too
          raise error
    end = End(len(staged.plan.buckets), len(tensors), staged.plan.nbytes, staged.fingerprint)
    self.path = self._exchange(control, wire.encode_end(self.round, self.version, end)).path

  def close(self) -> None:
    """Ends every connection, also those that a thread is using. Idempotent."""
    self._closed = True
    for connection in self._sockets:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      connection.close()

  def _join(self, token: str, staged: Staged, waiting: "queue.SimpleQueue[Bucket]") -> None:
    connection = self._connect()
    self._exchange(connection, wire.encode_join(self.round, self.version, token))
    self._send(connection, staged, waiting)

  def _send(
    self, connection: socket.socket, staged: Staged, waiting: "queue.SimpleQueue[Bucket]"
  ) -> None:
    while True:
      try:
        bucket = waiting.get_nowait()
      except queue.Empty:
        return
      data = staged.buffers[bucket.rank, bucket.index]
      entries = wire.bucket_entries(staged, bucket)
      head, payload = wire.encode_bucket(self.round, self.version, entries, data)
      self._exchange(connection, head, payload)

  def _connect(self) -> socket.socket:
    host, _, port = self.address.rpartition(":")
    try:
      connection = socket.create_connection((host.strip("[]"), int(port)), self.deadline)
    except (OSError, ValueError) as error:
      raise CallError("unreachable", f"{self.where}: {error}") from error
    set_options(connection)
    self._sockets.append(connection)
    if self._closed:  # while it was being opened
      self.close()
    return connection

  def _exchange(self, connection: socket.socket, *runs: bytes | memoryview) -> Frame:
    """One frame and its answer, each within the deadline."""
    try:
      try:
        for run in runs:
          connection.sendall(run)
      except TimeoutError:
        raise
      except OSError:  # it may have said why before it hung up
        with contextlib.suppress(OSError):
          return read_answer(connection)
        raise
      return read_answer(connection)
    except TimeoutError as error:
      message = f"{self.where} did not answer within {self.deadline:g} s"
      raise CallError("lost", message) from error
    except OSError as error:
      raise CallError("lost", f"{self.where} broke off: {error}") from error
    except WireError as error:
      raise CallError("refused", f"{self.where} refused: {error}") from error
