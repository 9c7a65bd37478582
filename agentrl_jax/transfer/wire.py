"""Framed buckets for byte streams, and the checks that any bucket passes before a view of it is
made.

    frame  = header | JSON metadata | zeros to a multiple of 16 | payload
    header = "AWT1" | command u32 | round u64 | version u64 | metadata bytes u64 | payload bytes u64
             | crc32 of the fields before it and of the metadata u32 | 0 u32        (little endian)

Nothing received is trusted: sizes are bounded before they are used, every tensor's bounds and hash
are checked, and an object is never deserialised. Every frame but DONE is answered by DONE, or by
ABORT or NO_BASE with a reason.
"""

import collections
import enum
import itertools
import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.transfer.delta import ENCODINGS
from agentrl_jax.transfer.layout import Box
from agentrl_jax.transfer.plan import ITEM_BYTES, Bucket, Plan
from agentrl_jax.transfer.stage import NUMPY_DTYPES, Staged, tensor_hash

ALIGN = 16
MAX_METADATA_BYTES = 16 << 20
TENSORS_A_FRAME = 1 << 14  # whose metadata are some 5 MB
MAX_TENSORS = 1 << 22  # of a round
_HEADER = struct.Struct("<4sIQQQQII")
HEADER_BYTES = _HEADER.size
_MAGIC = b"AWT1"
_KEYS = frozenset(("name", "part", "dtype", "shape", "dst_index", "offset", "nbytes", "hash"))
_CHANGE_KEYS = frozenset(("encoding", "target"))

if sys.byteorder != "little":
  raise ImportError("weight transfer needs a little-endian host")


class WireError(ValueError):
  """A frame was refused; the message says what was wrong and what was expected."""


class BaseError(WireError):
  """A delta was refused because its base is not the one that the receiver holds."""


class Command(enum.IntEnum):
  """What a frame is."""

  BUCKET = 1
  END = 2
  ABORT = 3
  BEGIN = 4  # a round's first frame
  JOIN = 5  # the first frame of a further connection
  DONE = 6  # the answer to any of them
  DELTA = 7  # a bucket said by its difference from the base that BEGIN named
  NO_BASE = 8  # an answer: that base is not here, everything must be sent
  MORE = 9  # after BEGIN: further tensors of the round


class Entry(NamedTuple):
  """One tensor, or part k of n, a box of it, in a bucket."""

  name: str
  part: tuple[int, int]
  dtype: str
  shape: tuple[int, ...]
  dst_index: Box  # in the published tensor
  offset: int  # in the payload
  nbytes: int
  hash: str  # of `stage.tensor_hash`


class Change(NamedTuple):
  """How the bytes of an entry in a DELTA make the tensor out of the base's."""

  encoding: str  # one of `delta.ENCODINGS`
  target: str  # hash of the tensor afterwards


class End(NamedTuple):
  """What a sender sent in all."""

  buckets: int
  tensors: int
  nbytes: int
  fingerprint: str


class Base(NamedTuple):
  """An earlier round whose bytes the receiver holds, and what all of them hash to."""

  round: int
  version: int
  fingerprint: str


Announced = tuple[str, tuple[int, ...], str]  # a tensor's name, shape and dtype


class Begin(NamedTuple):
  """What a round will send."""

  token: str  # that both ends were given
  key: str  # of the round, a file name
  tensors: tuple[Announced, ...]
  base: Base | None = None  # of its deltas
  further: int = 0  # tensors that MORE frames will bring


class Frame(NamedTuple):
  """A checked frame. `tensors` follow `entries` and are views of the frame's bytes."""

  command: Command
  round: int
  version: int
  entries: tuple[Entry, ...] = ()
  tensors: tuple[np.ndarray, ...] = ()
  changes: tuple[Change, ...] = ()  # of DELTA, whose entries and tensors are of encoded bytes
  end: End | None = None
  begin: Begin | None = None
  more: tuple[Announced, ...] = ()
  reason: str = ""
  token: str = ""  # of BEGIN and JOIN
  path: str = ""  # of DONE after END: where the server finds the files


def bucket_entries(staged: Staged, bucket: Bucket) -> tuple[Entry, ...]:
  """The metadata of one staged bucket."""
  return tuple(
    Entry(s.name, s.part, s.dtype, s.shape, s.index, s.offset, s.nbytes, digest)
    for s, digest in zip(staged.plan.segments, staged.hashes, strict=True)
    if (s.rank, s.bucket) == (bucket.rank, bucket.index)
  )


