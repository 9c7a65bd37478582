"""The framed format: round trips, and garbage is refused without reading outside the frame."""

import dataclasses
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.transfer import wire
from agentrl_jax.transfer.layout import slices
from agentrl_jax.transfer.ledger import Announcement, Ledger
from agentrl_jax.transfer.plan import MAX_NAME_BYTES
from agentrl_jax.transfer.stage import fingerprint_of, tensor_hash
from agentrl_jax.transfer.wire import Change, End, Entry, WireError

LIMIT = 1 << 16


class Receiver:
  """Collects one round's tensors in memory, as views of the frames that they came in."""

  def __init__(self, round, version, expected):
    self.ledger = Ledger(round, version, expected)
    self.parts: dict[str, dict[int, np.ndarray]] = {}

  def take(self, data):
    """Accepts one frame, or raises WireError and changes nothing."""
    frame = wire.decode(data, max_payload_bytes=LIMIT)
    self.ledger.accept(frame)
    if frame.command is wire.Command.ABORT:
      self.parts = {}
    for entry, tensor in zip(frame.entries, frame.tensors, strict=True):
      self.parts.setdefault(entry.name, {})[entry.part[0]] = tensor
    return frame

  def tensors(self):
    """Every tensor, whole, after END. A tensor of one part is a view of its frame."""
    if not self.ledger.done or not self.parts:
      raise WireError(f"round {self.ledger.round} has not ended")
    out = {}
    for name, parts in self.parts.items():
      if len(parts) == 1:
        out[name] = parts[0]
        continue
      out[name] = np.empty(self.ledger.expected[name][0], parts[0].dtype)
      for k, array in parts.items():
        out[name][slices(self.ledger.parts[name][k].dst_index)] = array
    return out


@dataclasses.dataclass
class Sent:
  """One round as frames, with what was meant."""

  frames: list[bytes]
  tensors: dict[str, np.ndarray]

  @property
  def expected(self):
    return {name: (array.shape, str(array.dtype)) for name, array in self.tensors.items()}


def send(tensors, *, rows=None, round=7, version=3):
  """Every tensor in a bucket of its own, cut into parts of `rows` rows."""
  frames, digests, total = [], [], 0
  for name, array in sorted(tensors.items()):
    starts = range(0, len(array), rows) if rows and array.ndim and len(array) else [0]
    for k, start in enumerate(starts):
      part = array if len(starts) == 1 else array[start : start + rows]
      data = part.tobytes()
      first = [(start, start + len(part))] if array.ndim else []
      entry = Entry(
        name, (k, len(starts)), str(array.dtype), part.shape,
        (*first, *((0, n) for n in part.shape[1:])), 0, len(data), tensor_hash(data),
      )  # fmt: skip
      head, payload = wire.encode_bucket(round, version, [entry], data)
      frames.append(head + bytes(payload))
      digests.append((0, name, entry.part, entry.shape, entry.dtype, entry.hash))
      total += len(data)
  end = End(len(frames), len(tensors), total, fingerprint_of(digests))
  return Sent([*frames, wire.encode_end(round, version, end)], dict(tensors))


def receive(sent, **changes):
  receiver = Receiver(
    changes.get("round", 7), changes.get("version", 3),
    changes.get("expected", sent.expected),
  )  # fmt: skip
  for frame in sent.frames:
    receiver.take(frame)
  return receiver.tensors()


TENSORS = {
  "a": np.arange(12, dtype=np.float32).reshape(3, 4),
  "b": np.arange(5, dtype=np.int32),
  "empty": np.zeros((0, 4), np.float32),
  "scalar": np.array(2.5, np.float32),
}


