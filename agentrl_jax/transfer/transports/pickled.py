"""Torch tensors in the pickle form that a SGLang server reads, written without torch.

The server unpickles with an allow list and calls `torch.load(weights_only=True)` for storages. This
writes those opcodes directly: one storage of bytes in torch's legacy stream (five small pickles, an
element count, raw data), and objects that refer to it. A payload is `head + data + tail`: the data
is never copied here.
"""

import math
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

from agentrl_jax.transfer.plan import ITEM_BYTES
from agentrl_jax.transfer.wire import Entry, WireError, check_entries

_MAGIC = 0x1950A86A20F9469CFC6C  # torch/serialization.py, MAGIC_NUMBER
_PROTOCOL = 1001  # torch/serialization.py, PROTOCOL_VERSION
_SIZES = {"protocol_version": _PROTOCOL, "little_endian": True,
          "type_sizes": {"short": 2, "int": 4, "long": 4}}  # fmt: skip


class Payload(NamedTuple):
  """A pickle in three runs of bytes; `nbytes` of data belong between head and tail."""

  head: bytes
  nbytes: int
  tail: bytes


def flattened_bucket(entries: Sequence[Entry], nbytes: int) -> Payload:
  """`{"flattened_tensor": uint8 [nbytes], "metadata": [SimpleNamespace(...)]}` of one bucket.

  Args:
    entries: what the bucket holds; each must be a whole tensor.
    nbytes: of the bucket.
  Raises:
    ValueError: naming an entry that is a part, lies outside or overlaps: the server would die of
      it.
  """
  _check(entries, nbytes)
  stored = _storage(nbytes)
  head = b"".join([
    b"\x80\x04}(", _text("flattened_tensor"),
    _global("torch._utils", "_rebuild_tensor_v2"), b"(",
    _global("torch.storage", "_load_from_bytes"), b"(",
    b"\x8e", struct.pack("<Q", len(stored.head) + nbytes), stored.head,
  ])  # fmt: skip
  size = _int(nbytes)
  tail = b"".join([
    b"tR", _int(0), size, b"\x85", _int(1), b"\x85", b"\x89",
    _global("collections", "OrderedDict"), b")R", b"tR",
    _text("metadata"), b"](", *(_metadata(entry) for entry in entries), b"e", b"u.",
  ])  # fmt: skip
  return Payload(head, nbytes, tail)


def named_tensors(entries: Sequence[Entry], nbytes: int) -> Payload:
  """`[(name, tensor), ...]` of one bucket; all tensors share its storage.

  Arguments and errors as of `flattened_bucket`.
  """
  _check(entries, nbytes)
  stored = _storage(nbytes)
  head = b"".join([
    b"\x80\x04", _global("torch.storage", "_load_from_bytes"), b"(",
    b"\x8e", struct.pack("<Q", len(stored.head) + nbytes), stored.head,
  ])  # fmt: skip
  items = b"".join(_tensor(entry) for entry in entries)
  return Payload(head, nbytes, b"tR\x940](" + items + b"e.")  # memo 0 is the storage


def _check(entries: Sequence[Entry], nbytes: int) -> None:
  check_entries(entries, nbytes)
  for entry in entries:
    if entry.part != (0, 1):
      raise WireError(f"{entry.name} is part {entry.part}, the server takes whole tensors")


def _tensor(entry: Entry) -> bytes:
  """(name, a view of the storage in memo 0)."""
  strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
  return b"".join([
    b"(", _text(entry.name), _global("torch._utils", "_rebuild_tensor_v3"), b"(h\x00",
    _int(entry.offset // ITEM_BYTES[entry.dtype]), _tuple(entry.shape), _tuple(strides), b"\x89",
    _global("collections", "OrderedDict"), b")R", _global("torch", entry.dtype), b"tRt",
  ])  # fmt: skip


def _storage(nbytes: int) -> Payload:
  persistent = b"".join([
    b"\x80\x02(", _text("storage"), _global("torch", "ByteStorage"), _text("0"), _text("cpu"),
    _int(nbytes), b"NtQ.",
  ])  # fmt: skip
  parts = [pickle.dumps(value, 2) for value in (_MAGIC, _PROTOCOL, _SIZES)]
  parts += [persistent, pickle.dumps(["0"], 2), struct.pack("<q", nbytes)]
  return Payload(b"".join(parts), nbytes, b"")


def _metadata(entry: Entry) -> bytes:
  fields = {
    "start_idx": _int(entry.offset),
    "end_idx": _int(entry.offset + entry.nbytes),
    "numel": _int(entry.nbytes),
    "name": _text(entry.name),
    "shape": _tuple(entry.shape),
    "dtype": _global("torch", entry.dtype),
  }
  state = b"}(" + b"".join(_text(key) + value for key, value in fields.items()) + b"u"
  return _global("types", "SimpleNamespace") + b")R" + state + b"b"


def _global(module: str, name: str) -> bytes:
  return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
  data = value.encode()
  return b"X" + struct.pack("<I", len(data)) + data


def _tuple(values: Sequence[int]) -> bytes:
  return b"(" + b"".join(map(_int, values)) + b"t"


def _int(value: int) -> bytes:
  return pickle.dumps(value, 2)[2:-1]
