"""Connections to a receiver: what arrives is what was staged, and no fault on the way touches the
server.
"""

import asyncio
import collections
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax.transfer import receive, received, wire
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.delta import overwrite
from agentrl_jax.transfer.plan import Bucket, Plan, Segment
from agentrl_jax.transfer.receive import FileReceiver, ReceiverProcess
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.stage import Staged, fingerprint_of, tensor_hash
from agentrl_jax.transfer.transports.auto import Servers, fastest, tcp
from agentrl_jax.transfer.transports.tcp import TcpTransport
from tests.reference.transfer import random_weights
from tests.transfer.test_push import MODEL, rig
from tests.transfer.test_transports import ARRAYS, files, staged

TOKEN = "secret"
FAULTS = ["drop", "truncate", "flip", "replay", "lose", "hang"]


class Peer:
  """A server's place in a delivery."""

  url, deadline = "http://server", 20.0


class Everywhere(dict):
  """The same receiver beside every server."""

  def __init__(self, address):
    self.address = address

  def get(self, _):
    return self.address

  def values(self):
    return [self.address]


def local(root, *, owned=True, **options):
  """A transport to a receiver in this process, which its `close` ends if it is owned."""
  receiver = FileReceiver(root, TOKEN, stall_seconds=5.0)
  receiver.revive = lambda: None  # as a process it could be started again
  transport = TcpTransport({}, TOKEN, process=receiver if owned else None, **options)
  transport.receivers = Everywhere(receiver.address)
  return transport


