"""Which row a request gets, and that the host's account of the cache is that of its tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.sampler.residency import EMPTY, Residency, common_prefix

ids = lambda *tokens: np.array(tokens, np.int32)  # noqa: E731


def _resident(*streams, context=8):
  residency = Residency(len(streams), context)
  for row, stream in enumerate(streams):
    residency.append(row, np.array(stream, np.int32))
  return residency


def test_matches_count_leading_tokens():
  residency = _resident([1, 2, 3], [1, 2, 4, 5], [], [9])
  assert residency.matches(ids(1, 2, 4, 7)).tolist() == [2, 3, 0, 0]
  assert residency.matches(ids()).tolist() == [0, 0, 0, 0]


def test_a_row_that_ends_where_the_request_goes_on_is_taken_though_older_rows_are_free():
  residency = _resident([7], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5])
  assert residency.claim(ids(1, 2, 3, 9)) == 2


def test_otherwise_the_least_recently_used_row_is_taken():
  residency = _resident([1], [2], [3])
  residency.append(0, ids(4))
  assert [residency.claim(ids(9)) for _ in range(3)] == [1, 2, 0]
  with pytest.raises(ValueError, match="all 3 rows are busy"):
    residency.claim(ids(9))
  residency.release(2)
  assert residency.claim(ids(9)) == 2


def test_copies_of_one_call_read_what_was_there_before_it():
  residency = _resident([1, 2, 3], [4, 5, 6])
  residency.copy(np.array([1, 0]), np.array([0, 1]), np.array([2, 3]))
  assert residency.tokens[0].tolist() == [4, 5] + [EMPTY] * 6
  assert residency.tokens[1].tolist() == [1, 2, 3] + [EMPTY] * 5
  assert residency.length.tolist() == [2, 3]


def test_nothing_is_resident_after_clear():
  residency = _resident([1, 2], [1])
  residency.busy[1] = True
  residency.clear()
  assert residency.matches(ids(1, 2)).tolist() == [0, 0]
  assert residency.length.tolist() == [0, 0] and residency.busy.tolist() == [False, True]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=5), st.data())
def test_common_prefix_equals_counting(streams, data):
  query = data.draw(st.lists(st.integers(0, 2), max_size=6))
  rows = np.full((len(streams), 6), EMPTY, np.int32)
  for row, stream in enumerate(streams):
    rows[row, : len(stream)] = stream
  found = common_prefix(rows[:, : len(query)], np.array(query, np.int32))
  for row, stream in enumerate(streams):
    expected = 0
    while expected < min(len(stream), len(query)) and stream[expected] == query[expected]:
      expected += 1
    assert found[row] == expected
