"""Deltas: a tensor's bytes, said by how they differ from bytes that both ends hold.

Bytes are compared and not numbers, so every dtype is exact: NaN, minus zero, FP8 and its scales.
"""

import struct
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt8

Bytes = UInt8[np.ndarray, "n"]
Encode = Callable[[Bytes, Bytes, int], bytes]  # (new, base, bytes of an element)

SAME, WHOLE = "same", "whole"  # nothing is sent; the new bytes themselves are
_LEVEL = 1  # of deflate: the next levels cost twice the time for a few per cent
_COUNT = struct.Struct("<Q")


def xor(new: Bytes, base: Bytes, item: int) -> bytes:
  """new ^ base, deflated. The k-th bytes of all elements lie together: a small step leaves the high
  ones of most elements zero.
  """
  difference = np.bitwise_xor(new, base).reshape(-1, item)
  return zlib.compress(np.ascontiguousarray(difference.T), _LEVEL)


def overwrite(new: Bytes, base: Bytes, item: int) -> bytes:
  """Which elements changed, one bit each, deflated, and then their new values."""
  words = new.view(f"u{item}")
  changed = words != base.view(f"u{item}")
  places = zlib.compress(np.packbits(changed), _LEVEL)
  return _COUNT.pack(len(places)) + places + words[changed].tobytes()


def encode(how: Encode, new: Bytes, base: Bytes, item: int) -> tuple[str, bytes]:
  """(encoding, data) of `new`, which differs from `base`: as `how` does it, or whole where that is
  not smaller.
  """
  data = how(new, base, item)
  if len(data) < len(new):
    return how.__name__, data
  return WHOLE, new.tobytes()


def decode(encoding: str, data: Bytes, base: Bytes, item: int) -> Bytes:
  """The new bytes, as many as `base` has; memory stays at a small multiple of that.

  Raises:
    ValueError: `data` is not what the encoding makes for a base of that size.
  """
  return ENCODINGS[encoding](data, base, item)


def _same(data: Bytes, base: Bytes, item: int) -> Bytes:
  del item
  if len(data):
    raise ValueError(f"{len(data)} bytes for a tensor that stays the same")
  return base


def _whole(data: Bytes, base: Bytes, item: int) -> Bytes:
  del item
  if len(data) != len(base):
    raise ValueError(f"{len(data)} bytes, the tensor has {len(base)}")
  return data


def _un_xor(data: Bytes, base: Bytes, item: int) -> Bytes:
  difference = _inflated(data, len(base)).reshape(item, -1).T
  return np.bitwise_xor(difference.reshape(-1), base)


def _overwritten(data: Bytes, base: Bytes, item: int) -> Bytes:
  elements = len(base) // item
  if len(data) < _COUNT.size:
    raise ValueError(f"{len(data)} bytes, expected at least {_COUNT.size}")
  (size,) = _COUNT.unpack(data[: _COUNT.size].tobytes())
  places, values = data[_COUNT.size :][:size], data[_COUNT.size :][size:]
  bits = np.unpackbits(_inflated(places, -(-elements // 8)))
  if bits[elements:].any():
    raise ValueError(f"a change after the last of {elements} elements")
  changed = bits[:elements].astype(bool)
  if len(values) != item * np.count_nonzero(changed):
    raise ValueError(
      f"{len(values)} bytes of values for {np.count_nonzero(changed)} elements of {item} bytes"
    )
  new = base.copy()
  new.view(f"u{item}")[changed] = values.view(f"u{item}")
  return new


ENCODINGS: Mapping[str, Callable[[Bytes, Bytes, int], Bytes]] = {
  SAME: _same,
  WHOLE: _whole,
  xor.__name__: _un_xor,
  overwrite.__name__: _overwritten,
}


def _inflated(data: Bytes, nbytes: int) -> Bytes:
  """Exactly `nbytes`. Raises ValueError, without making more, when it is anything else."""
  inflater = zlib.decompressobj()
  try:
    out = inflater.decompress(data.tobytes(), nbytes + 1)
  except zlib.error as error:
    raise ValueError(f"not deflated: {error}") from error
  if len(out) != nbytes or not inflater.eof or inflater.unused_data:
    raise ValueError(f"inflates to {len(out)} bytes or more, or is cut, expected {nbytes}")
  return np.frombuffer(out, np.uint8)
