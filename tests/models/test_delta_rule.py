"""The gated delta rule in chunks against a loop over positions, with resets, continued streams and
memories.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import delta_rule
from tests.models.test_dense import TOLERANCE, assert_same_sums
from tests.reference.delta_rule import convolved, recurrence

SAMPLE = [[7] * 9 + [2] * 5 + [3] * 8 + [-1] * 3, [4] * 2 + [1] * 20 + [0] * 3]
PARENT = [[7] * 22 + [-1] * 3, [4] * 2 + [4] * 20 + [0] * 3]


def case(seed, length=25):
  rng = np.random.default_rng(seed)
  query, key = rng.normal(size=(2, 2, length, 2, 6)) + 0.5
  value = rng.normal(size=(2, length, 2, 3, 5))
  log_decay = -rng.gamma(1.0, 0.3, (2, length, 2, 3))
  strength = rng.uniform(0, 1, (2, length, 2, 3))
  return [jnp.asarray(x, jnp.float32) for x in (query, key, value, log_decay, strength)]


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("parent", [None, PARENT])
def test_chunks_equal_a_loop_over_positions(chunk, parent):
  arrays, sample = case(0), jnp.asarray(SAMPLE, jnp.int32)
  given = None if parent is None else jnp.asarray(parent, jnp.int32)
  read, _ = jax.jit(lambda *a: delta_rule.delta_rule(*a, sample, given, chunk=chunk))(*arrays)
  expected, _ = recurrence(*map(np.asarray, arrays), SAMPLE, parent or SAMPLE)
  real = np.asarray(sample) >= 0
  np.testing.assert_allclose(np.asarray(read)[real], expected[real], **TOLERANCE)
  assert np.isfinite(read).all()


def test_a_memory_is_continued():
  """From the memory of the first part of a sample, with a part that is no whole chunk."""
  arrays, sample = case(1), np.zeros((2, 25), np.int32)
  expected, last = recurrence(*map(np.asarray, arrays), sample, sample)
  run = jax.jit(lambda memory, *a: delta_rule.delta_rule(
    *a, jnp.zeros(a[0].shape[:2], jnp.int32), memory=memory, chunk=4))  # fmt: skip
  memory, parts = jnp.zeros((2, 2, 3, 6, 5)), []
  for start, stop in ((0, 10), (10, 11), (11, 25)):
    read, memory = run(memory, *(x[:, start:stop] for x in arrays))
    parts.append(read)
  np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, **TOLERANCE)
  np.testing.assert_allclose(memory, last, **TOLERANCE)


def test_gradients_do_not_depend_on_the_chunk():
  """And are those of the loop's central differences in a random direction, within its error."""
  arrays, sample = case(2), jnp.asarray(SAMPLE, jnp.int32)
  parent = jnp.asarray(PARENT, jnp.int32)
  real = (sample >= 0)[:, :, None, None, None]

  def loss(arrays, chunk):
    read, _ = delta_rule.delta_rule(*arrays, sample, parent, chunk=chunk)
    return jnp.sum(jnp.where(real, jnp.sin(read), 0.0))

  one, other = (jax.jit(jax.grad(lambda a, c=c: loss(a, c)))(arrays) for c in (1, 8))
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), one, other)
  rng = np.random.default_rng(3)
  direction = [rng.normal(size=x.shape) for x in arrays]

  def moved(step):
    at = [np.asarray(x, np.float64) + step * d for x, d in zip(arrays, direction, strict=True)]
    read, _ = recurrence(*at, SAMPLE, PARENT)
    return np.sin(read)[np.asarray(sample) >= 0].sum()

  expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
  found = sum(np.sum(np.asarray(g) * d) for g, d in zip(one, direction, strict=True))
  np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_equal_keys_and_no_decay_are_no_trouble():
  """All positions overwrite the same entry: what is read is the last value, without blowing up."""
  key = jnp.ones((1, 200, 1, 4))
  value = jnp.asarray(np.random.default_rng(4).normal(size=(1, 200, 1, 1, 3)), jnp.float32)
  full = jnp.ones((1, 200, 1, 1))
  read, _ = delta_rule.delta_rule(key, key, value, 0 * full, full, jnp.zeros((1, 200), jnp.int32))
  np.testing.assert_allclose(read * 2, value, rtol=1e-4, atol=1e-4)  # the query is divided by 2


@pytest.mark.parametrize("parent", [None, PARENT])
def test_convolution_equals_a_loop(parent):
  rng = np.random.default_rng(5)
  x, taps = rng.normal(size=(2, 25, 3)), rng.normal(size=(4, 1, 3))
  given = None if parent is None else jnp.asarray(parent, jnp.int32)
  found = delta_rule.convolve(
    jnp.asarray(x, jnp.float32), jnp.asarray(taps, jnp.float32), jnp.asarray(SAMPLE), given
  )
  real = np.asarray(SAMPLE) >= 0
  expected = convolved(x, taps[:, 0], SAMPLE, parent or SAMPLE)
  np.testing.assert_allclose(np.asarray(found)[real], expected[real], **TOLERANCE)


def test_convolution_goes_on_from_what_came_before():
  rng = np.random.default_rng(6)
  x, taps = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 9, 3), (4, 1, 3)))
  expected = delta_rule.convolve(x, taps, jnp.zeros((2, 9), jnp.int32))
  before, parts = jnp.zeros((2, 3, 3)), []
  for start, stop in ((0, 2), (2, 3), (3, 9)):
    made, whole = delta_rule.convolve_on(x[:, start:stop], taps, before)
    before = whole[:, :, -3:]
    parts.append(made)
  np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, **TOLERANCE)