@settings(max_examples=50, deadline=None)
@given(
  st.dictionaries(
    st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4
  ),
  st.one_of(st.none(), st.integers(1, 3)),
  st.randoms(use_true_random=False),
)
def test_round_trip_in_any_order(shapes, rows, rng):
  tensors = {
    n: np.arange(np.prod(s, dtype=int), dtype=np.float32).reshape(s) for n, s in shapes.items()
  }
  sent = send(tensors, rows=rows)
  buckets = sent.frames[:-1]
  rng.shuffle(buckets)
  sent.frames[:-1] = buckets
  got = receive(sent)
  assert got.keys() == tensors.keys()
  for name, array in tensors.items():
    np.testing.assert_array_equal(got[name], array)


def boxed(*boxes, of=None):
  """Frames of "a" in these boxes, said to be `of` so many, and END."""
  array, frames, rows = TENSORS["a"], [], []
  for k, box in enumerate(boxes):
    part = array[slices(box)]
    entry = Entry("a", (k, of or len(boxes)), "float32", part.shape, box, 0, part.nbytes,
                  tensor_hash(part.tobytes()))  # fmt: skip
    frames.append(b"".join(wire.encode_bucket(7, 3, [entry], part.tobytes())))
    rows.append((0, "a", entry.part, entry.shape, entry.dtype, entry.hash))
  total = sum(array[slices(box)].nbytes for box in boxes)
  end = End(len(frames), 1, total, fingerprint_of(rows))
  return Sent([*frames, wire.encode_end(7, 3, end)], {"a": array})


LEFT, TOP, BOTTOM = ((0, 3), (0, 1)), ((0, 1), (1, 4)), ((1, 3), (1, 4))


def test_parts_are_boxes_that_cover_the_tensor_once():
  np.testing.assert_array_equal(receive(boxed(LEFT, TOP, BOTTOM))["a"], TENSORS["a"])
  for sent, message in [
    (boxed(LEFT, TOP), "a: its parts have 6 elements, its shape 12"),
    (boxed(LEFT, TOP, BOTTOM, of=4), "a: 3 of its 4 parts were received"),
    (boxed(LEFT, TOP, ((0, 2), (1, 4))), "a: parts 1 and 2 overlap"),
  ]:
    with pytest.raises(WireError, match=message):
      receive(sent)


def test_a_tensor_is_a_view_of_its_frame():
  frame = np.frombuffer(send({"a": TENSORS["a"]}).frames[0], np.uint8)
  decoded = wire.decode(frame.data, max_payload_bytes=LIMIT)
  assert np.shares_memory(decoded.tensors[0], frame)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"round": 8}, "frame of round 7"),  # W8: stale or replayed rounds
    ({"version": 2}, "version 3, this is round 7 version 2"),
    ({"expected": {"a": ((3, 4), "float32")}}, "is not expected"),  # W7: extra
    ({"extra": "c"}, "c was not received"),  # missing
    ({"wrong": ((4, 3), "float32")}, "a: index .* is outside shape"),
    ({"wrong": ((4, 4), "float32")}, "a: its parts have 12 elements, its shape 16"),
    ({"wrong": ((3, 4), "bfloat16")}, "a: dtype float32, expected bfloat16"),
  ],
)
def test_what_was_not_agreed_is_refused(change, message):
  sent = send(TENSORS)
  expected = dict(sent.expected)
  if "extra" in change:
    expected[change["extra"]] = ((1,), "float32")
  if "wrong" in change:
    expected["a"] = change["wrong"]
  arguments = {"expected": expected} | {
    k: v for k, v in change.items() if k not in ("extra", "wrong")
  }
  with pytest.raises(WireError, match=message):
    receive(sent, **arguments)


def test_a_repeated_bucket_and_a_late_frame_are_refused():
  sent = send(TENSORS)
  receiver = Receiver(7, 3, sent.expected)
  receiver.take(sent.frames[0])
  with pytest.raises(WireError, match="a: part 0 was received before"):
    receiver.take(sent.frames[0])
  for frame in sent.frames[1:]:
    receiver.take(frame)
  with pytest.raises(WireError, match="after the end of round 7"):
    receiver.take(sent.frames[0])


