"""Checkpoints whose matrices are FP8 or FP4 with a scale a block, dequantised as they are read.

The matrix `NAME.weight` has its scales [rows / R, columns / C] beside it as `NAME.scale`: powers of
two, stored as their exponents (E8M0). FP8 is E4M3; of FP4 (E2M1) a byte holds two numbers of a row,
the first in its lower half (OCP Microscaling 1.0; DeepSeek V4's files).
"""

import ml_dtypes
import numpy as np

from agentrl_jax.models.checkpoint_files import TensorFiles

_FP8, _FP4, _SCALE = "F8_E4M3", "I8", "F8_E8M0"
_HALVES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_HALVES, -_HALVES])


class BlockScaled:
  """A `TensorFiles` whose scaled matrices are float32, and whose scales have no names."""

  def __init__(self, files: TensorFiles):
    self.directory = files.directory
    self._files = files
    names = files.names()
    self._scales = {
      name: scale
      for name in names
      if files.stored(name) in (_FP8, _FP4)
      and (scale := name.removesuffix(".weight") + ".scale") in names
      and files.stored(scale) == _SCALE
    }

  def names(self) -> set[str]:
    return self._files.names() - set(self._scales.values())

  def shape(self, name: str) -> tuple[int, ...]:
    shape = self._files.shape(name)
    return (shape[0], 2 * shape[1]) if self._is_packed(name) else shape

  def dtype(self, name: str) -> np.dtype:
    """Raises ValueError as `TensorFiles.dtype`, and for scales that are not of whole blocks."""
    if name not in self._scales:
      return self._files.dtype(name)
    shape, scales = self.shape(name), self._files.shape(self._scales[name])
    if len(shape) != 2 or len(scales) != 2 or not all(map(_is_whole, shape, scales)):
      raise ValueError(
        f"{self.directory}: {name} is {shape}, its scales {scales} are not of whole blocks"
      )
    return np.dtype(np.float32)

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """As `TensorFiles.read`."""
    if name not in self._scales:
      return self._files.read(name, index)
    self.dtype(name)
    shape = self.shape(name)
    rows, columns = (
      part.indices(n) for part, n in zip(index or (slice(None),) * 2, shape, strict=True)
    )
    values = self._files.read_bytes(name, slice(*rows))
    if self._is_packed(name):
      values = _FP4_VALUES[np.stack([values & 15, values >> 4], axis=-1)].reshape(len(values), -1)
    else:
      values = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = self._files.read_bytes(self._scales[name]).view(ml_dtypes.float8_e8m0fnu)
    block = tuple(n // s for n, s in zip(shape, scales.shape, strict=True))
    chosen = np.ix_(
      *(np.arange(*part) // n for part, n in zip((rows, columns), block, strict=True))
    )
    return values[:, slice(*columns)] * scales.astype(np.float32)[chosen]

  def _is_packed(self, name: str) -> bool:
    return name in self._scales and self._files.stored(name) == _FP4


def _is_whole(size: int, scales: int) -> bool:
  """Whether so many scales are of whole blocks. Their size is a power of two (128, 32): 2 scales of
  192 rows are not of 96 each, but of 128 and of the rest.
  """
  block, rest = divmod(size, scales)
  return not rest and (scales == 1 or block.bit_count() == 1)
