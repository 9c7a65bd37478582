"""Dense families against transformers: log-probs, gradients, packing, decoding, meshes, files."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import checkpoint_files, decoder, gemma3, hf, layers, llama, qwen2, qwen3
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.model import initialize, unstack
from agentrl_jax.models.sharding import batch_sharding, make_mesh, shardings

CASES = [  # of tests/reference/dense_transformers.py
  *("tied", "untied_linear", "multi_query_llama3"),
  *("qwen2_yarn", "qwen3", "qwen3_yarn", "gemma3", "gemma3_long"),
]
ONE_A_FAMILY = ["tied", "qwen2_yarn", "qwen3", "gemma3"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {
  "vocab_size": 48, "embed": 16, "ffw": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4,
  "max_position": 64,
}  # fmt: skip
CONFIG = decoder.Config(**SIZES)
TINY = llama.bind(CONFIG)
GEMMA3 = gemma3.bind(gemma3.Config(**SIZES, local=(True, False), window=5, query_scalar=3))
FAMILIES = {
  "llama": TINY,
  "qwen2": qwen2.bind(CONFIG),
  "qwen3": qwen3.bind(CONFIG),
  "gemma3": GEMMA3,
}


def random_weights(model, seed):
  """With noise on what starts at zero or one."""
  weights = initialize(model, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda w: w + rng.normal(0, 0.1, w.shape).astype(w.dtype), weights)


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


def assert_same_sums(found, expected, name="", atol=TOLERANCE["atol"]):
  """Of sums over tokens, whose terms cancel: errors are relative to the array's largest entry."""
  scale = np.abs(expected).max() or 1.0
  bound = TOLERANCE | {"atol": atol}
  np.testing.assert_allclose(found / scale, expected / scale, err_msg=name, **bound)


def gradient_and_log_probs(model, weights, arrays):
  """Of the arrays' weighted log-probs, by Hugging Face name; and the log-probs [B T V]."""
  tokens, sample, position = separate(arrays["tokens"])

  def loss(weights):
    logp = log_probs(model, weights, tokens, sample, position)
    picked = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(arrays["weighting"] * picked), logp

  gradient, logp = jax.jit(jax.grad(loss, has_aux=True))(weights)
  return by_hf_name(model, gradient), logp


def by_hf_name(model, tree):
  return {
    name: np.asarray(ours[index]).transpose(rule.perm)
    for (spec, rule), ours in zip(hf.pairs(model), jax.tree.leaves(tree), strict=True)
    for index, name in zip(hf.indices(rule, spec), hf.names(rule, spec), strict=True)
  }


def expected_gradients(arrays):
  return {key.removeprefix("grad:"): arrays[key] for key in arrays if key.startswith("grad:")}


def assert_gradients(found, arrays, atol=TOLERANCE["atol"]):
  """Every tensor that the reference has a gradient of, and no other."""
  expected = expected_gradients(arrays)
  assert found.keys() == expected.keys()
  for name, of_name in expected.items():
    assert_same_sums(found[name], of_name, name, atol)


def assert_decoded(model, weights, cache, tokens, expected, sizes, lengths=(12, 9)):
  """Decodes rows of these lengths from their beginning, in chunks of these sizes, the rest padding;
  hidden states are those expected. Returns the cache after it.
  """
  step, per_layer = jax.jit(model.decode, donate_argnums=1), unstack(weights)
  start, found, ends = 0, [], np.asarray(lengths)[:, None]
  for size in sizes:
    part = np.arange(start, start + size)
    where = jnp.asarray(np.where(part[None] < ends, part[None], -1), jnp.int32)
    hidden, cache = step(per_layer, cache, tokens[:, part], where)
    found.append(np.asarray(hidden))
    start += size
  found = np.concatenate(found, axis=1)
  assert np.isfinite(found).all()
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(found[row, :length], expected[row, :length], **TOLERANCE)
  return cache


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients_equal_transformers(reference, name):
  model, weights, arrays = load(reference, name)
  gradient, logp = gradient_and_log_probs(model, weights, arrays)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  assert_gradients(gradient, arrays)


