"""Packed attention: both forms against a loop, forward and backward, whatever the packing."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import attention, remat

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 13, 4, 2, 3


def loop(query, key, value, sample, parent=None, window=None):
  """One query at a time over the keys it may see; a window is (position, size)."""
  parent = sample if parent is None else parent
  position, size = (np.zeros(sample.shape), 1) if window is None else window
  out = np.zeros(query.shape)
  for b, t, n in np.ndindex(*query.shape[:3]):
    seen = [s for s in range(t + 1) if sample[b, s] in (sample[b, t], parent[b, t])]
    seen = [s for s in seen if sample[b, t] >= 0 and sample[b, s] >= 0]
    seen = [s for s in seen if position[b, t] - position[b, s] < size]
    if seen:
      k = n // (query.shape[2] // key.shape[2])
      score = np.array([query[b, t, n] @ key[b, s, k] for s in seen]) / np.sqrt(query.shape[-1])
      weight = np.exp(score - score.max())
      out[b, t, n] = weight @ value[b, seen, k] / weight.sum()
  return out


def arrays(seed, length=LENGTH):
  rng = np.random.default_rng(seed)
  heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
  return [jnp.asarray(rng.normal(size=(ROWS, length, n, HEAD_DIM)), jnp.float32) for n in heads]


@jax.jit
def plain(query, key, value, sample, parent=None, window=None):
  return attention.attend_plain(query, key, value, sample, parent, window)


@jax.jit
def blockwise(query, key, value, sample, parent=None, window=None):
  return attention.attend_blockwise(query, key, value, sample, parent, window, block=4)


@st.composite
def packings(draw):
  """[ROWS, LENGTH] sample ids in contiguous runs, some of them padding."""
  rows = []
  for row in range(ROWS):
    cuts = sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=4)))
    runs = np.diff([0, *cuts, LENGTH])
    ids = draw(st.permutations(range(10 * row, 10 * row + len(runs))))
    padded = draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    rows.append(np.repeat([-1 if p else i for i, p in zip(ids, padded, strict=True)], runs))
  return np.stack(rows).astype(np.int32)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(packings(), st.integers(0, 1000))
def test_both_forms_equal_the_loop(sample, seed):
  query, key, value, _ = arrays(seed)
  expected = loop(*map(np.asarray, (query, key, value)), sample)
  for form in (plain, blockwise):
    np.testing.assert_allclose(form(query, key, value, sample), expected, rtol=1e-5, atol=1e-5)


@st.composite
def families(draw):
  """A packing, and for each sample the one that it continues: one before it, or itself."""
  sample = draw(packings())
  parent = sample.copy()
  for row in range(ROWS):
    seen = []
    for label in dict.fromkeys(sample[row].tolist()):
      if label >= 0:
        parent[row, sample[row] == label] = draw(st.sampled_from([label, *seen]))
        seen.append(label)
  return sample, parent


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(families(), st.integers(0, 1000))
def test_a_continued_stream_is_seen_by_those_that_continue_it_only(family, seed):
  query, key, value, weight = arrays(seed)
  expected = loop(*map(np.asarray, (query, key, value)), *family)
  for form in (plain, blockwise):
    np.testing.assert_allclose(form(query, key, value, *family), expected, rtol=1e-5, atol=1e-5)
  by_plain, by_blocks = gradients(query, key, value, weight, *family)
  for a, b in zip(by_plain, by_blocks, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def positions(sample, parent):
  """Within streams: a sample goes on where the one it continues ends."""
  position = np.zeros(sample.shape, np.int32)
  for row in range(ROWS):
    ends = {}
    for t, label in enumerate(sample[row].tolist()):
      position[row, t] = ends.setdefault(label, ends.get(int(parent[row, t]), 0))
      ends[label] += 1
  return position


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(families(), st.integers(1, LENGTH), st.integers(0, 1000))
def test_a_window_leaves_the_nearest_keys(family, size, seed):
  """The end of a continued stream among them; forward, and the blockwise form's own backward."""
  query, key, value, weight = arrays(seed)
  position = positions(*family)
  expected = loop(*map(np.asarray, (query, key, value)), *family, (position, size))
  window = attention.Window(jnp.asarray(position), jnp.asarray(size))
  for form in (plain, blockwise):
    found = form(query, key, value, *family, window)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  by_plain, by_blocks = gradients(query, key, value, weight, *family, window)
  for a, b in zip(by_plain, by_blocks, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def columns(sample, parent=None, window=None):
  """For each block of 4 queries, the blocks of keys that are computed."""
  parent = sample if parent is None else parent
  seen = attention._Seen(sample, parent, window)
  found = attention._columns_of(seen, 4, continued=True)
  return [
    [int(found.at(row, index)) for index in range(int(found.count(row)))]
    for row in range(sample.shape[1] // 4)
  ]


def test_blocks_outside_a_window_are_skipped():
  sample = jnp.zeros((1, 24), jnp.int32)
  position = jnp.arange(24)[None]
  for size, expected in ((1, [0, 1, 2, 3, 4, 5]), (5, [0, 0, 1, 2, 3, 4]), (6, [0, 0, 0, 1, 2, 3])):
    window = attention.Window(position, jnp.asarray(size))
    # Of blocks of 4, the one at index i needs keys from 4 i - size + 1.
    ranges = [list(range(first, row + 1)) for row, first in enumerate(expected)]
    assert columns(sample, window=window) == ranges


def test_blocks_between_a_sample_and_its_parent_are_skipped():
  sample = jnp.asarray([[0] * 4 + [1] * 8 + [2] * 4 + [3] * 4 + [-1] * 4])
  parent = jnp.asarray([[0] * 4 + [0] * 8 + [0] * 4 + [1] * 4 + [-1] * 4])
  assert columns(sample, parent) == [[0], [0, 1], [0, 1, 2], [0, 3], [1, 2, 4], [5]]
  # Sample 3 begins at position 12 of its stream: a window of 6 leaves of its parent the last five.
  position = jnp.asarray([[*range(4), *range(4, 12), *range(4, 8), *range(12, 16), *[0] * 4]])
  window = attention.Window(position, jnp.asarray(3))
  assert columns(sample, parent, window) == [[0], [0, 1], [1, 2], [0, 3], [2, 4], [5]]


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_is_attended_as_the_loop_would(window):
  query, key, value, _ = arrays(7)
  position = np.stack([np.arange(LENGTH), np.arange(LENGTH)]).astype(np.int32)
  expected = loop(
    *map(np.asarray, (query, key, value)),
    np.zeros((ROWS, LENGTH), np.int32),
    window=None if window is None else (position, window),
  )
  position[1, 9:] = -1  # padding: what it gets is finite and has no meaning
  keys, values = (jnp.full((ROWS, KV_HEADS, *s), 1e3) for s in ((HEAD_DIM, 16), (16, HEAD_DIM)))
  keys = attention.write_keys(keys, key, jnp.asarray(position))
  values = attention.write_values(values, value, jnp.asarray(position))
  found = attention.attend_cache(query, keys, values, jnp.asarray(position), window)
  assert np.isfinite(np.asarray(found)).all()
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(found[1, :9], expected[1, :9], rtol=1e-5, atol=1e-5)


@jax.jit
def gradients(query, key, value, weight, sample, parent=None, window=None):
  def loss(form):
    return lambda *qkv: jnp.sum(form(*qkv, sample, parent, window) * weight)

  return tuple(jax.grad(loss(form), (0, 1, 2))(query, key, value) for form in (plain, blockwise))


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(packings(), st.integers(0, 1000))
def test_gradients_of_both_forms_agree_and_leave_padding_alone(sample, seed):
  """The blockwise form's own backward pass against autodiff of the plain one."""
  by_plain, by_blocks = gradients(*arrays(seed), sample)
  for a, b in zip(by_plain, by_blocks, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(b)[sample < 0] == 0)


def test_plain_gradient_is_the_finite_difference():
  query, key, value, weight = (np.asarray(x, np.float64) for x in arrays(0))
  sample = np.repeat([[0] * 6 + [1] * 5 + [-1] * 2], ROWS, axis=0).astype(np.int32)
  found, _ = gradients(*(jnp.asarray(x, jnp.float32) for x in (query, key, value, weight)), sample)
  rng = np.random.default_rng(1)
  for which in range(3):
    direction = rng.normal(size=(query, key, value)[which].shape)
    ends = []
    for step in (1e-5, -1e-5):
      moved = [query, key, value]
      moved[which] = moved[which] + step * direction
      ends.append(np.sum(loop(*moved, sample) * weight))
    expected = (ends[0] - ends[1]) / 2e-5
    assert np.sum(np.asarray(found[which]) * direction) == pytest.approx(expected, rel=1e-4)


def test_a_poisoned_slot_reaches_no_other_sample():
  """Values far out of range in one sample change nothing elsewhere, in value or gradient."""
  query, key, value, weight = arrays(3)
  sample = np.repeat([[0] * 5 + [1] * 5 + [-1] * 3], ROWS, axis=0).astype(np.int32)
  far = np.asarray(sample[0] != 0)
  for form in (plain, blockwise):
    clean = form(query, key, value, sample)
    spoiled = [jnp.where(far[None, :, None, None], 1e6, x) for x in (query, key, value)]
    np.testing.assert_array_equal(form(*spoiled, sample)[:, :5], clean[:, :5])
  for gradient in gradients(*spoiled, weight, sample):
    assert all(np.isfinite(np.asarray(x)).all() for x in gradient)


def test_memory_of_the_blockwise_form_is_linear_in_length():
  """Temporary bytes of forward and backward: doubling the length at most doubles them."""

  def temporary(length):
    query, key, value, weight = arrays(0, length)

    def loss(*qkv):
      mixed = attention.attend_blockwise(*qkv, jnp.zeros((ROWS, length), jnp.int32))
      return jnp.sum(mixed * weight)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(4096) <= 2.2 * temporary(2048)


def test_what_remat_keeps_of_attention_is_not_computed_again():
  query, _, _, weight = arrays(5)
  sample = jnp.zeros((ROWS, LENGTH), jnp.int32)

  def made(keep):
    def layer(x, _):
      return attention.attend_blockwise(x, x, x, sample, block=4), None

    def loss(x):
      return jnp.sum(keep(layer)(x, None)[0] * weight)

    both = jax.jit(jax.value_and_grad(loss))
    return both.lower(query).as_text().count("stablehlo.while"), both(query)[1]

  (everything, expected), (nothing, _), (attention_only, found) = map(
    made, (remat.save_everything, remat.save_nothing, remat.save_attention)
  )
  assert attention_only == everything < nothing
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_values_may_be_narrower_than_queries_and_keys():
  """Both forms, forward and backward, against values padded to the width of keys."""
  query, key, value, weight = arrays(3)
  sample = jnp.zeros((ROWS, LENGTH), jnp.int32)

  def padded(query, key, narrow, sample):
    return plain(query, key, jnp.pad(narrow, [(0, 0)] * 3 + [(0, 1)]), sample)[..., :2]

  def both(form):
    def loss(*qkv):
      mixed = form(*qkv, sample)
      return jnp.sum(mixed * weight[..., :2]), mixed

    return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value[..., :2])

  expected = both(padded)
  for form in (plain, blockwise):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), both(form), expected)
