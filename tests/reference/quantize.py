"""FP8 quantisation a block at a time in numpy, and FP8 itself from its definition."""

import hashlib
import math

import numpy as np


def decode(byte, bias, nan, bits=3):
  """The value of one byte of a format of so many mantissa bits."""
  if byte in nan:
    return math.nan
  sign, exponent = -1.0 if byte >> 7 else 1.0, (byte & 0x7F) >> bits
  fraction = (byte & ((1 << bits) - 1)) / (1 << bits)
  if exponent == 0:
    return sign * fraction * 2.0 ** (1 - bias)
  return sign * (1 + fraction) * 2.0 ** (exponent - bias)


_E5M2_SPECIAL = {sign | byte for sign in (0, 0x80) for byte in (0x7C, 0x7D, 0x7E, 0x7F)}


TABLES = {
  "float8_e4m3fn": np.array([decode(b, 7, {0x7F, 0xFF}) for b in range(256)]),
  "float8_e4m3fnuz": np.array([decode(b, 8, {0x80}) for b in range(256)]),
  "float8_e5m2": np.array([decode(b, 15, _E5M2_SPECIAL, bits=2) for b in range(256)]),
}


def encode(values, dtype):
  """The byte nearest to each value, of two equally near the even one; the sign of zero is kept
  where the format has it.
  """
  table = TABLES[dtype]
  positive = np.array([b for b in range(128) if not math.isnan(table[b])])
  sizes = table[positive]
  size = np.abs(values.astype(np.float64))
  upper = np.clip(np.searchsorted(sizes, size), 0, len(sizes) - 1)
  lower = np.maximum(upper - 1, 0)
  up, down = sizes[upper] - size, size - sizes[lower]
  even_upper = positive[upper] % 2 == 0
  chosen = np.where((up < down) | ((up == down) & even_upper), upper, lower)
  coded = positive[chosen].astype(np.uint8)
  negative = np.signbit(values) & ((coded != 0) | (dtype != "float8_e4m3fnuz"))
  return np.where(negative, coded | 0x80, coded).astype(np.uint8)


def quantize(values, dtype, block, scale, top):
  """(bytes, scales) of a 2-D bfloat16-representable float32 array; `block` None is the whole."""
  rows, columns = block or values.shape
  shape = tuple(-(-n // b) for n, b in zip(values.shape, (rows, columns), strict=True))
  scales, coded = np.zeros(shape, np.float32), np.zeros(values.shape, np.uint8)
  for i in range(shape[0]):
    for j in range(shape[1]):
      place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
      part = values[place]
      s = np.maximum(np.abs(part).max(), np.float32(1e-12)) / np.float32(top)
      if scale == "power_of_two":
        fraction, exponent = math.frexp(float(s))  # s = fraction * 2**exponent, fraction >= 1/2
        s = np.float32(2.0 ** (exponent - (fraction == 0.5)))
      scales[i, j] = s
      coded[place] = encode(np.clip(part / s, np.float32(-top), np.float32(top)), dtype)
  return coded, scales.reshape(()) if block is None else scales


def sha(array):
  """An engine's checksum of a parameter: 8 bytes of SHA-256."""
  return hashlib.sha256(array.tobytes()).hexdigest()[:16]