def test_an_abort_gives_nothing():
  sent = send(TENSORS)
  receiver = Receiver(7, 3, sent.expected)
  receiver.take(sent.frames[0])
  assert receiver.take(wire.encode_abort(7, 3, "sender died")).reason == "sender died"
  with pytest.raises(WireError, match="has not ended"):
    receiver.tensors()


def test_end_counts_are_checked():
  sent = send(TENSORS)
  sent.frames[-1] = wire.encode_end(7, 3, End(4, 4, 72, "0" * 32))
  with pytest.raises(WireError, match="the sender says"):
    receive(sent)


GOOD = Entry("a", (0, 1), "float32", (4,), ((0, 4),), 0, 16, "0" * 32)
LONG = Entry("a", (0, 1), "float32", (8,), ((0, 8),), 0, 32, "0" * 32)


@pytest.mark.parametrize(
  ("entries", "message"),
  [
    ([GOOD, GOOD], "a: part 0 is repeated"),
    ([GOOD._replace(offset=8)], "a: offset 8 is no multiple of 16"),
    ([GOOD._replace(offset=64)], "a: ends at byte 80 of a payload of 64"),
    ([GOOD._replace(nbytes=15)], "a: 15 bytes, its shape and dtype make 16"),
    ([GOOD._replace(dtype="float7")], "a: unknown dtype"),
    ([GOOD._replace(part=(1, 1))], "a: part 1 of 1"),
    ([GOOD._replace(dst_index=((0, 5),))], "a: index .* has not the shape"),
    ([LONG, GOOD._replace(name="b", offset=16)], "b overlaps a at byte 16"),
  ],
)
def test_entries_are_checked_before_views(entries, message):
  with pytest.raises(WireError, match=message):
    wire.check_entries(entries, 64)


OPENING = wire.Begin("token", "run-3", (("a", (3, 4), "float32"), ("b", (), "int32")))


def test_what_opens_and_answers_a_round_comes_back():
  for frame, field, value in [
    (wire.encode_begin(7, 3, OPENING), "begin", OPENING),
    (wire.encode_join(7, 3, "token"), "token", "token"),
    (wire.encode_done(7, 3, "/a/b"), "path", "/a/b"),
    (wire.encode_done(7, 3), "path", ""),
  ]:
    assert wire.frame_size(frame[: wire.HEADER_BYTES], max_payload_bytes=0) == len(frame)
    assert getattr(wire.decode(frame, max_payload_bytes=0), field) == value


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"key": "../etc"}, "key is '../etc', expected a file name"),
    ({"tensors": [["a", [1]]]}, "expected name, shape and dtype"),
    ({"tensors": [["a", [1], "float7"]]}, "a: unknown dtype 'float7'"),
    ({"tensors": [["a", [1], ["float32"]]]}, "dtype is .*, expected text"),
    ({"tensors": [["a", [-1], "int32"]]}, "shape is '-1'"),
    ({"tensors": [["a", [], "int32"]] * 2}, "announced twice"),
    ({"token": ""}, "token is '', expected text"),
    ({"further": -1}, "further is '-1'"),
    ({"further": 1 << 22}, "4194306 tensors are announced, at most 4194304"),
  ],
)
def test_an_opening_is_checked(change, message):
  frame = wire._encode(wire.Command.BEGIN, 7, 3, OPENING._asdict() | change, 0)
  with pytest.raises(WireError, match=message):
    wire.decode(frame, max_payload_bytes=0)


def test_more_than_a_frame_says_is_announced_in_several(monkeypatch):
  monkeypatch.setattr(wire, "TENSORS_A_FRAME", 2)
  tensors = tuple((f"t{n}", (n,), "int32") for n in range(5))
  frames = [
    wire.decode(frame, max_payload_bytes=0)
    for frame in wire.encode_opening(7, 3, OPENING._replace(tensors=tensors))
  ]
  assert [frame.command.name for frame in frames] == ["BEGIN", "MORE", "MORE"]
  first, second, third = frames
  assert (first.begin.tensors, first.begin.further) == (tensors[:2], 3)
  whole = Announcement(first)
  whole.add(second)
  whole.add(third)
  assert (whole.left, whole.begin) == (0, first.begin)
  assert whole.tensors == {name: (shape, dtype) for name, shape, dtype in tensors}
  for frame, message in [
    (first, "BEGIN of round 7, round 7 has 3 tensors to announce"),
    (third._replace(round=8), "MORE of round 8, round 7 has"),
    (third._replace(more=()), "0 tensors are announced, 3 were to come"),
    (third._replace(more=tensors[1:]), "4 tensors are announced, 3 were to come"),
    (third._replace(more=tensors[1:2]), "t1 is announced twice"),
  ]:
    with pytest.raises(WireError, match=message):
      Announcement(first).add(frame)


