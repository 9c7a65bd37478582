"""The table says what the sets say, through growth and replacement."""

import numpy as np

from agentrl_jax.sampler.stops import StopTable


def _check(table, sets):
  rows = table.indices(sets)
  bits = np.asarray(table.table)
  for stop_set, row in zip(sets, rows, strict=True):
    assert np.flatnonzero(bits[row]).tolist() == sorted(set(stop_set))
    assert all(table.stops(stop_set, token) == (token in stop_set) for token in range(20))


def test_rows_hold_the_sets_of_the_call():
  table = StopTable(20)
  _check(table, [(1, 2), (), (1, 2), (19,)])
  size = table.table.shape
  _check(table, [(5,), (1, 2)])
  assert table.table.shape == size
  _check(table, [(6,), (7,), (1, 2)])  # the fifth and sixth set ever: old ones make room
  assert table.table.shape == size
  _check(table, [(i,) for i in range(9)])  # nine at once: the table grows
  assert table.table.shape == (16, 20)
  _check(table, [(3,)])
