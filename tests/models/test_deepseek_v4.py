"""DeepSeek V4 against transformers: log-probs, gradients, packing, decoding, meshes, files."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from agentrl_jax.learner.optim import decayed
from agentrl_jax.models import (
  checkpoint_files,
  compressed_attention,
  deepseek_v4,
  deepseek_v4_decoder,
  hf,
  layers,
  moe,
  sharding,
)
from agentrl_jax.models.block_scaled import BlockScaled
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.compressed_attention import Sight
from agentrl_jax.models.deepseek_v4_decoder import HASHED, HEAVY, ROUTED, SPARSE, WINDOW
from agentrl_jax.models.model import cast, initialize, is_spec, parameter_path, unstack
from agentrl_jax.models.sharding import batch_sharding, make_mesh, shardings
from configs.pods import models
from tests.models.conftest import SCRIPT, run_reference
from tests.models.test_dense import (
  TOLERANCE,
  assert_decoded,
  assert_same_sums,
  expected_gradients,
  gradient_and_log_probs,
  load,
  random_weights,
  separate,
)
from tests.models.test_hf import edit_config, rewrite

V4_SCRIPT = SCRIPT.with_name("v4_transformers.py")
CASES = ["v4_folded", "v4_window", "v4_sparse", "v4_heavy", "v4"]  # of the script
FILES = ["v4_folded", "v4"]
CONFIG = deepseek_v4_decoder.Config(
  vocab_size=48, embed=16, layers=5, heads=4, head_dim=8, max_position=64,
  order=((WINDOW, HASHED), *((HEAVY, ROUTED), (SPARSE, ROUTED)) * 2), window=5, sparse_block=2,
  heavy_block=3, index_heads=5, index_dim=4, index_kept=2, rotary_dim=4, query_latent=12, groups=2,
  group_latent=6, streams=2, sinkhorn_steps=3, mix_epsilon=1e-3, norm_epsilon=1e-3,
  experts=4, expert_ffw=12, router=moe.RootSoftplus(2, scale=1.5), limit=1.0, extra_layers=1,
  rope_scaling=layers.Yarn(2.0, 32, attention_factor=1.0),
)  # fmt: skip
V4 = deepseek_v4.bind(CONFIG)

# Latents are cut as the embedding is; heads only between groups of them.
SNAPSHOT = """
window_layers.attention.query_down layers=1, embed=16/fsdp, -=12 384
window_layers.attention.query      layers=1, embed=12/fsdp, heads=32/tensor 384
window_layers.attention.sinks      layers=1, -=4 16
window_layers.attention.group      layers=1, embed=16/fsdp, heads=12/tensor 192
window_layers.attention.output     layers=1, heads=12/tensor, embed=16/fsdp 192
sparse_layers.mix.mixing           layers=2, -=32, -=8 2,048
sparse_layers.attention.indexer.query layers=2, embed=12/fsdp, -=20 960
hash_layers.table                  layers=1, vocab=48/tensor, -=2 192
layers.moe.experts.down            layers=4, experts=4/expert, ffw=12/tensor, embed=16/fsdp 1,536
"""


@pytest.fixture(scope="session")
def v4_reference(tmp_path_factory):
  """A directory with the random models of the script."""
  return run_reference(tmp_path_factory.mktemp("v4"), script=V4_SCRIPT)


@pytest.mark.parametrize(
  "name", [CASES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CASES[1:])]
)
def test_log_probs_and_gradients_equal_transformers(v4_reference, name):
  """Each kind of layer alone, and all of them, with and without repetitions of the order."""
  model, weights, arrays = load(v4_reference, name)
  found, logp = gradient_and_log_probs(model, weights, arrays)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  expected = expected_gradients(arrays)
  chosen_by = {name for name in found if name.endswith(("gate.bias", "tid2eid"))}
  assert found.keys() - chosen_by == expected.keys()
  assert not any(found[name].any() for name in chosen_by)  # they have no gradient
  for name, of_name in expected.items():
    of_ours = found[name]
    if name.endswith("_scale"):  # sums of terms as large as the bias's, over all its numbers
      base = name.removesuffix("scale") + "base"
      of_ours, of_name = (
        np.append(side[name], np.abs(side[base]).sum()) for side in (found, expected)
      )
    assert_same_sums(of_ours, of_name, name)


def test_packed_rows_equal_separate_ones(v4_reference):
  """Of two samples, with padding between them and behind: no block straddles them. Padding goes to
  no expert; choices replayed change nothing.
  """
  model, weights, arrays = load(v4_reference, "v4_folded")
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  packed = jnp.concatenate([tokens[0, :18], tokens[0, :2], tokens[1, :15], tokens[0, :6]])[None]
  sample = jnp.asarray([[4] * 18 + [-1] * 2 + [0] * 15 + [-1] * 6], jnp.int32)
  position = jnp.asarray([[*range(18), 0, 0, *range(15), *range(6)]], jnp.int32)
  forward = jax.jit(
    lambda replay: model.forward_routed(weights, packed, sample, position, replay=replay)
  )
  hidden, did = forward(jnp.full((1, 41, 4, 2), moe.NOWHERE))
  logp = jax.nn.log_softmax(hidden[0] @ model.unembedding(weights), axis=-1)
  np.testing.assert_allclose(logp[:18], arrays["logp"][0, :18], **TOLERANCE)
  np.testing.assert_allclose(logp[20:35], arrays["logp"][1, :15], **TOLERANCE)
  assert np.isfinite(logp).all()
  real = np.asarray(sample[0] >= 0)
  assert np.all((np.asarray(did.expert[0]) == moe.NOWHERE) == ~real[:, None, None])
  np.testing.assert_array_equal(did.sums.tokens, [33.0] * 4)
  again, same = forward(did.expert)
  np.testing.assert_allclose(again, hidden, **TOLERANCE)
  np.testing.assert_array_equal(same.expert, did.expert)
  with pytest.raises(ValueError, match="samples that continue others are not supported"):
    model.forward(weights, packed, sample, position, parent=sample)


@pytest.mark.slow
def test_queries_in_parts_equal_all_at_once():
  """A window that spans parts, indexed blocks, two samples and padding, and a part left over."""
  sight = Sight(9, 4, 3, 4, rope_theta=100.0, rope_scaling=None, norm_epsilon=1e-3)
  rng = np.random.default_rng(0)
  weights = random_weights(V4, 7)
  chosen = jax.tree.map(lambda w: w[0], weights.sparse_layers.attention)
  chosen = dataclasses.replace(
    chosen,
    compressor=dataclasses.replace(
      chosen.compressor, place_bias=jnp.asarray(rng.normal(size=(4, 16)), jnp.float32)
    ),
    indexer=dataclasses.replace(
      chosen.indexer,
      compressor=dataclasses.replace(
        chosen.indexer.compressor, place_bias=jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
      ),
    ),
  )
  sample = jnp.asarray([[3] * 25 + [1] * 14 + [-1] * 2, [0] * 41], jnp.int32)
  position = jnp.asarray([[*range(25), *range(14), 0, 0], [*range(41)]], jnp.int32)
  x = jnp.asarray(rng.normal(size=(2, 41, 16)), jnp.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def run(queries, x):
    def mixed(weights, x):
      see = functools.partial(
        compressed_attention.see_row, sight, sample, position, by, layers.matmul, queries=queries
      )
      made, _ = compressed_attention.attention(
        weights, x, by, see, heads=4, groups=2, norm_epsilon=1e-3, matmul=layers.matmul
      )
      return jnp.sum(jnp.sin(made)), made

    by = sight.rotation(position)
    return jax.grad(mixed, argnums=(0, 1), has_aux=True)(chosen, x)

  expected = run(41, x)
  found = run(6, x)
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), found, expected)


def test_the_highest_are_chosen_as_a_sort_would():
  rng = np.random.default_rng(1)
  score = rng.integers(0, 4, (2, 3, 11)).astype(np.float32)  # many equal ones
  seen = rng.random((2, 3, 11)) < 0.6
  found = np.asarray(compressed_attention._highest(jnp.asarray(score), jnp.asarray(seen), 4))
  for row in np.ndindex(2, 3):
    order = sorted(np.flatnonzero(seen[row]), key=lambda c: (-score[row][c], c))[:4]
    assert sorted(order) == np.flatnonzero(found[row]).tolist()


@pytest.mark.parametrize(
  "sizes", [(6, 6), pytest.param((1, 1, 1, 4, 5), marks=pytest.mark.slow)], ids=str
)
def test_decode_equals_forward(sizes):
  """In chunks whose ends are padding for the shorter row; a row that begins anew forgets, padding
  leaves the cache as it was.
  """
  weights = random_weights(V4, 1)
  tokens, sample, position = separate(np.random.default_rng(2).integers(0, 48, (2, 12)))
  expected = jax.jit(V4.forward)(weights, tokens, sample, position)
  cache = V4.init_cache(2, 16)
  for _ in range(2):
    cache = assert_decoded(V4, weights, cache, tokens, expected, sizes)
  held = jax.tree.map(np.asarray, cache)
  padding = jnp.full((2, 4), -1, jnp.int32)
  _, cache = jax.jit(V4.decode)(unstack(weights), cache, tokens[:, :4], padding)
  jax.tree.map(np.testing.assert_array_equal, cache, held)
  with pytest.raises(ValueError, match="an FP8 cache is not supported for deepseek_v4"):
    V4.init_cache(2, 16, jnp.float8_e4m3fn)


def test_table_snapshot():
  table = sharding.table(V4, make_mesh(expert=2, fsdp=2, tensor=2)).splitlines()
  lines = {tuple(line.split()) for line in table}
  assert lines >= {tuple(line.split()) for line in SNAPSHOT.strip().splitlines()}


MESHES = [{"expert": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "data": 2}, {"fsdp": 8}]


@pytest.mark.parametrize(
  "axes", [MESHES[0], *(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[1:])], ids=str
)
def test_sharded_equals_unsharded(axes):
  """Streams are normalised together and at the end, so gradients along a common factor of theirs
  are small sums of large terms: of small arrays the error is not relative.
  """
  order = ((SPARSE, HASHED), (HEAVY, ROUTED))
  model = deepseek_v4.bind(dataclasses.replace(CONFIG, layers=2, order=order))
  mesh, weights = make_mesh(**axes), random_weights(model, 3)
  row = separate(np.random.default_rng(4).integers(0, 48, (8, 8)))

  def grad(experts):
    def loss(weights, row):
      hidden, did = model.forward_routed(weights, *row, experts=experts)
      return jnp.sum(jnp.square(hidden[..., :8])), did.sums.assigned

    return jax.jit(jax.value_and_grad(loss, has_aux=True))

  expected = grad(moe.compute_experts)(weights, row)
  placed = jax.device_put(weights, shardings(model, mesh))
  rows = tuple(jax.device_put(x, batch_sharding(mesh)) for x in row)
  found = grad(moe.sharded_experts(mesh))(placed, rows)

  def same(found, expected):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-5, atol=5e-5)

  jax.tree.map(same, found, expected)


def test_what_stays_in_float32_and_what_does_not_decay():
  weights = jax.eval_shape(lambda: cast(initialize(V4, jax.random.key(0)), jnp.bfloat16))
  hashed, sparse = weights.hash_layers, weights.sparse_layers
  for kept in (
    hashed.table,
    hashed.mix.mixing,
    sparse.attention.sinks,
    weights.layers.moe.correction,
  ):
    assert kept.dtype == jnp.float32
  assert sparse.attention.query.dtype == weights.layers.moe.experts.up.dtype == jnp.bfloat16
  decays = decayed(weights)
  assert not any([decays.hash_layers.table, decays.hash_layers.mix.mixing_scale])
  assert not decays.sparse_layers.attention.compressor.place_bias
  assert not decays.sparse_layers.attention.sinks
  assert decays.sparse_layers.attention.group


def published(directory):
  return deepseek_v4.PublishedFiles(TensorFiles(directory))


@pytest.mark.parametrize("name", FILES)
def test_transformers_checkpoints_return_bitwise(v4_reference, tmp_path, name):
  """HF -> ours -> HF: every tensor under its published name and in its dtype."""
  source = v4_reference / name
  model = hf.load_model(source)
  stored = jnp.bfloat16 if name == "v4" else jnp.float32
  weights = hf.load_weights(model, source)
  hf.save_weights(model, weights, tmp_path / "back", dtype=stored)
  files, back = published(source), TensorFiles(tmp_path / "back")
  assert back.names() == files.names()
  for tensor in files.names():
    assert back.dtype(tensor) == files.dtype(tensor), tensor
    np.testing.assert_array_equal(
      back.read(tensor).view(np.uint8), files.read(tensor).view(np.uint8)
    )
  config = hf.load_model(tmp_path / "back").config
  assert dataclasses.replace(config, pad_token_id=model.config.pad_token_id) == model.config


@pytest.mark.slow
def test_transformers_reads_what_is_written(tmp_path):
  """Under the published names, with the published spelling of the configuration."""
  weights = random_weights(V4, 5)
  weights = weights.replace(
    hash_layers=weights.hash_layers.replace(table=jnp.round(weights.hash_layers.table))
  )
  hf.save_weights(V4, weights, tmp_path / "model")
  out = run_reference(tmp_path, pathlib.Path(tmp_path / "model"), script=V4_SCRIPT)
  arrays = np.load(out / "logp.npz")
  hidden = jax.jit(V4.forward)(weights, *separate(arrays["tokens"]))
  logp = jax.nn.log_softmax(hidden @ V4.unembedding(weights), axis=-1)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)


def test_tables_are_whole_numbers_and_further_prediction_layers_passed_over(tmp_path):
  weights = initialize(V4, jax.random.key(6))
  hf.save_weights(V4, weights, tmp_path / "model")
  rewrite(tmp_path / "model", lambda tensors: tensors | {"mtp.0.norm": np.zeros(2, np.float32)})
  loaded = hf.load_weights(V4, tmp_path / "model", dtype=jnp.bfloat16)
  np.testing.assert_array_equal(loaded.hash_layers.table, weights.hash_layers.table)
  name = "layers.0.ffn.gate.tid2eid"
  rewrite(tmp_path / "model", lambda t: t | {name: t[name].astype(np.float32)})
  with pytest.raises(ValueError, match="tid2eid is stored as float32, expected I64"):
    hf.load_weights(V4, tmp_path / "model")
  wrong = {name: np.zeros((48, 2), np.int64), "norm.weight": np.zeros(16, np.int64)}
  rewrite(tmp_path / "model", lambda t: t | wrong)
  with pytest.raises(ValueError, match=r"norm\.weight is stored as int64, expected a floating"):
    hf.load_weights(V4, tmp_path / "model")


def _quantized(rng, shape):
  """A matrix as files hold it, E4M3 in blocks of 4 x 2 where columns are sixes, else E2M1 in runs
  of four: its bytes, its scales' bytes and what they stand for.
  """
  rows, columns = shape
  if rows % 4 == 0 and columns % 6 == 0:
    values = (rng.integers(-8, 9, shape) / 8).astype(ml_dtypes.float8_e4m3fn)
    grid, stored = (rows // 4, columns // 2), ("F8_E4M3", values.view(np.uint8))
    values = values.astype(np.float32)
  else:
    codes = rng.integers(0, 16, shape)
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
    values = np.where(codes & 8, -values, values)
    grid = (rows, columns // 4)
    stored = "I8", (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
  scales = (2.0 ** rng.integers(-5, 2, grid)).astype(np.float32)
  wide = np.kron(scales, np.ones((rows // grid[0], columns // grid[1]), np.float32))
  return stored, scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), values * wide


def test_published_files_are_dequantised_as_they_are_read(tmp_path):
  """FP8 and packed FP4 with scales of blocks, whole and the parts of a mesh's devices."""
  weights, rng = initialize(V4, jax.random.key(8)), np.random.default_rng(8)
  hf.save_weights(V4, weights, tmp_path / "model")
  files, header, data, expected = TensorFiles(tmp_path / "model"), {}, b"", {}

  def add(name, stored, array, shape):
    nonlocal data
    end = len(data) + array.nbytes
    header[name] = {"dtype": stored, "shape": shape, "data_offsets": [len(data), end]}
    data += array.tobytes()

  for name in sorted(files.names()):
    array = files.read(name)
    kind = name.split(".")[-2] if name.endswith(".weight") else ""
    if kind in ("w1", "w2", "w3", "wq_a", "wq_b"):
      (stored, coded), scales, expected[name] = _quantized(rng, array.shape)
      add(name, stored, coded, coded.shape)
      add(name.removesuffix("weight") + "scale", "F8_E8M0", scales, scales.shape)
    else:
      expected[name] = array
      add(name, checkpoint_files.DTYPE_NAMES[array.dtype], array, array.shape)
  text = json.dumps(header).encode()
  (tmp_path / "model" / "model.safetensors").write_bytes(
    len(text).to_bytes(8, "little") + text + data
  )
  edit_config(tmp_path / "model", quantization_config={"quant_method": "fp8"}, expert_dtype="fp4")
  model = hf.load_model(tmp_path / "model")
  assert model == V4 and {entry["dtype"] for entry in header.values()} >= {"I8", "F8_E4M3"}
  for placed in (None, shardings(V4, make_mesh(expert=2, fsdp=2, tensor=2))):
    loaded = hf.load_weights(model, tmp_path / "model", shardings=placed)
    for (spec, rule), array in zip(hf.pairs(model), jax.tree.leaves(loaded), strict=True):
      for index, name in zip(hf.indices(rule, spec), hf.names(rule, spec), strict=True):
        found = np.asarray(array[index]).transpose(rule.perm)
        np.testing.assert_array_equal(found, expected[name], err_msg=name)
  hf.save_weights(model, loaded, tmp_path / "back", copy_from=tmp_path / "model")
  assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
  assert hf.load_model(tmp_path / "back") == V4


