"""The Llama family against transformers: log-probs, gradients, packing, decoding, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import hf, layers, llama
from agentrl_jax.models.model import initialize, unstack
from agentrl_jax.models.sharding import batch_sharding, make_mesh, shardings

CASES = ["tied", "untied_linear", "multi_query_llama3"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
TINY = llama.bind(
  llama.Config(
    vocab_size=48, embed=16, ffw=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_position=64
  )
)  # fmt: skip


def load(reference, name):
  model = hf.load_model(reference / name)
  arrays = np.load(reference / f"{name}.npz")
  return model, hf.load_weights(model, reference / name), arrays


def separate(tokens):
  """Each row its own sample from position 0."""
  rows, length = tokens.shape
  sample = np.broadcast_to(np.arange(rows)[:, None], (rows, length))
  position = np.broadcast_to(np.arange(length)[None], (rows, length))
  return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, sample, position))


def log_probs(model, weights, tokens, sample, position):
  hidden = model.forward(weights, tokens, sample, position)
  return jax.nn.log_softmax(hidden @ model.unembedding(weights), axis=-1)


def assert_same_sums(found, expected, name=""):
  """Of sums over tokens, whose terms cancel: errors are relative to the array's largest entry."""
  scale = np.abs(expected).max() or 1.0
  np.testing.assert_allclose(found / scale, expected / scale, err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients_equal_transformers(reference, name):
  model, weights, arrays = load(reference, name)
  tokens, sample, position = separate(arrays["tokens"])

  def loss(weights):
    logp = log_probs(model, weights, tokens, sample, position)
    picked = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(arrays["weighting"] * picked), logp

  gradient, logp = jax.jit(jax.grad(loss, has_aux=True))(weights)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  checked = 0
  for (spec, rule), ours in zip(hf.pairs(model), jax.tree.leaves(gradient), strict=True):
    for layer, hf_name in enumerate(hf.names(rule, spec)):
      part = ours[layer] if len(hf.names(rule, spec)) > 1 else ours
      expected = arrays[f"grad:{hf_name}"]
      found = np.asarray(part).transpose(rule.perm)
      assert_same_sums(found, expected, hf_name)
      checked += 1
  assert checked == sum(key.startswith("grad:") for key in arrays)


def test_packed_rows_equal_separate_ones(reference):
  """Two samples and padding share a row; a NaN in no place, a gradient in no padding."""
  model, weights, arrays = load(reference, "tied")
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  expected = arrays["logp"]
  packed = jnp.concatenate([tokens[0, :11], tokens[1, :7], tokens[0, :5]])[None]
  sample = jnp.asarray([[4] * 11 + [0] * 7 + [-1] * 5], jnp.int32)
  position = jnp.asarray([[*range(11), *range(7), *range(5)]], jnp.int32)
  found = jax.jit(lambda w: log_probs(model, w, packed, sample, position))(weights)[0]
  np.testing.assert_allclose(found[:11], expected[0, :11], **TOLERANCE)
  np.testing.assert_allclose(found[11:18], expected[1, :7], **TOLERANCE)

  def padding_only(weights):
    hidden = model.forward(weights, packed, jnp.full_like(sample, -1), position)
    return jnp.sum(jnp.where((sample < 0)[..., None], 0.0, hidden) * 0.0)

  gradient = jax.jit(jax.grad(padding_only))(weights)
  assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("chunks", [(1,) * 12, (5, 4, 3)])
def test_decode_equals_forward(reference, chunks):
  """Token by token, and in chunks whose ends are padding for the shorter row."""
  model, weights, arrays = load(reference, "untied_linear")
  tokens, sample, position = separate(arrays["tokens"][:, :12])
  expected = jax.jit(model.forward)(weights, tokens, sample, position)
  lengths = np.array([12, 9])
  step = jax.jit(model.decode, donate_argnums=1)
  per_layer = unstack(weights)
  cache = model.init_cache(2, 16)
  start, found = 0, []
  for size in chunks:
    part = np.arange(start, start + size)
    where = np.where(part[None] < lengths[:, None], part[None], -1)
    hidden, cache = step(
      per_layer, cache, tokens[:, start : start + size], jnp.asarray(where, jnp.int32)
    )
    found.append(np.asarray(hidden))
    start += size
  found = np.concatenate(found, axis=1)
  assert np.isfinite(found).all()
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(found[row, :length], expected[row, :length], rtol=1e-5, atol=1e-5)
  keys, values = cache[0]
  assert np.all(np.asarray(keys)[1, :, :, 9:] == 0), "padding was written to the cache"
  assert np.all(np.asarray(values)[1, :, 9:] == 0), "padding was written to the cache"


def test_decode_takes_stacked_weights_and_donates_the_cache():
  weights = initialize(TINY, jax.random.key(0))
  tokens = jnp.asarray([[3], [5]], jnp.int32)
  position = jnp.zeros((2, 1), jnp.int32)
  step = jax.jit(TINY.decode, donate_argnums=1)
  cache = TINY.init_cache(2, 8)
  with jax.debug_nans(False):  # which keeps what is donated, to run a faulty program again
    stacked, _ = step(weights, cache, tokens, position)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
  unstacked, _ = step(unstack(weights), TINY.init_cache(2, 8), tokens, position)
  np.testing.assert_allclose(stacked, unstacked, rtol=1e-6, atol=1e-6)


def test_remat_changes_nothing_and_matmul_sees_every_product():
  weights = initialize(TINY, jax.random.key(1))
  row = separate(np.arange(10).reshape(2, 5))
  seen = []

  def matmul(x, weight):
    seen.append(weight.shape)
    return layers.matmul(x, weight)

  def loss(weights, **options):
    return jnp.sum(jnp.square(TINY.forward(weights, *row, **options)))

  plain = jax.jit(jax.grad(loss))(weights)
  remat = jax.jit(jax.grad(lambda w: loss(w, remat=jax.checkpoint, matmul=matmul)))(weights)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, remat)
  assert sorted(set(seen)) == [(16, 8), (16, 16), (16, 24), (24, 16)]