@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_packed_rows_equal_separate_ones(reference, name):
  """Two samples and padding share a row."""
  model, weights, arrays = load(reference, name)
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  expected = arrays["logp"]
  packed = jnp.concatenate([tokens[0, :11], tokens[1, :7], tokens[0, :5]])[None]
  sample = jnp.asarray([[4] * 11 + [0] * 7 + [-1] * 5], jnp.int32)
  position = jnp.asarray([[*range(11), *range(7), *range(5)]], jnp.int32)
  found = jax.jit(lambda w: log_probs(model, w, packed, sample, position))(weights)[0]
  np.testing.assert_allclose(found[:11], expected[0, :11], **TOLERANCE)
  np.testing.assert_allclose(found[11:18], expected[1, :7], **TOLERANCE)


def test_padding_changes_no_gradient():
  weights = random_weights(GEMMA3, 6)
  tokens, sample, position = separate(np.arange(10).reshape(2, 5))
  padding = np.ones((2, 3), np.int32)
  padded = [
    np.concatenate([x, fill * padding], axis=1)
    for x, fill in ((tokens, 7), (sample, -1), (position, 40))
  ]

  def loss(weights, *row):
    return jnp.sum(jnp.square(GEMMA3.forward(weights, *row)[:, :5]))

  gradient = jax.jit(jax.grad(loss))
  found, expected = gradient(weights, *padded), gradient(weights, tokens, sample, position)
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), found, expected)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_shared_prefix_equals_its_copies(name):
  """Two samples continue a third, whose end, but not whose start, is in a sliding window."""
  model = FAMILIES[name]
  weights = random_weights(model, 5)
  tokens = np.random.default_rng(5).integers(0, 48, 17)
  prefix, first, second = tokens[:7], tokens[7:11], tokens[11:]
  sample = jnp.asarray([[3] * 7 + [0] * 4 + [8] * 6], jnp.int32)
  position = jnp.asarray([[*range(7), *range(7, 11), *range(7, 13)]], jnp.int32)
  forward = jax.jit(model.forward)
  found = forward(weights, tokens[None], sample, position, parent=jnp.full_like(sample, 3))[0]
  branches = [(first, found[7:11]), (second, found[11:])]
  for branch, hidden in branches:
    expected = forward(weights, *separate(np.concatenate([prefix, branch])[None]))[0]
    np.testing.assert_allclose(hidden, expected[7:], **TOLERANCE)
    np.testing.assert_allclose(found[:7], expected[:7], **TOLERANCE)


@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_decode_equals_forward(reference, name):
  """In chunks and token by token; at the end there is padding for the shorter row."""
  model, weights, arrays = load(reference, name)
  tokens, sample, position = separate(arrays["tokens"][:, :12])
  expected = jax.jit(model.forward)(weights, tokens, sample, position)
  cache = assert_decoded(model, weights, model.init_cache(2, 16), tokens, expected, (5, 5, 1, 1))
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


AXES = ["data", "fsdp", "context", "tensor", "expert"]
PAIRS = [{a: 2, b: 4 if b == "fsdp" else 2} for i, b in enumerate(AXES) for a in AXES[:i]]


ROW = separate(np.arange(64).reshape(4, 16) % 48)


@functools.cache
def value_and_gradient(name):
  """(the compiled function, weights, what it makes of them on one device)"""
  model = FAMILIES[name]

  def loss(weights, *row):
    return jnp.sum(jnp.square(model.forward(weights, *row)[..., :8]))

  function, weights = jax.jit(jax.value_and_grad(loss)), random_weights(model, 3)
  return function, weights, function(weights, *ROW)


def check_sharded(name, sizes):
  function, weights, expected = value_and_gradient(name)
  mesh = make_mesh(**sizes)
  placed = jax.device_put(weights, shardings(FAMILIES[name], mesh))
  rows = tuple(jax.device_put(x, batch_sharding(mesh)) for x in ROW)
  found = function(placed, *rows)
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), found, expected)


