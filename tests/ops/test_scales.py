"""Partitions by hand: which tokens form a unit, what it sums to, where it starts and ends."""

import numpy as np
import pytest

from agentrl_jax.ops.scales import (
  GROUP,
  TOKEN,
  TRAJ,
  TURN,
  Partition,
  fixed_chunks,
  is_first,
  is_last,
  marked_chunks,
  restrict,
  scored,
  spread,
  unit_count,
  unit_mean,
  unit_sum,
)
from tests.reference import batches
from tests.reference import losses as loop


def by_hand():
  """Two trajectories, the second faulted; turns of 3, 1 and 2 tokens with a gap in the first."""
  one = batches.by_hand([-1, 0, 0, 0, -1, 1], [0.0, 0.0], group=4)
  two = batches.by_hand([0, 0, -1, -1, -1, -1], [0.0], group=-1)
  one.streams[0].tokens = [9, 1, 7, 2, 7, 3]
  return batches.lay_out([one, two]).batch


def test_labels():
  batch = by_hand()
  np.testing.assert_array_equal(TURN(batch).ids, [[-1, 0, 0, 0, -1, 1], [2, 2, -1, -1, -1, -1]])
  np.testing.assert_array_equal(TRAJ(batch).ids, [[-1, 0, 0, 0, -1, 0], [1, 1, -1, -1, -1, -1]])
  np.testing.assert_array_equal(GROUP(batch).ids, [[-1, 4, 4, 4, -1, 4], [-1] * 6])
  np.testing.assert_array_equal(TOKEN(batch).ids, [[-1, 1, 2, 3, -1, 5], [6, 7, -1, -1, -1, -1]])
  np.testing.assert_array_equal(scored(batch), [[0, 1, 1, 1, 0, 1], [0] * 6])


def test_chunks_stay_within_turns():
  batch = by_hand()
  two = fixed_chunks(2)(batch).ids
  np.testing.assert_array_equal(two, [[-1, 1, 1, 3, -1, 5], [6, 6, -1, -1, -1, -1]])
  marked = marked_chunks([7])(batch).ids  # the 7 among the observations marks nothing
  np.testing.assert_array_equal(marked, [[-1, 1, 1, 3, -1, 5], [6, 6, -1, -1, -1, -1]])
  with pytest.raises(ValueError, match="chunk length is 0, expected a whole number of at least 1"):
    fixed_chunks(0)
  with pytest.raises(ValueError, match="at least one token id"):
    marked_chunks([])


def test_sums_means_and_spread():
  units = Partition(np.array([[0, 2, 2, -1]], np.int32), 4)
  x = np.float32([[1, 2, 4, np.nan]])
  np.testing.assert_array_equal(unit_sum(x, units), [1, 0, 6, 0])
  np.testing.assert_array_equal(unit_mean(x, units), [1, 0, 3, 0])
  np.testing.assert_array_equal(unit_count(units), [1, 0, 2, 0])
  np.testing.assert_array_equal(spread(np.float32([5, 6, 7, 8]), units, fill=-1), [[5, 7, 7, -1]])
  narrow = restrict(units, np.array([[True, False, True, True]]))
  np.testing.assert_array_equal(narrow.ids, [[0, -1, 2, -1]])


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["turn", "traj", "chunk2", "marked3,4"])
def test_firsts_and_lasts_wherever_the_samples_lie(name, seed):
  scale = {
    "turn": TURN,
    "traj": TRAJ,
    "chunk2": fixed_chunks(2),
    "marked3,4": marked_chunks([3, 4]),
  }
  made = batches.ragged(seed)
  layout = batches.one_a_row(
    made, rows=24, length=40, reverse=True
  )  # later samples in earlier rows
  packed = batches.pack(made, layout)
  units = scale[name](packed.batch)
  for mark, end in [(is_first, 0), (is_last, -1)]:
    expected = [[0.0] * len(one.places()) for one in made]
    for row, one in zip(expected, made, strict=True):
      for unit in loop.units_of(one, name):
        row[unit[end]] = 1.0
    np.testing.assert_array_equal(mark(packed.batch, units), layout.column(expected, made) > 0)
