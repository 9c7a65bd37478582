"""The recurrence against a loop, and time order across rows."""

import jax
import numpy as np

from agentrl_jax.ops.scans import bootstrap, reverse_recurrence, timeline
from tests.reference import batches


def test_recurrence_equals_a_loop():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 37)).astype(np.float32)
  decay = rng.uniform(0, 1, (3, 37)).astype(np.float32)
  decay[rng.random((3, 37)) < 0.2] = 0
  expected, y = np.zeros_like(x), np.zeros(3, np.float32)
  for t in reversed(range(37)):
    y = x[:, t] + decay[:, t] * y
    expected[:, t] = y
  np.testing.assert_allclose(reverse_recurrence(x, decay), expected, rtol=1e-5, atol=1e-6)


def test_recurrence_by_hand():
  """3; 2 + .5 x 3 = 3.5; a zero restarts at 1; 4 + 1 = 5."""
  ours = reverse_recurrence(np.float32([4, 1, 2, 3]), np.float32([1, 0, 0.5, 9]))
  np.testing.assert_array_equal(ours, [5, 1, 3.5, 3])


def test_time_runs_through_samples_in_order():
  made = batches.ragged(2)
  packed = batches.pack(made, batches.one_a_row(made, rows=24, length=40, reverse=True))
  line = jax.device_get(timeline(packed.batch))
  tokens = packed.batch.tokens.ravel()[line.order]
  expected = [t for one in made for piece in one.streams for t in piece.tokens]
  assert tokens[: len(expected)].tolist() == expected
  owner = [r for r, one in enumerate(made) for piece in one.streams for _ in piece.tokens]
  assert line.traj[: len(owner)].tolist() == owner
  ends = [i for i in range(len(owner)) if i + 1 == len(owner) or owner[i] != owner[i + 1]]
  assert np.flatnonzero(line.end)[: len(ends)].tolist() == ends


def test_bootstrap_reads_the_sentinel_and_nothing_else():
  made = batches.ragged(3)
  packed = batches.pack(made, batches.place(made, rows=12, length=40), poison=np.nan)
  with jax.debug_nans(False):
    ours = np.asarray(bootstrap(packed.batch, packed.aux.value))
  np.testing.assert_allclose(ours[: len(made)], [one.bootstrap() for one in made], rtol=1e-6)
  assert any(one.truncated for one in made)