@pytest.mark.parametrize("axis", AXES)
def test_sharded_equals_unsharded(axis):
  check_sharded("llama", {axis: 2})


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_families_on_eight_devices_equal_unsharded(name):
  check_sharded(name, {"fsdp": 4, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*({axis: 2} for axis in AXES), {"fsdp": 4}, *PAIRS], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_every_axis_and_pair_equals_unsharded(name, sizes):
  check_sharded(name, sizes)


@pytest.mark.parametrize("name", CASES)
def test_transformers_checkpoints_return_bitwise(reference, tmp_path, name):
  """HF -> ours -> HF; one of them is bfloat16 in several files with an index."""
  source = reference / name
  files = TensorFiles(source)
  stored = {files.dtype(tensor) for tensor in files.names()}
  assert stored == {np.dtype(jnp.bfloat16 if name == "untied_linear" else np.float32)}
  assert (source / checkpoint_files.INDEX_NAME).is_file() == (name == "untied_linear")
  model = hf.load_model(source)
  weights = hf.load_weights(model, source)
  hf.save_weights(model, weights, tmp_path / "back", dtype=stored.pop())
  back = TensorFiles(tmp_path / "back")
  assert back.names() == files.names()
  for tensor in files.names():
    np.testing.assert_array_equal(
      back.read(tensor).view(np.uint8), files.read(tensor).view(np.uint8)
    )
  assert hf.load_model(tmp_path / "back") == model


def test_rope_frequencies_by_hand():
  # head_dim 4, theta 100: frequencies 1 and 100^-1/2 = 0.1.
  np.testing.assert_allclose(layers.rope_frequencies(4, 100.0, None), [1.0, 0.1], rtol=1e-6)
  linear = layers.rope_frequencies(4, 100.0, layers.Linear(4.0))
  np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-6)
  # 20 pi positions: 10 turns of the first pair (kept), 1 turn of the second (divided by 8).
  llama3 = layers.Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original_length=62.83185307)
  np.testing.assert_allclose(layers.rope_frequencies(4, 100.0, llama3), [1.0, 0.0125], rtol=1e-5)


def test_yarn_by_hand():
  # head_dim 8, theta 10^4: frequencies 1, 1/10, 1/100, 1/1000. In 2 pi * 100 positions they turn
  # 100, 10, 1 and 0.1 times. From pair 1, of 10 turns, to pair 3, of 0.1, pair 2 is half-way.
  yarn = layers.Yarn(
    4.0, 628.3185307, attention_factor=1.5, beta_fast=10.0, beta_slow=0.1, truncate=False
  )
  expected = [1, 0.1, 0.01 * (1 / 2 + 1 / 2 / 4), 0.001 / 4]
  np.testing.assert_allclose(layers.rope_frequencies(8, 1e4, yarn), expected, rtol=1e-5)
  # Of 700 positions the bounds lie at 1.05 and 3.05, truncated to pairs 1 and 4, three apart.
  whole = layers.Yarn(4.0, 700, attention_factor=1.5, beta_fast=10.0, beta_slow=0.1)
  expected = [1, 0.1, 0.01 * (2 / 3 + 1 / 3 / 4), 0.001 * (1 / 3 + 2 / 3 / 4)]
  np.testing.assert_allclose(layers.rope_frequencies(8, 1e4, whole), expected, rtol=1e-5)
  by = layers.rotation(jnp.asarray([[0, 1]]), 8, 1e4, yarn)
  np.testing.assert_allclose(by.cos[0, :, 0], [1.5, 1.5 * np.cos(1)], rtol=1e-6)


def test_a_partial_rotation_leaves_the_rest_of_a_head():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 6)), jnp.float32)
  by = layers.rotation(jnp.asarray([[0, 1, 2]]), 4, 100.0, None)
  found = layers.rotate(x, by)
  np.testing.assert_array_equal(found[..., 4:], x[..., 4:])
  np.testing.assert_array_equal(found[..., :4], layers.rotate(x[..., :4], by))
  # The pair (0, 2) turns by one radian a position: cos x0 - sin x2.
  expected = np.cos(2) * x[0, 2, 1, 0] - np.sin(2) * x[0, 2, 1, 2]
  np.testing.assert_allclose(found[0, 2, 1, 0], expected, rtol=1e-5)