@pytest.mark.parametrize(("shape", "scales"), [((192, 128), (2, 1)), ((128, 320), (1, 3))], ids=str)
def test_a_block_that_is_cut_is_refused(tmp_path, shape, scales):
  """Two scales of 192 rows are of blocks of 128 and 64, not of 96."""
  sizes = [math.prod(shape), math.prod(scales)]
  header = {
    "a.weight": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, sizes[0]]},
    "a.scale": {"dtype": "F8_E8M0", "shape": scales, "data_offsets": [sizes[0], sum(sizes)]},
  }
  text = json.dumps(header).encode()
  data = len(text).to_bytes(8, "little") + text + bytes(sum(sizes))
  (tmp_path / "model.safetensors").write_bytes(data)
  with pytest.raises(ValueError, match=r"a\.weight is .* are not of whole blocks"):
    BlockScaled(TensorFiles(tmp_path)).read("a.weight")


PUBLISHED = {  # the spelling of https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash
  "layer_types": "REMOVED", "mlp_layer_types": "REMOVED", "partial_rotary_factor": "REMOVED",
  "compress_rates": "REMOVED", "compress_ratios": [0, 128, 4, 128, 4, 0], "num_hash_layers": 1,
  "rope_scaling": {
    "type": "yarn", "factor": 2, "original_max_position_embeddings": 32, "beta_fast": 32,
    "beta_slow": 1,
  },
}  # fmt: skip