def frames_of(plan: Plan) -> int:
  """How many frames its buckets are sent in."""
  tensors = collections.Counter((s.rank, s.bucket) for s in plan.segments)
  return sum(-(-n // TENSORS_A_FRAME) for n in tensors.values())


def framed(entries: Sequence[Entry], payload: Any) -> Iterator[tuple[list[Entry], memoryview]]:
  """A bucket as several, where it has more tensors than a frame says. Entries are in the order of
  their bytes.
  """
  view = memoryview(payload).cast("B")
  for number in range(0, len(entries), TENSORS_A_FRAME):
    some = entries[number : number + TENSORS_A_FRAME]
    rest = entries[number + TENSORS_A_FRAME :]
    start, stop = some[0].offset, rest[0].offset if rest else len(view)
    yield [entry._replace(offset=entry.offset - start) for entry in some], view[start:stop]


def encode_bucket(
  round: int, version: int, entries: Iterable[Entry], payload: Any
) -> tuple[bytes, memoryview]:
  """A bucket as (header and metadata, payload); the payload is not copied."""
  view = memoryview(payload).cast("B")
  head = _encode(Command.BUCKET, round, version, [e._asdict() for e in entries], len(view))
  return head, view


def encode_delta(
  round: int,
  version: int,
  entries: Sequence[Entry],
  changes: Sequence[Change],
  payload: Any,
) -> tuple[bytes, memoryview]:
  """As `encode_bucket`: `entries` say where the encoded bytes lie, as uint8."""
  rows = [e._asdict() | c._asdict() for e, c in zip(entries, changes, strict=True)]
  view = memoryview(payload).cast("B")
  return _encode(Command.DELTA, round, version, rows, len(view)), view


def encode_end(round: int, version: int, end: End) -> bytes:
  """The frame that closes a round's buckets."""
  return _encode(Command.END, round, version, end._asdict(), 0)


def encode_abort(round: int, version: int, reason: str) -> bytes:
  """The frame that gives a round up."""
  return _encode(Command.ABORT, round, version, {"reason": reason}, 0)


def encode_no_base(round: int, version: int, reason: str) -> bytes:
  """The answer that asks for everything."""
  return _encode(Command.NO_BASE, round, version, {"reason": reason}, 0)


def encode_begin(round: int, version: int, begin: Begin) -> bytes:
  """The frame that opens a round on its first connection."""
  return _encode(Command.BEGIN, round, version, begin._asdict(), 0)


def encode_opening(round: int, version: int, begin: Begin) -> list[bytes]:
  """BEGIN, and MORE for the tensors that it has no room for, to be sent one after the other."""
  size, every = TENSORS_A_FRAME, begin.tensors
  head = begin._replace(tensors=every[:size], further=max(0, len(every) - size))
  return [encode_begin(round, version, head)] + [
    _encode(Command.MORE, round, version, {"tensors": every[n : n + size]}, 0)
    for n in range(size, len(every), size)
  ]


def encode_join(round: int, version: int, token: str) -> bytes:
  """The frame that opens a further connection of a round."""
  return _encode(Command.JOIN, round, version, {"token": token}, 0)


def encode_done(round: int, version: int, path: str = "") -> bytes:
  """The answer to a frame that was taken."""
  return _encode(Command.DONE, round, version, {"path": path}, 0)


def frame_size(head: bytes | memoryview, *, max_payload_bytes: int) -> int:
  """Bytes of the whole frame that starts with these `HEADER_BYTES`.

  Raises:
    WireError: it is no header, or says more than may be sent.
  """
  magic, _, _, _, size, payload, _, zero = _HEADER.unpack_from(head)
  if magic != _MAGIC or zero:
    raise WireError(f"frame starts with {magic!r}, expected {_MAGIC!r}")
  if size > MAX_METADATA_BYTES or payload > max_payload_bytes:
    raise WireError(f"{size} bytes of metadata and {payload} of payload, at most "
                    f"{MAX_METADATA_BYTES} and {max_payload_bytes}")  # fmt: skip
  return _payload_start(size) + payload


def decode(frame: bytes | memoryview, *, max_payload_bytes: int) -> Frame:
  """Checks one whole frame and gives views into it.

  Raises:
    WireError: anything at all is not as the format says; no byte outside the frame is read.
  """
  view = memoryview(frame).cast("B")
  command, round, version, metadata, start = _decode_head(view, max_payload_bytes)
  payload = view[start:]
  match command:
    case Command.BUCKET:
      entries = tuple(_entry(item) for item in _list(metadata))
      check_entries(entries, len(payload))
      return Frame(command, round, version, entries, _tensors(entries, payload))
    case Command.DELTA:
      rows = [_fields(item, _KEYS | _CHANGE_KEYS) for item in _list(metadata)]
      entries = tuple(_entry({key: row[key] for key in _KEYS}) for row in rows)
      check_entries(entries, len(payload))
      changes = tuple(_change(entry, row) for entry, row in zip(entries, rows, strict=True))
      return Frame(command, round, version, entries, _tensors(entries, payload), changes)
    case Command.END:
      fields = _fields(metadata, frozenset(End._fields))
      for name in ("buckets", "tensors", "nbytes"):
        _size(fields[name], name)
      _hex(fields["fingerprint"], "fingerprint")
      return Frame(command, round, version, end=End(**fields))
    case Command.BEGIN:
      begin = _begin(metadata)
      return Frame(command, round, version, begin=begin, token=begin.token)
    case Command.MORE:
      more = _announced(_fields(metadata, frozenset({"tensors"}))["tensors"])
      return Frame(command, round, version, more=more)
    case Command.JOIN:
      token = _text(_fields(metadata, frozenset({"token"}))["token"], "token")
      return Frame(command, round, version, token=token)
    case Command.DONE:
      path = _fields(metadata, frozenset({"path"}))["path"]
      return Frame(command, round, version, path=path and _text(path, "path"))
  reason = _fields(metadata, frozenset({"reason"}))["reason"]
  return Frame(command, round, version, reason=_text(reason, "reason"))


def check_entries(entries: Sequence[Entry], payload_bytes: int, *, align: int = ALIGN) -> None:
  """Raises WireError, naming the tensor, unless the entries lie in the payload without overlap."""
  seen: set[tuple[str, int]] = set()
  for entry in entries:
    if entry.dtype not in ITEM_BYTES:
      raise WireError(f"{entry.name}: unknown dtype {entry.dtype!r}")
    k, n = entry.part
    if not 0 <= k < n:
      raise WireError(f"{entry.name}: part {k} of {n}")
    if (entry.name, k) in seen:
      raise WireError(f"{entry.name}: part {k} is repeated")
    seen.add((entry.name, k))
    if tuple(stop - start for start, stop in entry.dst_index) != entry.shape:
      raise WireError(f"{entry.name}: index {entry.dst_index} has not the shape {entry.shape}")
    nbytes = ITEM_BYTES[entry.dtype] * math.prod(entry.shape)
    if entry.nbytes != nbytes:
      raise WireError(f"{entry.name}: {entry.nbytes} bytes, its shape and dtype make {nbytes}")
    if entry.offset % align:
      raise WireError(f"{entry.name}: offset {entry.offset} is no multiple of {align}")
    if entry.offset + nbytes > payload_bytes:
      raise WireError(
        f"{entry.name}: ends at byte {entry.offset + nbytes} of a payload of {payload_bytes}"
      )
  placed = sorted((e for e in entries if e.nbytes), key=lambda e: e.offset)
  for before, after in itertools.pairwise(placed):
    if before.offset + before.nbytes > after.offset:
      raise WireError(f"{after.name} overlaps {before.name} at byte {after.offset}")


def _encode(command: Command, round: int, version: int, metadata: Any, payload: int) -> bytes:
  text = json.dumps(metadata, separators=(",", ":")).encode()
  if len(text) > MAX_METADATA_BYTES:
    raise WireError(f"metadata of {len(text)} bytes, at most {MAX_METADATA_BYTES}")
  fields = (_MAGIC, command, round, version, len(text), payload)
  check = zlib.crc32(text, zlib.crc32(_HEADER.pack(*fields, 0, 0)[:-8]))
  padding = bytes(_payload_start(len(text)) - _HEADER.size - len(text))
  return _HEADER.pack(*fields, check, 0) + text + padding


def _decode_head(view: memoryview, limit: int) -> tuple[Command, int, int, Any, int]:
  if len(view) < _HEADER.size:
    raise WireError(f"frame of {len(view)} bytes, a header has {_HEADER.size}")
  whole = frame_size(view, max_payload_bytes=limit)
  _, command, round, version, size, _, check, _ = _HEADER.unpack_from(view)
  end, start = _HEADER.size + size, _payload_start(size)
  if len(view) != whole:
    raise WireError(f"frame of {len(view)} bytes, its header says {whole}")
  text = view[_HEADER.size : end]
  if zlib.crc32(text, zlib.crc32(view[: _HEADER.size - 8])) != check:
    raise WireError("header or metadata do not match their checksum")
  if any(view[end:start]):
    raise WireError("padding after the metadata is not zero")
  try:
    kind = Command(command)
    metadata = json.loads(bytes(text))
  except (ValueError, RecursionError) as error:
    raise WireError(f"command {command} with unreadable metadata: {error}") from error
  return kind, round, version, metadata, start


def _payload_start(metadata_bytes: int) -> int:
  return -(-(_HEADER.size + metadata_bytes) // ALIGN) * ALIGN


def _tensors(entries: Sequence[Entry], payload: memoryview) -> tuple[np.ndarray, ...]:
  bytes_ = np.frombuffer(payload, np.uint8) if len(payload) else np.zeros(0, np.uint8)
  out, at = [], 0
  for entry in sorted((e for e in entries if e.nbytes), key=lambda e: e.offset):
    if bytes_[at : entry.offset].any():
      raise WireError(f"the gap before {entry.name} is not zero")
    at = entry.offset + entry.nbytes
  if bytes_[at:].any():
    raise WireError(f"the payload after byte {at} is not zero")
  for entry in entries:
    data = bytes_[entry.offset : entry.offset + entry.nbytes]
    if tensor_hash(data) != entry.hash:
      raise WireError(f"{entry.name}: its bytes do not match their hash")
    out.append(data.view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape))
  return tuple(out)


def _entry(item: Any) -> Entry:
  fields = _fields(item, _KEYS)
  name = _text(fields["name"], "name")
  part = tuple(_size(n, "part") for n in _list(fields["part"]))
  index = tuple(
    tuple(_size(n, "dst_index") for n in _list(span)) for span in _list(fields["dst_index"])
  )
  if len(part) != 2 or any(len(span) != 2 for span in index):
    raise WireError(f"{name}: part {part} and index {index} are not pairs")
  return Entry(
    name,
    (part[0], part[1]),
    _text(fields["dtype"], "dtype"),
    tuple(_size(n, "shape") for n in _list(fields["shape"])),
    tuple((span[0], span[1]) for span in index),
    _size(fields["offset"], "offset"),
    _size(fields["nbytes"], "nbytes"),
    _hex(fields["hash"], "hash"),
  )


def _change(entry: Entry, fields: Mapping[str, Any]) -> Change:
  encoding = _text(fields["encoding"], "encoding")
  if encoding not in ENCODINGS:
    raise WireError(f"{entry.name}: unknown encoding {encoding[:80]!r}")
  if entry.dtype != "uint8" or entry.part != (0, 1):
    raise WireError(
      f"{entry.name}: {entry.dtype}, part {entry.part}, expected bytes of a whole one"
    )
  return Change(encoding, _hex(fields["target"], "target"))


def _base(item: Any) -> Base | None:
  if item is None:
    return None
  if len(_list(item)) != 3:
    raise WireError(f"base is {str(item)[:80]!r}, expected round, version and fingerprint")
  return Base(_size(item[0], "round"), _size(item[1], "version"), _hex(item[2], "fingerprint"))


def _begin(item: Any) -> Begin:
  fields = _fields(item, frozenset(Begin._fields))
  key = _text(fields["key"], "key")
  if not re.fullmatch(r"\w[\w.-]*", key):
    raise WireError(f"key is {key[:80]!r}, expected a file name")
  tensors, further = _announced(fields["tensors"]), _size(fields["further"], "further")
  if len(tensors) + further > MAX_TENSORS:
    raise WireError(f"{len(tensors) + further} tensors are announced, at most {MAX_TENSORS}")
  base = _base(fields["base"])
  return Begin(_text(fields["token"], "token"), key, tensors, base, further)


def _announced(rows: Any) -> tuple[Announced, ...]:
  tensors = []
  for row in _list(rows):
    if len(_list(row)) != 3:
      raise WireError(f"{str(row)[:80]!r} in the metadata, expected name, shape and dtype")
    name, dtype = _text(row[0], "name"), _text(row[2], "dtype")
    if dtype not in ITEM_BYTES:
      raise WireError(f"{name}: unknown dtype {dtype[:80]!r}")
    tensors.append((name, tuple(_size(n, "shape") for n in _list(row[1])), dtype))
  if len({name for name, _, _ in tensors}) != len(tensors):
    raise WireError("a tensor is announced twice")
  return tuple(tensors)


def _fields(value: Any, keys: frozenset[str]) -> dict[str, Any]:
  if not isinstance(value, dict) or value.keys() != keys:
    raise WireError(f"metadata {str(value)[:80]!r}, expected the fields {sorted(keys)}")
  return value


def _list(value: Any) -> list[Any]:
  if not isinstance(value, list):
    raise WireError(f"{str(value)[:80]!r} in the metadata, expected a list")
  return value


def _size(value: Any, what: str) -> int:
  if type(value) is not int or not 0 <= value < 1 << 63:
    raise WireError(f"{what} is {str(value)[:80]!r}, expected an integer >= 0")
  return value


def _text(value: Any, what: str) -> str:
  if not isinstance(value, str) or not value:
    raise WireError(f"{what} is {str(value)[:80]!r}, expected text")
  return value


def _hex(value: Any, what: str) -> str:
  if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
    raise WireError(f"{what} is {str(value)[:80]!r}, expected 32 hexadecimal digits")
  return value