class Tap:
  """Passes frames on to a receiver and its answers back, with one fault at the n-th frame."""

  def __init__(self, address):
    self.there = address.rsplit(":", 1)
    self.fault, self.at, self.seen = None, -1, 0
    self.lock = threading.Lock()
    self.listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
    threading.Thread(target=self.accept, daemon=True).start()

  def arm(self, fault, at):
    self.fault, self.at, self.seen = fault, at, 0

  def accept(self):
    with contextlib.suppress(OSError):
      while True:
        near, _ = self.listener.accept()
        threading.Thread(target=self.serve, args=(near,), daemon=True).start()

  def serve(self, near):
    """One frame and its answer at a time; the connection ends with either side."""
    with near, contextlib.suppress(OSError):
      far = socket.create_connection((self.there[0], int(self.there[1])))
      with far:
        while frame := read_frame(near):
          with self.lock:
            fault = self.fault if self.seen == self.at else None
            self.seen += 1
          if fault == "drop":
            return
          if fault == "hang":
            near.recv(1)
            return
          if fault == "flip":
            frame[-1] ^= 1
          far.sendall(frame[: len(frame) // 2] if fault == "truncate" else frame)
          if fault == "truncate":
            return
          if fault == "replay":
            far.sendall(frame)
          answer = read_frame(far)
          if fault == "lose" or not answer:
            return
          near.sendall(answer)


def read_frame(connection):
  data = bytearray()
  size = wire.HEADER_BYTES
  while len(data) < size:
    chunk = connection.recv(size - len(data))
    if not chunk:
      return None
    data += chunk
    if len(data) == wire.HEADER_BYTES:
      size = wire.frame_size(bytes(data), max_payload_bytes=1 << 30)
  return data


def at(weights, version):
  return jax.tree.map(lambda w: w + jnp.float32(version), weights)


@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_what_was_staged(tmp_path, bucket_bytes, dtype):
  transport = local(tmp_path, connections=3, bucket_bytes=bucket_bytes)
  packed = staged(transport, dtype)
  asyncio.run(transport.deliver(packed, Peer(), 1))
  (directory,) = tmp_path.iterdir()
  assert str(directory) == transport._links["run-1"][Peer.url].path
  assert len(files(directory)) == len(packed.plan.buckets)
  loaded = {}
  for path in files(directory):
    loaded |= load_file(path)
  assert loaded.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(loaded[name].astype(np.float32), array)
    assert str(loaded[name].dtype) == dtype
  transport.release("run-1")
  gone_within(tmp_path, 5.0)
  transport.close()


def many(count):
  """A staged bucket of so many numbers with long names, each its own."""
  values = np.arange(count, dtype=np.int32)
  padded = np.zeros((count, wire.ALIGN), np.uint8)
  padded[:, :4] = values.view(np.uint8).reshape(count, 4)
  segments = tuple(
    Segment(f"{'x' * 160}.{n:06}", 0, (0, 1), "int32", (1,), ((0, 1),), 0, n * wire.ALIGN, 4)
    for n in range(count)
  )
  buckets = (Bucket(0, 0, padded.size),)
  hashes = tuple(tensor_hash(row[:4]) for row in padded)
  rows = [(0, s.name, s.part, s.shape, s.dtype, h) for s, h in zip(segments, hashes, strict=True)]
  planned = Plan(segments, (), buckets, {}, f"many {count}")
  return Staged("run-1", planned, {(0, 0): padded.reshape(-1)}, hashes, fingerprint_of(rows))


def test_a_hundred_thousand_tensors_are_said_in_several_frames(tmp_path):
  """Their names, and the metadata of their one bucket, are each more than a frame takes."""
  packed = many(100_000)
  tensors = tuple((s.name, s.shape, s.dtype) for s in packed.plan.segments)
  with pytest.raises(wire.WireError, match="bytes, at most 16777216"):
    wire.encode_begin(7, 1, wire.Begin(TOKEN, "run-1", tensors))
  transport = local(tmp_path, connections=1)
  asyncio.run(transport.deliver(packed, Peer(), 1))
  (directory,) = tmp_path.iterdir()
  loaded = {}
  for path in files(directory):
    loaded |= load_file(path)
  assert [loaded[s.name][0] for s in packed.plan.segments] == list(range(100_000))
  transport.close()


@pytest.mark.parametrize("delta", [None, overwrite], ids=["whole", "delta"])
def test_a_bucket_of_more_tensors_than_a_frame_says(tmp_path, monkeypatch, delta):
  monkeypatch.setattr(wire, "TENSORS_A_FRAME", 3)
  transport = local(tmp_path, delta=delta, connections=2, bucket_bytes=1 << 20)
  first = many(7)
  asyncio.run(transport.deliver(first, Peer(), 1))
  transport.retain(first, 1)
  buffer = first.buffers[0, 0].copy()
  buffer[5 * wire.ALIGN] = 77
  hashes = [*first.hashes[:5], tensor_hash(buffer[80:84]), first.hashes[6]]
  rows = [
    (0, s.name, s.part, s.shape, s.dtype, h)
    for s, h in zip(first.plan.segments, hashes, strict=True)
  ]
  second = Staged("run-2", first.plan, {(0, 0): buffer}, tuple(hashes), fingerprint_of(rows))
  how = asyncio.run(transport.deliver(second, Peer(), 2)).how
  assert how == ("overwrite from version 1" if delta else "")
  directory = transport._links["run-2"][Peer.url].path
  loaded = {}
  for path in files(Path(directory)):
    loaded |= load_file(path)
  got = [loaded[s.name].tolist() for s in first.plan.segments]
  assert got == [[0], [1], [2], [3], [4], [77], [6]]
  transport.close()


def test_an_announcement_that_is_cut_or_wrong_leaves_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(wire, "TENSORS_A_FRAME", 2)
  receiver = FileReceiver(tmp_path, TOKEN)
  tensors = tuple((f"t{n}", (1,), "int32") for n in range(5))
  first, second, third = wire.encode_opening(7, 1, wire.Begin(TOKEN, "run-1", tensors))
  end = wire.encode_end(7, 1, wire.End(0, 0, 0, fingerprint_of([])))
  for frames, message in [
    ([first, second], ""),  # and no more
    ([second], "the token is not this receiver's"),
    ([first, third, third], "t4 is announced twice"),
    ([first, second, second], "2 tensors are announced, 1 were to come"),
    ([first, second, end], "END of round 7, round 7 has 1 tensors to announce"),
    ([first, second, third, second], "MORE inside round 7"),
    ([first, second, third, end], "t0 was not received (5 missing)"),
  ]:
    assert message in refused(receiver.address, *frames)
    gone_within(tmp_path, 5.0)
  host, port = receiver.address.rsplit(":", 1)
  with socket.create_connection((host, int(port)), 10.0) as connection:
    for frame in (first, second):
      connection.sendall(frame)
      receive.read_answer(connection)
    receiver._closed = True  # as `close` begins
    connection.sendall(third)
    with pytest.raises(wire.WireError, match="this receiver is closing"):
      receive.read_answer(connection)
  assert list(tmp_path.iterdir()) == [] and receiver._rounds == {}
  receiver.close()


def gone_within(root, seconds):
  """Waits until nothing is left under `root`."""
  deadline = time.monotonic() + seconds
  while list(root.iterdir()):
    assert time.monotonic() < deadline, list(root.iterdir())
    time.sleep(0.005)


def refused(address, *frames):
  """What a receiver answers to frames on one connection, until it refuses."""
  host, port = address.rsplit(":", 1)
  with socket.create_connection((host, int(port)), 10.0) as connection:
    for frame in frames:
      connection.sendall(frame)
      try:
        receive.read_answer(connection)
      except wire.WireError as error:
        return str(error)
  return ""


def test_a_receiver_takes_only_what_was_agreed(tmp_path):
  receiver = FileReceiver(tmp_path, TOKEN)
  begin = wire.Begin(TOKEN, "run-1", (("a", (4,), "float32"),))
  opened = wire.encode_begin(7, 1, begin)
  wrong = wire.encode_begin(7, 1, begin._replace(token="für alle"))
  large = wire.encode_begin(7, 1, begin._replace(tensors=(("a", (1 << 60,), "uint8"),)))
  end = wire.encode_end(7, 1, wire.End(0, 0, 0, "0" * 32))
  entry = wire.Entry("a", (0, 2), "float32", (2,), ((0, 2),), 0, 8, wire.tensor_hash(bytes(8)))
  part = b"".join(wire.encode_bucket(7, 1, [entry], bytes(8)))
  answers = {
    "the token is not this receiver's": [wrong],
    "round 7 was not begun": [wire.encode_join(7, 1, TOKEN)],
    f"{tmp_path} has": [large],
    "a was not received (1 missing)": [opened, end],
    "a: 1 of its 2 parts were received": [opened, part, end],
    "frame of round 8": [opened, wire.encode_end(8, 1, wire.End(0, 0, 0, "0" * 32))],
    "BEGIN inside round 7": [opened, opened],
    "END of round 7, round 7 has 2 tensors": [
      wire.encode_begin(7, 1, begin._replace(further=2)),
      end,
    ],
    "given up by the sender: enough": [opened, wire.encode_abort(7, 1, "enough")],
    "frame starts with": [b"GET / HTTP/1.1\r\n" + bytes(48)],
    "metadata and": [opened, wire._HEADER.pack(b"AWT1", 1, 7, 1, 1 << 30, 0, 0, 0)],
  }
  for message, frames in answers.items():
    assert message in refused(receiver.address, *frames)
    gone_within(tmp_path, 5.0)
  receiver.close()


def test_a_round_that_is_begun_twice_keeps_its_files(tmp_path):
  receiver = FileReceiver(tmp_path, TOKEN)
  opened = wire.encode_begin(7, 1, wire.Begin(TOKEN, "run-1", ()))
  end = wire.encode_end(7, 1, wire.End(0, 0, 0, fingerprint_of([])))
  host, port = receiver.address.rsplit(":", 1)
  with socket.create_connection((host, int(port)), 10.0) as first:
    for frame in (opened, end):
      first.sendall(frame)
      receive.read_answer(first)
    assert "round 7 was begun before" in refused(receiver.address, opened)
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == 1
    assert "a frame after the end" in refused(receiver.address, wire.encode_join(7, 1, TOKEN), end)
  gone_within(tmp_path, 5.0)
  receiver.close()


def test_a_receiver_without_descriptors_listens_again(tmp_path, monkeypatch):
  receiver = FileReceiver(tmp_path, TOKEN)
  listener, left = receiver._listener, [OSError(errno.EMFILE, "Too many open files")]

  class Short:
    def __getattr__(self, name):
      return getattr(listener, name)

    def accept(self):
      if left:
        raise left.pop()
      return listener.accept()

  monkeypatch.setattr(receiver, "_listener", Short())
  for _ in range(2):  # the first is taken by the accept that waits already
    assert "not begun" in refused(receiver.address, wire.encode_join(7, 1, TOKEN))
  assert not left
  receiver.close()


def test_a_bucket_that_was_not_written_is_not_vouched_for(tmp_path, monkeypatch):
  """Its file system filled up on one connection, and END comes on the other."""
  receiver = FileReceiver(tmp_path, TOKEN)
  entry = wire.Entry("a", (0, 1), "float32", (2,), ((0, 2),), 0, 8, wire.tensor_hash(bytes(8)))
  bucket = b"".join(wire.encode_bucket(7, 1, [entry], bytes(8)))
  rows = [(0, "a", (0, 1), (2,), "float32", entry.hash)]
  end = wire.encode_end(7, 1, wire.End(1, 1, 8, fingerprint_of(rows)))

  def full(path, frame):
    raise OSError(errno.ENOSPC, "No space left on device")

  host, port = receiver.address.rsplit(":", 1)
  with socket.create_connection((host, int(port)), 10.0) as first:
    first.sendall(wire.encode_begin(7, 1, wire.Begin(TOKEN, "run-1", (("a", (2,), "float32"),))))
    receive.read_answer(first)
    monkeypatch.setattr(received, "_write", full)
    joined = wire.encode_join(7, 1, TOKEN)
    assert "No space left" in refused(receiver.address, joined, bucket)
    first.sendall(end)
    with pytest.raises(wire.WireError, match="given up: a bucket was not written"):
      receive.read_answer(first)
  gone_within(tmp_path, 5.0)
  receiver.close()


def test_a_trainer_that_is_gone_leaves_nothing(tmp_path):
  transport = local(tmp_path)
  packed = staged(transport)
  asyncio.run(transport.deliver(packed, Peer(), 1))
  assert len(list(tmp_path.iterdir())) == 1
  for connection in transport._links["run-1"][Peer.url]._sockets:
    connection.close()  # as the kernel does for a process that was killed
  gone_within(tmp_path, 5.0)
  transport.close()


def test_who_does_not_listen_is_named(tmp_path):
  transport = local(tmp_path)
  packed = staged(transport)
  transport.receivers = {}
  with pytest.raises(CallError, match="http://server has no receiver"):
    asyncio.run(transport.deliver(packed, Peer(), 1))
  transport.receivers = {Peer.url: "127.0.0.1:9"}
  with pytest.raises(CallError, match=r"http://server: receiver 127.0.0.1:9: .*refused") as caught:
    asyncio.run(transport.deliver(packed, Peer(), 1))
  assert caught.value.failure == "unreachable"
  transport.close()


@pytest.mark.parametrize("connections", [1, 3])
def test_faults_on_the_way_touch_no_server(tmp_path, connections, capsys):  # W9, W19
  """Each kind of fault at each frame of a round: the server goes on with the old version."""
  weights = random_weights(MODEL)
  transport = local(tmp_path / "received", connections=connections, bucket_bytes=1 << 10)
  tap = Tap(transport.receivers.address)
  transport.receivers = Everywhere(tap.address)

  async def main():
    version, ended = 1, collections.Counter()
    async with rig(tmp_path, 1, 20.0, transport=transport) as (publisher, (fake,)):
      (peer,) = publisher._peers
      assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED
      frames = tap.seen
      assert frames > 4 + connections
      for fault in FAULTS:
        for n in range(frames) if fault != "hang" else (0, frames // 2, frames - 1):
          before = None if fake.paused else fake.answer()
          version += 1
          tap.arm(fault, n)
          peer.control.deadline = 1.0 if fault == "hang" else 20.0
          start = time.monotonic()
          report = await publisher.publish(at(weights, version), version)
          assert time.monotonic() - start < 8.0, (fault, n)
          tap.arm(None, -1)
          peer.control.deadline = 20.0
          ended[str(report.state)] += 1
          if report.state is State.ABORTED:
            assert f"{fake.url}: receiver {tap.address} " in report.message
            assert fake.answer() == before, (fault, n)
          else:  # sent again once all was there: it changes nothing, or takes the files away
            assert fault == "replay", (fault, n, str(report))
          if publisher.blocked:
            await publisher.recover()
          version += 1
          report = await publisher.publish(at(weights, version), version)
          assert report.state is State.COMMITTED, str(report)
          assert fake.answer()[0] == f"run:{version}"
    return ended

  ended = asyncio.run(main())
  assert ended["aborted"] > 20
  assert list((tmp_path / "received").iterdir()) == []
  with capsys.disabled():
    print(f"\ntcp, {connections} connections: {sum(ended.values())} faults, {dict(ended)}")


def test_a_dead_receiver_beside_a_live_one(tmp_path):  # W20
  """The server that got nothing is paused beside the commit, and written later."""
  weights = random_weights(MODEL)
  transport = local(tmp_path)
  address = transport.receivers.address

  async def main():
    async with rig(tmp_path, 2, 30.0, transport=transport) as (publisher, fakes):
      transport.receivers = {fakes[0].url: address, fakes[1].url: "127.0.0.1:9"}
      report = await publisher.publish(at(weights, 1), 1)
      assert report.state is State.PARTIAL
      assert report.receivers == {
        fakes[0].url: State.COMMITTED, fakes[1].url: State.FENCED,
      }  # fmt: skip
      assert [fake.paused for fake in fakes] == [False, True]
      assert f"{fakes[1].url} missed version 1" in report.message
      transport.receivers[fakes[1].url] = address
      await publisher.recover()
      assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED
      assert len({fake.answer() for fake in fakes}) == 1

  asyncio.run(main())


def test_a_delivery_that_is_cancelled_ends_at_once(tmp_path):
  transport = local(tmp_path)
  packed = staged(transport)
  tap = Tap(transport.receivers.address)
  transport.receivers = Everywhere(tap.address)
  tap.arm("hang", 1)

  async def main():
    running = asyncio.create_task(transport.deliver(packed, Peer(), 1))
    while tap.seen < 2:
      await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
      await running

  start = time.monotonic()
  asyncio.run(main())  # waits for the thread, too
  assert time.monotonic() - start < 5.0
  gone_within(tmp_path, 5.0)
  transport.close()


def test_a_receiver_process_ends_with_its_owner(tmp_path):
  process = ReceiverProcess(tmp_path)
  process._process.send_signal(signal.SIGINT)  # Ctrl-C reaches it too, and is its owner's to handle
  time.sleep(0.2)
  transport = TcpTransport({Peer.url: process.address}, process.token, process=process)
  packed = staged(transport)
  asyncio.run(transport.deliver(packed, Peer(), 1))
  assert len(list(tmp_path.iterdir())) == 1
  pid = process._process.pid
  transport.close()
  assert process._process.poll() is not None
  assert not os.path.exists(f"/proc/{pid}")
  assert list(tmp_path.iterdir()) == []
  with pytest.raises(OSError, match=r"the receiver did not start: .*/proc/nowhere"):
    ReceiverProcess("/proc/nowhere")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_receiver_at_an_address_of_ipv6(tmp_path):
  receiver = FileReceiver(tmp_path, TOKEN, host="::1")
  assert receiver.address.startswith("[::1]:")
  transport = TcpTransport({Peer.url: receiver.address}, TOKEN)
  asyncio.run(transport.deliver(staged(transport), Peer(), 1))
  assert len(list(tmp_path.iterdir())) == 1
  transport.close()
  receiver.close()


def test_a_receiver_that_is_terminated_leaves_nothing(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-m", "agentrl_jax.transfer.receive", f"--root={tmp_path}"],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {receive.TOKEN: TOKEN},
    cwd=Path(__file__).parents[2],
  )
  try:
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("receiving at ")
    transport = TcpTransport({Peer.url: address}, TOKEN)
    asyncio.run(transport.deliver(staged(transport), Peer(), 1))
    assert len(list(tmp_path.iterdir())) == 1
    process.terminate()
    assert process.wait(30) == 0
    assert list(tmp_path.iterdir()) == []
    transport.close()
  finally:
    process.kill()
    process.communicate()


def test_what_a_killed_receiver_held_goes_and_what_a_living_one_holds_stays(tmp_path):
  """One has a whole round and half of one; nothing of it can remove them. The next round has it
  started again, at the same address.
  """
  living = local(tmp_path)
  asyncio.run(living.deliver(staged(living), Peer(), 1))
  kept = set(tmp_path.iterdir())
  process = ReceiverProcess(tmp_path)
  transport = TcpTransport({Peer.url: process.address}, process.token, process=process)
  asyncio.run(transport.deliver(staged(transport), Peer(), 1))
  begin = wire.Begin(process.token, "half", (("a", (4,), "float32"),))
  host, port = process.address.rsplit(":", 1)
  with socket.create_connection((host, int(port)), 10.0) as connection:
    connection.sendall(wire.encode_begin(9, 1, begin))
    receive.read_answer(connection)
    process._process.kill()
    process._process.wait(30)
  left = set(tmp_path.iterdir()) - kept
  assert sorted(path.suffix for path in left) == ["", ".partial"]
  saved = tmp_path.with_name("saved")
  shutil.copytree(tmp_path, saved)
  address, dead = process.address, process._process.pid
  refusal = pytest.raises(CallError, match=f"receiver {address}: the receiver did not start")
  with socket.create_server((host, int(port))), refusal:  # another has its port
    asyncio.run(transport.deliver(staged(transport, key="run-2"), Peer(), 2))
  assert set(tmp_path.iterdir()) == kept
  asyncio.run(transport.deliver(staged(transport, key="run-2"), Peer(), 2))
  assert (process.address, process._process.pid != dead) == (address, True)
  assert len(set(tmp_path.iterdir()) - kept) == 1
  transport.close()  # of the process that started it
  assert set(tmp_path.iterdir()) == kept
  assert len(list(saved.iterdir())) == 3
  other = FileReceiver(saved, TOKEN)  # one that was started by hand, again
  assert list(saved.iterdir()) == []
  other.close()
  living.close()
  assert list(tmp_path.iterdir()) == []


def test_auto_takes_receivers_that_answer(tmp_path, monkeypatch):
  receiver = FileReceiver(tmp_path, TOKEN)
  away = "http://192.0.2.7:1"
  choose = fastest(tmp_path, receivers={away: receiver.address})
  assert f"tcp: ${receive.TOKEN} is empty" in str(choose(Servers([away], 1)))
  monkeypatch.setenv(receive.TOKEN, TOKEN)
  assert choose(Servers([away], 1)).transport.name == "tcp"
  address = receiver.address
  receiver.close()
  assert f"tcp: receiver {address} of {away}: " in str(choose(Servers([away], 1)))
  with pytest.raises(ValueError, match=f"{away} is not on this machine"):
    tcp()(Servers([away], 1))
