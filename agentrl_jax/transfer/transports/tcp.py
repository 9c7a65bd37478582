"""Framed buckets over several TCP connections into a receiver beside each server: nothing is shared
but the network.

Bytes arrive before the server pauses, each bucket checked and answered; the server then loads the
receiver's files. What a receiver holds lives as long as the round's first connection, so freeing
it, here or by dying, is closing that. With deltas the last committed round is kept on both ends and
the next is sent by its difference; the server loads whole files all the same, so what it held
before, and whether it was restarted, does not matter.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from agentrl_jax.transfer import wire
from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.delta import Encode
from agentrl_jax.transfer.difference import Difference, difference
from agentrl_jax.transfer.plan import Bucket, Plan, published_shapes
from agentrl_jax.transfer.receive import ReceiverProcess, read_answer, set_options
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports import Delivery
from agentrl_jax.transfer.transports.disk import load_files
from agentrl_jax.transfer.wire import Base, BaseError, Begin, End, Frame, WireError


class TcpTransport:
  """Pushes through `agentrl_jax.transfer.receive`.

  Args:
    receivers: HOST:PORT of the receiver beside each server, by the server's URL.
    token: that the receivers were given.
    connections: to each receiver; one bucket at a time travels on each.
    bucket_bytes: most bytes of a frame, unless one tensor is larger.
    process: a receiver that was started for this transport: one that has died is started again for
      the next round; it is ended by `close`.
    delta: how a round is said by its difference from the last committed one, `delta.xor` or
      `delta.overwrite`. Both ends then keep that round's bytes. None sends everything always.
    full_every: of so many rounds, one is sent in full all the same.
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
    delta: Encode | None = None,
    full_every: int = 100,
  ):
    if connections < 1 or full_every < 1:
      raise ValueError(
        f"connections is {connections} and full_every {full_every}, expected at least 1"
      )
    self.receivers = {url.rstrip("/"): address for url, address in receivers.items()}
    self.token, self.connections, self.bucket_bytes = token, connections, bucket_bytes
    self.delta, self.full_every = delta, full_every
    self._process = process
    self._links: dict[str, dict[str, _Link]] = {}  # by round and server
    self._kept: _Kept | None = None
    self._differences: dict[str, Difference] = {}  # by round, from what is kept
    self._lock = threading.Lock()

  def parts_go_to(self) -> tuple[str, ...]:
    """See `SendsParts.parts_go_to`. Deltas are of whole tensors: with them there are no parts."""
    return () if self.delta is not None else tuple(sorted(set(self.receivers.values())))

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Ordinary memory, freed with the staged weights."""
    del key
    return allocate(plan)

  async def deliver(self, staged: Staged, peer: Control, version: int) -> Delivery:
    """Brings all buckets to the receiver, which checks them. The server goes on meanwhile.

    Raises:
      CallError: naming server and receiver; nothing has changed on the server.
    """
    address = self.receivers.get(peer.url)
    if address is None:
      raise CallError("unreachable", f"{peer.url} has no receiver, there are {self.receivers}")
    since, how = None, ""
    if self.delta is not None:
      since, how = await asyncio.to_thread(self._difference, staged, peer.url)
    if since is not None:
      try:
        await self._bring(staged, peer, address, version, since)
      except BaseError as error:
        how = f"in full, as the receiver says: {error}"
      else:
        return Delivery(since.difference.nbytes, how)
    await self._bring(staged, peer, address, version, None)
    return Delivery(staged.plan.nbytes, how)

  async def _bring(
    self,
    staged: Staged,
    peer: Control,
    address: str,
    version: int,
    since: "_From | None",
  ) -> None:
    """Raises BaseError, too, when the receiver does not hold the base of `since`."""
    if self._process is not None:
      try:
        await asyncio.to_thread(self._process.revive)
      except OSError as error:
        raise CallError("unreachable", f"{peer.url}: receiver {address}: {error}") from error
    link = _Link(f"{peer.url}: receiver {address}", address, peer.deadline, version)
    if before := self._links.setdefault(staged.key, {}).pop(peer.url, None):
      before.close()
    self._links[staged.key][peer.url] = link
    try:
      await asyncio.to_thread(link.deliver, staged, self.token, self.connections, since)
    except BaseException:  # cancelled too: the thread ends when its connections do
      link.close()
      raise

  def _difference(self, staged: Staged, url: str) -> "tuple[_From | None, str]":
    """What to send to the receiver of `url` in place of everything, or None and why not."""
    kept = self._kept
    if kept is None:
      return None, "in full: nothing is kept from before"
    link = kept.links.get(url)
    if link is None:
      return None, f"in full: its receiver did not get version {kept.version}"
    if kept.staged.plan.digest != staged.plan.digest:
      return None, f"in full: the layout is not that of version {kept.version}"
    if kept.deltas + 1 >= self.full_every:
      return None, f"in full: {kept.deltas} rounds were sent as deltas"
    assert self.delta is not None
    name = f"{self.delta.__name__} from version {kept.version}"
    with self._lock:  # receivers are served at once, the difference is the same for all of them
      if staged.key not in self._differences:
        self._differences[staged.key] = difference(staged, kept.staged, self.delta)
      made = self._differences[staged.key]
    if made.nbytes >= staged.plan.nbytes:
      return None, f"in full: {name} is not smaller"
    base = Base(link.round, kept.version, kept.staged.fingerprint)
    return _From(base, made), name

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """Has the server load what its receiver holds; every rank slices what it needs."""
    del ranks
    await load_files(peer, self._links[staged.key][peer.url].path)

  def retain(self, staged: Staged, version: int) -> None:
    """Keeps the round as what the next is compared with, in place of the one before."""
    if self.delta is None or not self._links.get(staged.key):
      return
    links, before = self._links.pop(staged.key), self._kept
    deltas = before.deltas + 1 if before and any(link.since for link in links.values()) else 0
    for link in links.values():
      link.rest()
    self._kept = _Kept(staged, version, links, deltas)
    if before is not None:
      before.close()

  def release(self, key: str) -> None:
    """Lets the receivers drop the round's files."""
    with self._lock:
      self._differences.pop(key, None)
    for link in self._links.pop(key, {}).values():
      link.close()

  def close(self) -> None:
    """Ends the receiver that was started for this transport, and every connection."""
    for key in list(self._links):
      self.release(key)
    if self._kept is not None:
      self._kept.close()
      self._kept = None
    if self._process is not None:
      self._process.close()