def test_the_published_spelling_of_a_configuration(tmp_path):
  """Ratios and a count of layers by token; the last ratio is of a further prediction layer."""
  fields = json.loads(json.dumps(deepseek_v4.to_hf(CONFIG)))
  (tmp_path / "config.json").write_text(json.dumps(fields))
  assert hf.load_model(tmp_path) == V4
  edit_config(tmp_path, **PUBLISHED)
  wide = dataclasses.replace(CONFIG, sparse_block=4, heavy_block=128)
  assert hf.load_model(tmp_path).config == wide


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* is not supported"),
    ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported, expected 'sqrtsoft"),
    ({"q_lora_rank": "REMOVED"}, r"\['q_lora_rank'\] are missing"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types .* are not supported, expected 5 of"),
    ({"mlp_layer_types": ["hash_moe"] * 5}, "no layer's experts are chosen by score"),
    ({"compress_rates": {"full_attention": 2}}, "compress_rates of .* are not known"),
    ({"index_topk": None}, "index_topk=None, expected a whole number > 0"),
    ({"o_groups": 3}, "num_attention_heads=4 is no multiple of o_groups=3"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds n_routed_experts=4"),
    ({"intermediate_size": 99}, "intermediate_size=99 is not moe_intermediate_size=12"),
    ({"kv_lora_rank": 4}, "kv_lora_rank=4 is not known to the DeepSeek V4 family"),
  ],
)
def test_configurations_refused_by_name(tmp_path, changes, message):
  (tmp_path / "config.json").write_text(json.dumps(deepseek_v4.to_hf(CONFIG)))
  edit_config(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    hf.load_model(tmp_path)


def test_the_published_model_has_as_many_parameters_as_published():
  """284 billion, of which 13 are active (its model card; tables hold none, embeddings are looked
  up).
  """
  model = models.deepseek_v4_flash()
  sizes = {}
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.abstract(), is_leaf=is_spec)
  for path, spec in leaves:
    name = parameter_path(path)
    kind = "experts" if "experts" in name else name[-1]
    sizes[kind] = sizes.get(kind, 0) + math.prod(spec.shape)
  total = sum(sizes.values()) - sizes["table"]
  assert round(total / 1e9) == 284
  idle = sizes["experts"] * (1 - 6 / 256) + sizes["embedding"]
  assert round((total - idle) / 1e9) == 13
  assert deepseek_v4_decoder._folding(model.config.order) == (3, 2)
