"""Deltas: what they make is what a full push makes, or they are refused and everything is sent."""

import asyncio
import collections
import contextlib
import functools
import socket
import time
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.ops.quantize import OCP
from agentrl_jax.transfer import receive, wire
from agentrl_jax.transfer.delta import SAME, WHOLE, decode, encode, overwrite, xor
from agentrl_jax.transfer.difference import difference
from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.receive import FileReceiver
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.stage import source_layout, stage
from tests.reference.transfer import random_weights
from tests.transfer.test_push import MODEL, rig
from tests.transfer.test_tcp import TOKEN, Everywhere, Peer, Tap, at, gone_within, local
from tests.transfer.test_transports import files

BOTH = pytest.mark.parametrize("how", [xor, overwrite], ids=lambda how: how.__name__)
ITEMS = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


def as_bytes(array):
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def stepped(weights, version):
  """A small step: one element of one matrix of every layer."""
  query = weights.layers.attention.query.at[0, 0, 0].add(jnp.float32(version))
  attention = weights.layers.attention.replace(query=query)
  return weights.replace(layers=weights.layers.replace(attention=attention))


def test_deltas_by_hand():
  """Elements 1 and 3 of four change: bits 0101 and then zeros, 0x50, and the two new values."""
  base = as_bytes(np.array([1, 2, 3, 4], np.uint16))
  new = as_bytes(np.array([1, 0x0203, 3, 5], np.uint16))
  data = overwrite(new, base, 2)
  size = int.from_bytes(data[:8], "little")
  assert zlib.decompress(data[8 : 8 + size]) == b"\x50"
  assert data[8 + size :] == b"\x03\x02\x05\x00"
  # 2 ^ 0x0203 = 0x0201 and 4 ^ 5 = 1: the four low bytes, then the four high ones.
  assert zlib.decompress(xor(new, base, 2)) == b"\x00\x01\x00\x01" + b"\x00\x02\x00\x00"


@BOTH
@given(
  data=st.binary(max_size=96),
  flips=st.lists(st.tuples(st.integers(0, 95), st.integers(1, 255)), max_size=8),
  item=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=150, deadline=None)