class Joining(NamedTuple):
  """What a process must know to send its buckets of a round that another one opened."""

  where: str
  address: str
  seconds: float
  version: int
  round: int
  token: str
  connections: int


def join(joining: Joining, staged: Staged) -> None:
  """Sends the buckets that are here. Raises CallError."""
  link = _Link(joining.where, joining.address, joining.seconds, joining.version)
  link.round = joining.round
  try:
    link.join(staged, joining.token, joining.connections)
  finally:
    link.close()


def reaches(address: str, token: str, seconds: float) -> bool:
  """Whether a receiver that knows the token answers there: it knows of no such round."""
  link = _Link(f"receiver {address}", address, seconds, 0)
  try:
    link.join_round(token)
  except CallError as error:
    return error.failure == "refused" and "was not begun" in str(error)
  finally:
    link.close()
  return False


class _From(NamedTuple):
  """What a round is sent as the difference from."""

  base: Base
  difference: Difference


class _Kept(NamedTuple):
  """The last committed round: its bytes here, and the connections that keep them there."""

  staged: Staged
  version: int
  links: "Mapping[str, _Link]"  # by server
  deltas: int  # rounds since the last one in full

  def close(self) -> None:
    for link in self.links.values():
      link.close()


class _Link:
  """One round's connections to one receiver; `where` names both in errors."""

  def __init__(self, where: str, address: str, deadline: float, version: int):
    self.where, self.address, self.deadline, self.version = where, address, deadline, version
    self.round = secrets.randbits(63)  # no two attempts share it: a late frame belongs to none
    self.path = ""
    self.since: _From | None = None
    self._sockets: list[socket.socket] = []
    self._closed = self._in_use = False

  def deliver(self, staged: Staged, token: str, connections: int, since: _From | None) -> None:
    """Opens the round, sends every bucket, and has END checked. Raises CallError or BaseError."""
    self.since = since
    plan = staged.plan
    dtypes = {segment.name: segment.dtype for segment in plan.segments}
    tensors = tuple((n, shape, dtypes[n]) for n, shape in published_shapes(plan).items())
    begin = Begin(token, staged.key, tensors, since and since.base)
    with self._used():
      control = self._connect()
      for frame in wire.encode_opening(self.round, self.version, begin):
        self._exchange(control, frame)
      others = None
      if staged.join is not None:
        others = functools.partial(
          staged.join,
          Joining(self.where, self.address, self.deadline, self.version, self.round, token,
                  connections),
        )  # fmt: skip
      self._send_all(control, staged, token, connections, others)
      end = End(wire.frames_of(plan), len(tensors), plan.nbytes, staged.fingerprint)
      self.path = self._exchange(control, wire.encode_end(self.round, self.version, end)).path

  def join(self, staged: Staged, token: str, connections: int) -> None:
    """Sends the buckets that are here into a round that another process opened."""
    with self._used():
      self._send_all(self.join_round(token), staged, token, connections, None)

  def _send_all(
    self,
    first: socket.socket,
    staged: Staged,
    token: str,
    connections: int,
    others: Callable[[], None] | None,
  ) -> None:
    """Over `first` and further connections, while `others` has other processes send theirs."""
    waiting: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
    here = [b for b in staged.plan.buckets if (b.rank, b.index) in staged.buffers]
    for bucket in here:
      waiting.put(bucket)
    further = max(0, min(connections, len(here)) - 1)
    with concurrent.futures.ThreadPoolExecutor(2 + further) as pool:
      work = [pool.submit(self._send, first, staged, waiting)]
      work += [pool.submit(self._join, token, staged, waiting) for _ in range(further)]
      work += [pool.submit(others)] if others is not None else []
      for done in concurrent.futures.as_completed(work):
        if error := done.exception():
          self.close()  # so that the others end, too
          raise error

  def rest(self) -> None:
    """Ends all connections but the first, which keeps the files, and forgets what was sent."""
    self.since = None
    for connection in self._sockets[1:]:
      connection.close()
    del self._sockets[1:]

  def close(self) -> None:
    """Ends every connection, also those that a thread is using. Idempotent."""
    self._closed = True
    for connection in self._sockets:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      if not self._in_use:
        connection.close()

  @contextlib.contextmanager
  def _used(self) -> Iterator[None]:
    """While threads use the connections these are shut down, but not closed: a descriptor that is
    free becomes another connection's, and who was about to wait for this one would wait for that.
    """
    self._in_use = True
    try:
      yield
    finally:
      self._in_use = False
      if self._closed:
        self.close()

  def join_round(self, token: str) -> socket.socket:
    """A further connection of a round that was begun."""
    connection = self._connect()
    self._exchange(connection, wire.encode_join(self.round, self.version, token))
    return connection

  def _join(self, token: str, staged: Staged, waiting: "queue.SimpleQueue[Bucket]") -> None:
    self._send(self.join_round(token), staged, waiting)

  def _send(
    self, connection: socket.socket, staged: Staged, waiting: "queue.SimpleQueue[Bucket]"
  ) -> None:
    while True:
      try:
        bucket = waiting.get_nowait()
      except queue.Empty:
        return
      for frame in self._encoded(staged, bucket):
        self._exchange(connection, *frame)

  def _encoded(self, staged: Staged, bucket: Bucket) -> Iterator[tuple[bytes, memoryview]]:
    key = (bucket.rank, bucket.index)
    if self.since is None:
      entries = wire.bucket_entries(staged, bucket)
      for some, payload in wire.framed(entries, staged.buffers[key]):
        yield wire.encode_bucket(self.round, self.version, some, payload)
      return
    entries, changes, payload = self.since.difference.buckets[key]
    left = iter(changes)
    for some, part in wire.framed(entries, payload):
      how = list(itertools.islice(left, len(some)))
      yield wire.encode_delta(self.round, self.version, some, how, part)

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
    except BaseError:
      raise
    except WireError as error:
      raise CallError("refused", f"{self.where} refused: {error}") from error
