"""The stop sets in use as one table on the device: a row a set, a bit a token of the vocabulary.

A stop set may hold hundreds of ids (every token whose text has a newline); the requests of a run
mostly share one, so the table is a few rows and rarely changes.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool


class StopTable:
  """Grows by doubling; starts over when it would outgrow what one call needs."""

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size
    self._row: dict[tuple[int, ...], int] = {}
    self._bits = np.zeros((4, vocab_size), bool)
    self.table: Bool[Array, "S V"] = jnp.asarray(self._bits)

  def indices(self, stop_sets: Sequence[tuple[int, ...]]) -> list[int]:
    """Rows of the table for the sets of one call; `table` holds them until the next call."""
    new = [s for s in dict.fromkeys(stop_sets) if s not in self._row]
    if new:
      self._add(new, stop_sets)
    return [self._row[s] for s in stop_sets]

  def stops(self, stop_set: tuple[int, ...], token: int) -> bool:
    """Whether `token` ends a turn under a set of the last call of `indices`."""
    return bool(self._bits[self._row[stop_set], token])

  def _add(self, new: list[tuple[int, ...]], stop_sets: Sequence[tuple[int, ...]]) -> None:
    if len(self._row) + len(new) > len(self._bits):
      # Sets of finished requests make room first.
      self._row, new = {}, list(dict.fromkeys(stop_sets))
      size = len(self._bits)
      while size < len(new):
        size *= 2
      self._bits = np.zeros((size, self._vocab_size), bool)
    for stop_set in new:
      self._row[stop_set] = len(self._row)
      self._bits[self._row[stop_set]] = False
      self._bits[self._row[stop_set], list(stop_set)] = True
    self.table = jax.device_put(self._bits.copy())