def test_decoding_gives_the_bytes_back(how, data, flips, item):
  new = np.frombuffer(data[: len(data) // item * item], np.uint8)
  base = new.copy()
  for place, bits in flips:
    if place < len(base):
      base[place] ^= bits
  coded = np.frombuffer(how(new, base, item), np.uint8)
  assert decode(how.__name__, coded, base, item).tobytes() == new.tobytes()
  encoding, shorter = encode(how, new, base, item)
  assert encoding == (how.__name__ if len(coded) < len(new) else WHOLE)
  assert decode(encoding, np.frombuffer(shorter, np.uint8), base, item).tobytes() == new.tobytes()


@BOTH
@pytest.mark.parametrize("dtype", ITEMS)
def test_what_is_no_number_is_bytes_all_the_same(how, dtype):
  values = np.array([np.nan, -0.0, 0.0, 1.0] * 64, np.float32).astype(
    getattr(ml_dtypes, dtype, dtype)
  )
  base, item = as_bytes(values), ITEMS[dtype]
  other = base.copy()
  other[:item] ^= 1  # a NaN with another payload, or no NaN any more
  other.reshape(-1, item)[1] = base.reshape(-1, item)[2]  # -0 became 0
  coded = np.frombuffer(how(other, base, item), np.uint8)
  assert len(coded) < len(other)
  assert decode(how.__name__, coded, base, item).tobytes() == other.tobytes()


@BOTH
def test_what_does_not_decode_says_why(how):
  rng = np.random.default_rng(0)
  base = rng.integers(0, 256, 64, np.uint8)
  new = base.copy()
  new[::7] ^= 3
  good = np.frombuffer(how(new, base, 2), np.uint8)
  for n in range(len(good)):  # cut anywhere
    with pytest.raises(ValueError, match=r"bytes|deflated"):
      decode(how.__name__, good[:n], base, 2)
  for _ in range(2000):  # garbage, and a good one with a few bytes changed
    bad = good.copy()
    bad[rng.integers(0, len(bad), 3)] = rng.integers(0, 256, 3)
    if rng.random() < 0.3:
      bad = rng.integers(0, 256, rng.integers(0, 80), np.uint8)
    with contextlib.suppress(ValueError):
      assert len(decode(how.__name__, bad, base, 2)) == 64
  bomb = np.frombuffer(zlib.compress(bytes(1 << 26)), np.uint8)
  if how is overwrite:
    bomb = np.concatenate([as_bytes(np.array([len(bomb)], np.uint64)), bomb])
  with pytest.raises(ValueError, match="inflates to"):
    decode(how.__name__, bomb, base, 2)
  for encoding in (SAME, WHOLE):
    with pytest.raises(ValueError, match="1 bytes"):
      decode(encoding, good[:1], base, 2)


def pushes(root, transport, steps):
  """Publishes each tree of `steps`. Returns the reports and what the server then answers with."""

  async def main():
    out = []
    async with rig(root, 1, 30.0, transport=transport) as (publisher, (fake,)):
      for version, weights in enumerate(steps, start=1):
        report = await publisher.publish(weights, version)
        out.append((report, fake.answer()))
    return out

  return asyncio.run(main())


@BOTH
def test_a_delta_makes_what_a_full_push_makes(tmp_path, how):  # W26
  weights = random_weights(MODEL)
  small = stepped(weights, 1)
  steps = [weights, small, small, random_weights(MODEL, seed=1), stepped(weights, 9)]
  full = pushes(tmp_path, local(tmp_path / "full"), steps)
  made = pushes(tmp_path, local(tmp_path / "delta", delta=how, bucket_bytes=1 << 10), steps)
  assert [answer for _, answer in made] == [answer for _, answer in full]
  name = f"{how.__name__} from version"
  said = [report.delivered for report, _ in made]
  assert said[0] == ("in full: nothing is kept from before",)
  assert said[1:3] == [(f"{name} 1",), (f"{name} 2",)]
  assert all(report.state is State.COMMITTED for report, _ in made)
  shares = [report.delivered_share for report, _ in made]
  assert shares[0] == 1.0
  assert 0 < shares[1] < 0.1  # one matrix of many, of which one element differs
  assert shares[2] == 0.0  # nothing changed, nothing is sent
  assert shares[3] <= 1.0
  assert f"delivered {shares[1]:.3f} of the bytes {name} 1" in str(made[1][0])
  assert [report.delivered for report, _ in full] == [()] * len(steps)
  assert list((tmp_path / "delta").iterdir()) == []  # nothing stays behind


def test_what_would_not_be_smaller_is_sent_in_full(tmp_path):
  rng = np.random.default_rng(0)

  def noise(_):
    """Every bit of every element anew, but no infinity or NaN."""
    return jax.tree.map(
      lambda w: jnp.asarray((rng.integers(0, 1 << 32, w.shape, np.uint64) & 0xBFFFFFFF)
                            .astype(np.uint32).view(np.float32)),
      random_weights(MODEL),
    )  # fmt: skip

  (_, _), (report, _) = pushes(tmp_path, local(tmp_path / "r", delta=xor), [noise(0), noise(1)])
  assert report.state is State.COMMITTED, str(report)
  assert report.delivered == ("in full: xor from version 1 is not smaller",)
  assert report.delivered_share == 1.0


def test_one_round_of_many_is_sent_in_full(tmp_path):
  weights = random_weights(MODEL)
  transport = local(tmp_path / "r", delta=xor, full_every=3)
  made = pushes(tmp_path, transport, [stepped(weights, v) for v in range(7)])
  in_full = [report.delivered[0].startswith("in full") for report, _ in made]
  assert in_full == [True, False, False, True, False, False, True]
  assert made[3][0].delivered == ("in full: 2 rounds were sent as deltas",)


def rounds(root, transport, test, deadline=20.0):
  """Runs `test(publisher, fake)` after version 1."""
  weights = random_weights(MODEL)

  async def main():
    async with rig(root, 1, deadline, transport=transport) as (publisher, (fake,)):
      assert (await publisher.publish(weights, 1)).state is State.COMMITTED
      await test(functools.partial(stepped, weights), publisher, fake)

  asyncio.run(main())


def only(root):
  """The one directory under `root`, once the receiver has dropped the one before."""
  deadline = time.monotonic() + 5.0
  while len(found := list(root.iterdir())) != 1:
    assert time.monotonic() < deadline, found
    time.sleep(0.005)
  return found[0]


def expect(fake, weights, version, root):
  """The server answers with exactly these weights."""
  ((_, (_, want)),) = pushes(root, local(root / "expected"), [weights])
  assert fake.answer() == (f"run:{version}", want)


def test_a_base_that_is_not_the_one_is_never_served(tmp_path):  # W26
  transport = local(tmp_path / "r", delta=xor)

  async def test(step, publisher, fake):
    (path,) = files(only(tmp_path / "r"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor, which the next step does not touch
    path.write_bytes(data)
    report = await publisher.publish(step(2), 2)
    assert report.state is State.COMMITTED, str(report)
    (how,) = report.delivered
    assert how.startswith("in full, as the receiver says: ")
    assert how.endswith("the base does not give the bytes that version 2 has")
    assert report.delivered_share == 1.0
    for file in files(only(tmp_path / "r")):
      file.write_bytes(file.read_bytes()[:100])
    report = await publisher.publish(step(3), 3)
    assert "of the base" in report.delivered[0]
    for file in files(only(tmp_path / "r")):
      file.unlink()
    report = await publisher.publish(step(4), 4)
    assert "is gone" in report.delivered[0]
    kept = transport._kept
    transport._kept = kept._replace(staged=kept.staged._replace(fingerprint="0" * 32))
    report = await publisher.publish(step(5), 5)
    assert f"is {kept.staged.fingerprint} here, the sender's is {'0' * 32}" in report.delivered[0]
    report = await publisher.publish(step(6), 6)
    assert report.delivered == ("xor from version 5",)
    await asyncio.to_thread(expect, fake, step(6), 6, tmp_path)

  rounds(tmp_path, transport, test)


def test_a_receiver_that_was_replaced_gets_everything(tmp_path):
  transport = local(tmp_path / "r", delta=xor)

  async def test(step, publisher, fake):
    transport._process.close()
    receiver = FileReceiver(tmp_path / "again", TOKEN)
    receiver.revive = lambda: None  # as a process it could be started again
    transport._process = receiver
    transport.receivers = Everywhere(receiver.address)
    report = await publisher.publish(step(2), 2)
    assert report.state is State.COMMITTED
    assert report.delivered[0].startswith("in full, as the receiver says: version 1, round ")
    report = await publisher.publish(step(3), 3)
    assert report.delivered == ("xor from version 2",)
    await asyncio.to_thread(expect, fake, step(3), 3, tmp_path)

  rounds(tmp_path, transport, test)


def test_a_server_that_was_restarted_is_whole_again(tmp_path):
  """It lost its weights and its version: the receiver's files are whole all the same."""
  transport = local(tmp_path / "r", delta=overwrite)

  async def test(step, publisher, fake):
    await fake.restart()
    report = await publisher.publish(step(2), 2)
    assert report.state is State.COMMITTED
    assert report.delivered == ("overwrite from version 1",)
    await asyncio.to_thread(expect, fake, step(2), 2, tmp_path)

  rounds(tmp_path, transport, test)


def test_a_weight_that_is_not_finite_leaves_the_base(tmp_path):
  transport = local(tmp_path / "r", delta=xor)

  async def test(step, publisher, fake):
    before = fake.answer()
    bad = step(2)
    report = await publisher.publish(bad.replace(final_norm=bad.final_norm * jnp.float32("nan")), 2)
    assert report.state is State.ABORTED
    assert "is not finite" in report.message
    assert fake.answer() == before
    report = await publisher.publish(step(2), 2)
    assert report.delivered == ("xor from version 1",)
    await asyncio.to_thread(expect, fake, step(2), 2, tmp_path)

  with jax.debug_nans(False):
    rounds(tmp_path, transport, test)


@pytest.mark.parametrize("connections", [1, 3])
def test_faults_on_the_way_of_a_delta_touch_no_server(tmp_path, connections, capsys):  # W9, W26
  """Each kind of fault at each frame: the old version is served, and is still the base."""
  transport = local(tmp_path / "r", delta=xor, connections=connections, bucket_bytes=1 << 10)
  tap = Tap(transport.receivers.address)
  transport.receivers = Everywhere(tap.address)
  ended = collections.Counter()

  async def test(step, publisher, fake):
    tap.arm(None, -1)
    version = 2
    assert (await publisher.publish(step(2), 2)).delivered == ("xor from version 1",)
    frames = tap.seen
    assert frames > 4 + connections
    for fault in ("drop", "truncate", "flip", "replay", "lose"):
      for n in range(frames):
        before = fake.answer()
        version += 1
        tap.arm(fault, n)
        start = time.monotonic()
        report = await publisher.publish(step(version), version)
        assert time.monotonic() - start < 8.0, (fault, n)
        tap.arm(None, -1)
        ended[str(report.state)] += 1
        if report.state is State.ABORTED:
          assert fake.answer() == before, (fault, n)
          last = int(before[0].removeprefix("run:"))
        else:  # sent again once all was there: it changes nothing, or takes the files away
          assert fault == "replay", (fault, n, str(report))
          last = None
        if publisher.blocked:
          await publisher.recover()
        version += 1
        report = await publisher.publish(step(version), version)
        assert report.state is State.COMMITTED, str(report)
        assert last is None or report.delivered == (f"xor from version {last}",), (fault, n)
    await asyncio.to_thread(expect, fake, step(version), version, tmp_path)

  rounds(tmp_path, transport, test)  # no fault here waits for a deadline
  assert ended["aborted"] > 20
  assert list((tmp_path / "r").iterdir()) == []
  with capsys.disabled():
    print(f"\ndeltas, {connections} connections: {sum(ended.values())} faults, {dict(ended)}")


def test_replicas_of_which_one_missed_a_version(tmp_path):  # W20
  weights = random_weights(MODEL)
  transport = local(tmp_path, delta=xor)
  address = transport.receivers.address

  async def main():
    async with rig(tmp_path, 2, 30.0, transport=transport) as (publisher, fakes):
      here = dict.fromkeys([fake.url for fake in fakes], address)
      transport.receivers = dict(here)
      assert (await publisher.publish(weights, 1)).state is State.COMMITTED
      report = await publisher.publish(stepped(weights, 2), 2)
      assert report.delivered == ("xor from version 1",)  # made once, for both
      transport.receivers[fakes[1].url] = "127.0.0.1:9"
      assert (await publisher.publish(stepped(weights, 3), 3)).state is State.PARTIAL
      transport.receivers = dict(here)
      await publisher.recover()
      report = await publisher.publish(stepped(weights, 3), 3)
      assert report.state is State.COMMITTED, str(report)
      assert report.delivered == ("xor from version 2",)  # its receiver still had that
      report = await publisher.publish(stepped(weights, 4), 4)
      assert report.delivered == (
        "in full: its receiver did not get version 3", "xor from version 3",
      )  # fmt: skip
      assert len({fake.answer() for fake in fakes}) == 1

  asyncio.run(main())


def fp8_staged(transport, seed, key):
  """A matrix in FP8 with its scales beside a norm in bfloat16."""
  rng = np.random.default_rng(0)
  matrix = rng.normal(size=(256, 128)).astype(np.float32)
  matrix[seed, seed] += seed
  weights = {"m": jnp.asarray(matrix), "norm": jnp.asarray(rng.normal(size=128).astype(np.float32))}
  rules = [assembly(f"{n}.weight", f"['{n}']", a.shape) for n, a in weights.items()]
  quantized = {"m.weight": OCP}
  made = plan(
    source_layout(weights), whole(rules, "bfloat16", quantized=quantized), rules,
    quantized=quantized, bucket_bytes=1 << 14, align=transport.align, split=False,
  )  # fmt: skip
  return stage(made, weights, transport.allocate(made, key), key)


@BOTH
def test_deltas_of_fp8_are_of_bytes_and_scales(tmp_path, how):
  transport = local(tmp_path, delta=how)
  first, second = fp8_staged(transport, 1, "run-1"), fp8_staged(transport, 99, "run-2")
  assert first.hashes != second.hashes
  asyncio.run(transport.deliver(first, Peer(), 1))
  transport.retain(first, 1)
  delivery = asyncio.run(transport.deliver(second, Peer(), 2))
  assert delivery.how == f"{how.__name__} from version 1"
  assert delivery.nbytes < 0.6 * second.plan.nbytes  # the element is the largest of its block
  changes = [
    c for _, changes, _ in difference(second, first, how).buckets.values() for c in changes
  ]
  # Two scales are no fewer bytes as a delta.
  assert sorted(c.encoding for c in changes) == sorted([how.__name__, WHOLE, SAME])
  path = tmp_path / transport._links["run-2"][Peer.url].path
  written = b"".join(path.read_bytes() for path in files(path))
  for segment in second.plan.segments:
    assert as_bytes(second.view(segment).view(np.uint8)).tobytes() in written, segment.name
  transport.close()
  gone_within(tmp_path, 5.0)


def exchange(address, *frames):
  """Sends frames on one connection. Returns it, the last answer or what was refused, and how."""
  host, port = address.rsplit(":", 1)
  connection = socket.create_connection((host, int(port)), 10.0)
  answer = None
  for frame in frames:
    connection.sendall(frame)
    try:
      answer = receive.read_answer(connection)
    except wire.WireError as error:
      connection.close()
      return None, error
  return connection, answer


def frames_of(round, version, staged, base=None, since=None):
  """Every frame of a round, as bytes."""
  tensors = tuple((s.name, s.shape, s.dtype) for s in staged.plan.segments)
  yield wire.encode_begin(round, version, wire.Begin(TOKEN, staged.key, tensors, base))
  for bucket in staged.plan.buckets:
    key = (bucket.rank, bucket.index)
    if since is None:
      entries = wire.bucket_entries(staged, bucket)
      yield b"".join(wire.encode_bucket(round, version, entries, staged.buffers[key]))
    else:
      yield b"".join(wire.encode_delta(round, version, *since.buckets[key]))
  end = wire.End(len(staged.plan.buckets), len(tensors), staged.plan.nbytes, staged.fingerprint)
  yield wire.encode_end(round, version, end)


def await_none(root):
  """Until nothing of the second round is left."""
  deadline = time.monotonic() + 5.0
  while list(root.glob("run-2*")):
    assert time.monotonic() < deadline
    time.sleep(0.005)


def forgotten(receiver, root):
  """Waits until a round's files, and after them the round, are gone."""
  await_none(root)
  deadline = time.monotonic() + 5.0
  while (8, 2) in receiver._rounds:
    assert time.monotonic() < deadline
    time.sleep(0.005)


def test_a_receiver_applies_a_delta_once_and_only_to_its_base(tmp_path):  # W26
  receiver = FileReceiver(tmp_path, TOKEN)
  transport = local(tmp_path / "unused")
  first, second = fp8_staged(transport, 1, "run-1"), fp8_staged(transport, 99, "run-2")
  since = difference(second, first, xor)
  base = wire.Base(7, 1, first.fingerprint)

  def sent(round, base=base, since=since):
    return list(frames_of(round, 2, second, base, since))

  _, error = exchange(receiver.address, *sent(8))
  assert isinstance(error, wire.BaseError)
  assert "version 1, round 7, is not held here" in str(error)
  opened = list(frames_of(7, 1, first))
  half, _ = exchange(receiver.address, *opened[:-1])
  _, error = exchange(receiver.address, *sent(8))
  assert isinstance(error, wire.BaseError)
  assert "version 1 is not whole yet here" in str(error)
  half.sendall(opened[-1])
  held = receive.read_answer(half).path
  before = {path.name: path.read_bytes() for path in files(tmp_path / held)}
  wrong = {
    "the sender's is": (wire.BaseError, sent(8, base._replace(fingerprint="0" * 32))),
    "round 9, is not held": (wire.BaseError, sent(8, base._replace(round=9))),
    "begun without a base": (wire.WireError, sent(8, None)),
    "part 0 was received before": (wire.WireError, [s for s in sent(8)[:2] for _ in (0, 1)][1:]),
    "does not give the bytes": (
      wire.BaseError, sent(8, since=difference(second, fp8_staged(transport, 50, "x"), xor)),
    ),
  }  # fmt: skip
  for message, (kind, frames) in wrong.items():
    _, error = exchange(receiver.address, *frames)
    assert type(error) is kind, message
    assert message in str(error)
    forgotten(receiver, tmp_path)
  again = []
  for _ in range(2):  # the whole round again: from the same base, so the same weights
    connection, answer = exchange(receiver.address, *sent(8))
    again.append(b"".join(p.read_bytes() for p in files(tmp_path / answer.path)))
    _, error = exchange(receiver.address, *sent(8))
    assert "round 8 was begun before" in str(error)
    connection.close()
    forgotten(receiver, tmp_path)
  assert again[0] == again[1]
  assert {path.name: path.read_bytes() for path in files(tmp_path / held)} == before
  half.close()
  receiver.close()
  transport.close()


def test_frames_of_deltas_are_checked_before_they_are_used():
  data = bytes(range(16))
  entry = wire.Entry("a", (0, 1), "uint8", (16,), ((0, 16),), 0, 16, wire.tensor_hash(data))
  change = wire.Change("xor", "0" * 32)

  def coded(entry=entry, change=change, data=data):
    return b"".join(wire.encode_delta(1, 2, [entry], [change], data))

  frame = wire.decode(coded(), max_payload_bytes=1 << 10)
  assert (frame.entries, frame.changes) == ((entry,), (change,))
  assert frame.tensors[0].tobytes() == data
  wrong = {
    "unknown encoding 'zip'": coded(change=change._replace(encoding="zip")),
    "target is 'x'": coded(change=change._replace(target="x")),
    "expected bytes of a whole one": coded(entry._replace(dtype="bool")),
    "do not match their hash": coded(data=data[::-1]),
    "ends at byte 16 of a payload of 8": coded(data=data[:8]),
  }
  for message, bad in wrong.items():
    with pytest.raises(wire.WireError, match=message):
      wire.decode(bad, max_payload_bytes=1 << 10)
  begin = wire.Begin("t", "k", (), wire.Base(1, 2, "0" * 32))
  assert wire.decode(wire.encode_begin(1, 2, begin), max_payload_bytes=0).begin == begin
  with pytest.raises(wire.WireError, match="expected round, version and fingerprint"):
    wire.decode(wire.encode_begin(1, 2, begin._replace(base=(1,))), max_payload_bytes=0)
  rng = np.random.default_rng(0)
  good = bytearray(coded())
  for _ in range(1000):  # W30
    bad = good.copy()
    bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
    with pytest.raises(wire.WireError):
      wire.decode(bytes(bad), max_payload_bytes=1 << 10)


def test_every_step_of_a_run_is_a_delta(tmp_path):
  """Steps of all weights at once, as an optimizer makes them, in bfloat16-sized moves."""
  weights = random_weights(MODEL)
  made = pushes(tmp_path, local(tmp_path / "r", delta=xor), [at(weights, v) for v in range(4)])
  assert [report.state for report, _ in made] == [State.COMMITTED] * 4
  assert all(report.delivered_share < 1 for report, _ in made[1:])