def test_bfloat16_activations_stay_close():
  weights = initialize(TINY, jax.random.key(2))
  row = separate(np.arange(12).reshape(2, 6))
  wide = TINY.forward(weights, *row)
  narrow = TINY.forward(weights, *row, dtype=jnp.bfloat16)
  assert narrow.dtype == jnp.bfloat16
  np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.1)


@pytest.mark.parametrize("axis", ["data", "fsdp", "context", "tensor", "expert"])
def test_sharded_equals_unsharded(axis):
  weights = initialize(TINY, jax.random.key(3))
  row = separate(np.arange(32).reshape(2, 16))

  def loss(weights, *row):
    return jnp.sum(jnp.square(TINY.forward(weights, *row)[..., :8]))

  expected = jax.jit(jax.value_and_grad(loss))(weights, *row)
  mesh = make_mesh(**{axis: 2})
  placed = jax.device_put(weights, shardings(TINY, mesh))
  rows = tuple(jax.device_put(x, batch_sharding(mesh)) for x in row)
  found = jax.jit(jax.value_and_grad(loss))(placed, *rows)
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), found, expected)


def test_rope_frequencies_by_hand():
  # head_dim 4, theta 100: frequencies 1 and 100^-1/2 = 0.1.
  np.testing.assert_allclose(layers.rope_frequencies(4, 100.0, None), [1.0, 0.1], rtol=1e-6)
  linear = layers.rope_frequencies(4, 100.0, layers.Linear(4.0))
  np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-6)
  # 20 pi positions: 10 turns of the first pair (kept), 1 turn of the second (divided by 8).
  llama3 = layers.Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original_length=62.83185307)
  np.testing.assert_allclose(layers.rope_frequencies(4, 100.0, llama3), [1.0, 0.0125], rtol=1e-5)
