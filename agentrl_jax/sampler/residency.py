"""Which tokens' keys and values each row of the cache holds, so that no prefix is computed twice.

A finished request's row stays resident until another request needs the row (least recently used
first). Plain numpy; the arrays on the device are moved by whoever asks here.
"""

import numpy as np
from jaxtyping import Int

EMPTY = -1  # never a token id


class Residency:
  """Invariant: row r's keys and values at indices below length[r] are those of tokens[r]."""

  def __init__(self, rows: int, context: int, *, whole: bool = False):
    """`whole`: a row is of use to what begins with all that it holds, and to nothing else."""
    self.whole = whole
    self.tokens = np.full((rows, context), EMPTY, np.int32)
    self.length = np.zeros(rows, np.int32)
    self.used = np.zeros(rows, np.int64)  # tick of the last use
    self.busy = np.zeros(rows, bool)  # belongs to a request that is not finished
    self._tick = 0

  def clear(self) -> None:
    """Nothing is valid any more; busy rows stay with their requests, the others are as when new."""
    self.tokens[:] = EMPTY
    self.length[:] = 0
    self.used[:] = 0
    self._tick = 0

  def append(self, row: int, ids: Int[np.ndarray, "N"]) -> None:
    """Keys and values of `ids` now follow what the row held."""
    start = self.length[row]
    self.tokens[row, start : start + len(ids)] = ids
    self.length[row] = start + len(ids)
    self._touch(row)

  def copy(
    self,
    sources: Int[np.ndarray, "N"],
    targets: Int[np.ndarray, "N"],
    lengths: Int[np.ndarray, "N"],
  ) -> None:
    """Target n now holds the first `lengths[n]` tokens that source n held before this call."""
    kept = np.arange(self.tokens.shape[1])[None, :] < lengths[:, None]
    self.tokens[targets] = np.where(kept, self.tokens[sources], EMPTY)
    self.length[targets] = lengths
    for row in (*sources, *targets):
      self._touch(row)

  def matches(self, ids: Int[np.ndarray, "N"]) -> Int[np.ndarray, "rows"]:
    """How many leading ids each row holds; where rows are of use whole, 0 unless they are all."""
    match = common_prefix(self.tokens[:, : len(ids)], ids)
    return np.where(match == self.length, match, 0) if self.whole else match

  def claim(self, ids: Int[np.ndarray, "N"]) -> int:
    """Takes a free row for a request that needs the keys and values of `ids`.

    A row whose whole content is a prefix of `ids` (the same episode, one turn earlier) is taken,
    the longest first; else the least recently used row. Raises ValueError when no row is free.
    """
    free = np.flatnonzero(~self.busy)
    if not free.size:
      raise ValueError(f"all {len(self.busy)} rows are busy")
    match = self.matches(ids)[free]
    continued = np.where(match == self.length[free], match, 0)
    best = int(continued.argmax())
    row = int(free[best] if continued[best] > 0 else free[self.used[free].argmin()])
    self.busy[row] = True
    self._touch(row)
    return row

  def release(self, row: int) -> None:
    """The request is finished; what the row holds stays resident."""
    self.busy[row] = False
    self._touch(row)

  def _touch(self, row: int) -> None:
    self._tick += 1
    self.used[row] = self._tick


def common_prefix(
  rows: Int[np.ndarray, "rows N"], ids: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "rows"]:
  """Length of the longest common prefix of `ids` and each row."""
  same = rows == ids[None, :]
  return np.where(same.all(axis=1), len(ids), same.argmin(axis=1)) if len(ids) else same.sum(axis=1)