def test_a_frame_has_room_for_the_longest_names():
  big = 1 << 40
  name, shape, index = "x" * (MAX_NAME_BYTES - 2), (big,) * 4, ((0, big),) * 4
  entry = Entry(name, (1 << 20, 1 << 20), "float8_e4m3fnuz", shape, index, big, big, "0" * 32)
  row = entry._asdict() | Change("overwrite", "0" * 32)._asdict()
  for rows in ([row] * wire.TENSORS_A_FRAME, [(name, shape, entry.dtype)] * wire.TENSORS_A_FRAME):
    assert wire._encode(wire.Command.DELTA, 1 << 62, 1 << 62, rows, 1 << 62)


def adversarial(rng):
  """Metadata that means harm; its frame's checksum will be right, so the checks must hold."""
  entry = json.loads(json.dumps(GOOD._asdict()))
  key = rng.choice(list(entry))
  numbers = [-1, 1 << 70, 1.5, True, float("nan")]
  lists = [[], [[]], [-1], [1 << 62], [[0, -4]], [[4, 0]], [1 << 40, 1 << 40]]
  evil = [None, {}, "", "x" * 300, "../../etc", *numbers, *lists]
  match rng.randrange(4):
    case 0:
      entry[key] = rng.choice(evil)
    case 1:
      del entry[key]
    case 2:
      entry[rng.choice(["__class__", "data", ""])] = rng.choice(evil)
    case 3:
      return rng.choice([entry, [entry, entry], [[entry]], None, 3, "a", [None], {"a": entry}])
  return [entry]


def test_ten_thousand_damaged_frames_are_refused():  # W30
  rng = random.Random(0)
  whole = [f for rows in (None, 1) for f in send(TENSORS, rows=rows).frames]
  refused = 0
  for n in range(10_000):
    frame = bytearray(rng.choice(whole))
    match n % 5:
      case 0:  # flipped bits
        for _ in range(rng.randrange(1, 4)):
          frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
      case 1:  # truncated
        del frame[rng.randrange(len(frame)) :]
      case 2:  # extended or spliced
        at = rng.randrange(len(frame) + 1)
        frame[at:at] = rng.randbytes(rng.randrange(1, 40))
      case 3:  # well-formed frame, adversarial metadata
        frame = bytearray(
          wire._encode(wire.Command(rng.randrange(1, 10)), 7, 3, adversarial(rng), 64) + bytes(64)
        )
      case 4:  # header fields overwritten
        at = rng.randrange(0, 48, 4)
        frame[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, rng.randbytes(4)])
    try:
      wire.decode(bytes(frame), max_payload_bytes=LIMIT)
    except WireError:
      refused += 1
    else:
      assert bytes(frame) in whole, f"frame {n} was accepted: {bytes(frame)!r}"
  assert refused > 9_500


def test_deeply_nested_metadata_is_refused():
  text = b"[" * 100_000
  head = wire._HEADER.pack(b"AWT1", 1, 0, 0, len(text), 0, 0, 0)
  check = wire.zlib.crc32(text, wire.zlib.crc32(head[:-8]))
  frame = head[:-8] + check.to_bytes(4, "little") + bytes(4) + text
  frame += bytes(-len(frame) % 16)
  with pytest.raises(WireError, match="unreadable metadata"):
    wire.decode(frame, max_payload_bytes=LIMIT)
