"""Exactness of the two-level draw, its log-probs, and what its randomness depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.sampler.sampling import request_key, sample, uniforms

VOCABS = [1, 50, 97, 5000]


def _logits(rows, vocab, seed=0):
  return 3 * np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32)


def _log_softmax(x):
  x = x.astype(np.float64)
  shifted = x - x.max(axis=1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab", VOCABS)
def test_logp_is_that_of_the_sampled_id_at_the_rows_temperature(vocab):
  logits, temperature = _logits(6, vocab), np.array([0.7, 1.0, 1.3] * 2, np.float32)
  uniform = np.random.default_rng(1).random((6, 2)).astype(np.float32)
  ids, logp = jax.jit(sample)(logits, temperature, uniform)
  expected = _log_softmax(logits / temperature[:, None])[np.arange(6), np.asarray(ids)]
  np.testing.assert_allclose(logp, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab", VOCABS)
def test_temperature_zero_takes_the_first_largest_logit(vocab):
  logits = np.round(_logits(8, vocab))  # rounding makes ties
  uniform = np.random.default_rng(2).random((8, 2)).astype(np.float32)
  ids, logp = jax.jit(sample)(logits, np.zeros(8, np.float32), uniform)
  np.testing.assert_array_equal(ids, logits.argmax(axis=1))
  np.testing.assert_allclose(logp, _log_softmax(logits).max(axis=1), atol=2e-6)


@pytest.mark.parametrize("vocab", [7, 300])
def test_frequencies_follow_the_distribution(vocab):
  """Pearson's statistic has mean vocab - 1 and variance 2 (vocab - 1): five deviations."""
  draws = 40_000
  logits = _logits(1, vocab, seed=3) / 2
  key = np.repeat(request_key(0, 0)[None], draws, axis=0)
  uniform = uniforms(jnp.asarray(key), jnp.arange(draws))
  ids, _ = jax.jit(sample)(np.repeat(logits, draws, axis=0), np.ones(draws, np.float32), uniform)
  expected = draws * np.exp(_log_softmax(logits)[0])
  seen = np.bincount(np.asarray(ids), minlength=vocab)
  statistic = ((seen - expected) ** 2 / expected).sum()
  assert statistic < vocab - 1 + 5 * np.sqrt(2 * (vocab - 1))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_an_impossible_token_is_never_drawn(uniform):
  """Probability lies on ids 3 and 96 only, the ends of the range included."""
  logits = np.full((1, 97), -np.inf, np.float32)
  logits[0, [3, 96]] = 0.0
  for other in (0.0, 1 - 2**-24):
    pair = np.array([[uniform, other]], np.float32)
    ids, logp = sample(jnp.asarray(logits), jnp.ones(1), jnp.asarray(pair))
    assert int(ids[0]) in (3, 96)
    np.testing.assert_allclose(logp, np.log(0.5), atol=1e-6)


def test_the_first_uniform_splits_the_vocabulary_in_order():
  """p = (.1, .2, .3, .4) in blocks of two: mass .3 and .7; within them 1/3, 2/3 and 3/7, 4/7."""
  logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
  pairs = [(0.29, 0.32), (0.29, 0.34), (0.31, 0.42), (0.31, 0.44)]
  rows = np.repeat(logits[None], 4, axis=0)
  ids, _ = sample(jnp.asarray(rows), jnp.ones(4), jnp.asarray(pairs, jnp.float32))
  assert ids.tolist() == [0, 1, 2, 3]


def test_uniforms_depend_on_seeds_and_index_but_not_on_the_row():
  seeds = [(1, 5), (1, 6), (2, 5), (1, 5 + (1 << 70)), (-1, 5), (15, 0)]
  key = np.stack([request_key(*pair) for pair in seeds])
  index = np.full(len(seeds), 3, np.int32)
  base = np.asarray(uniforms(jnp.asarray(key), jnp.asarray(index)))
  assert len(np.unique(base)) == base.size and (base >= 0).all() and (base < 1).all()
  order = np.array([2, 0, 5, 3, 1, 4])
  again = uniforms(jnp.asarray(key[order]), jnp.asarray(index))
  np.testing.assert_array_equal(again, base[order])
  later = uniforms(jnp.asarray(key), jnp.asarray(index + 1))
  assert not np.isin(np.asarray(later), base).any()
