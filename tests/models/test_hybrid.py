"""Qwen3.5, dense and of experts, against transformers: log-probs, gradients, packing, decoding,
meshes, files.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.learner.forward import make_forward
from agentrl_jax.learner.optim import decayed
from agentrl_jax.models import context, hf, hybrid_decoder, moe, qwen3_5, qwen3_5_moe
from agentrl_jax.models.checkpoint_files import TensorEntry, TensorFiles, write_tensors
from agentrl_jax.models.model import cast, unstack
from agentrl_jax.models.sharding import batch_sharding, make_mesh, shardings
from tests.models.test_dense import (
  TOLERANCE,
  assert_decoded,
  assert_gradients,
  gradient_and_log_probs,
  load,
  random_weights,
  separate,
)
from tests.models.test_hf import edit_config, rewrite
from tests.reference import transfer

CASES = ["qwen3_5", "qwen3_5_moe"]  # of tests/reference/moe_transformers.py
SIZES = {
  "vocab_size": 48, "embed": 16, "ffw": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
  "max_position": 64, "key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6, "taps": 4,
  "rotary_dim": 4, "norm_epsilon": 1e-3,
}  # fmt: skip
DENSE = qwen3_5.bind(
  hybrid_decoder.Config(**SIZES, layers=4, linear=(True, False) * 2, tied=True, eos_token_id=(3, 4))
)
MOE = qwen3_5_moe.bind(
  hybrid_decoder.Config(
    **SIZES,
    layers=2,
    linear=(True, False),
    experts=4,
    expert_ffw=12,
    router=moe.Softmax(2, normalized=True),
    load_balance=0.01,
  )
)
MODELS = {"qwen3_5": DENSE, "qwen3_5_moe": MOE}


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_log_probs_and_gradients_equal_transformers(moe_reference, name):
  """Over more than two chunks of the delta rule; of experts and dense.

  Through the rule's products of decays rounding grows: on one processor gradients were 2e-5 apart,
  on another less than 1e-5.
  """
  model, weights, arrays = load(moe_reference, name)
  gradient, logp = gradient_and_log_probs(model, weights, arrays)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  assert_gradients(gradient, arrays, atol=4e-5)


@pytest.mark.parametrize("name", [pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_5_moe"])
def test_packed_rows_equal_separate_ones(moe_reference, name):
  """Two samples of which one continues a stream of its own, and padding."""
  model, weights, arrays = load(moe_reference, name)
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  packed = jnp.concatenate([tokens[0, :11], tokens[1, :7], tokens[0, :5]])[None]
  sample = jnp.asarray([[9] * 5 + [4] * 6 + [0] * 7 + [-1] * 5], jnp.int32)
  parent = jnp.asarray([[9] * 11 + [0] * 7 + [-1] * 5], jnp.int32)
  position = jnp.asarray([[*range(11), *range(7), *range(5)]], jnp.int32)
  hidden = jax.jit(model.forward)(weights, packed, sample, position, parent=parent)
  logp = jax.nn.log_softmax(hidden[0] @ model.unembedding(weights), axis=-1)
  np.testing.assert_allclose(logp[:11], arrays["logp"][0, :11], **TOLERANCE)
  np.testing.assert_allclose(logp[11:18], arrays["logp"][1, :7], **TOLERANCE)
  assert np.isfinite(logp).all()


@pytest.mark.slow
def test_a_shared_prefix_equals_its_copies():
  """Two samples continue a third that ends inside a chunk, and a chunk ends before the second."""
  weights = random_weights(DENSE, 5)
  tokens = np.random.default_rng(5).integers(0, 48, 100)
  prefix, first, second = tokens[:30], tokens[30:70], tokens[70:]
  sample = jnp.asarray([[3] * 30 + [0] * 40 + [8] * 30], jnp.int32)
  position = jnp.asarray([[*range(30), *range(30, 70), *range(30, 60)]], jnp.int32)
  forward = jax.jit(DENSE.forward)
  found = forward(weights, tokens[None], sample, position, parent=jnp.full_like(sample, 3))[0]
  for branch, hidden in ((first, found[30:70]), (second, found[70:])):
    row = np.zeros((1, 70), int)
    row[0, : 30 + len(branch)] = np.concatenate([prefix, branch])
    expected = forward(weights, *separate(row))[0]
    np.testing.assert_allclose(hidden, expected[30 : 30 + len(branch)], **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_decode_equals_forward(name):
  """In chunks whose ends are padding for the shorter row; a row that begins anew forgets."""
  model = MODELS[name]
  weights = random_weights(model, 1)
  tokens, sample, position = separate(np.random.default_rng(2).integers(0, 48, (2, 12)))
  expected = jax.jit(model.forward)(weights, tokens, sample, position)
  cache = model.init_cache(2, 16)
  for _ in range(2):
    cache = assert_decoded(model, weights, cache, tokens, expected, (4, 4, 4))
  held = jax.tree.map(np.asarray, cache)
  padding = jnp.full((2, 4), -1, jnp.int32)
  _, cache = jax.jit(model.decode)(unstack(weights), cache, tokens[:, :4], padding)
  jax.tree.map(np.testing.assert_array_equal, cache, held)


def test_an_fp8_cache_is_near_a_wide_one_and_saturates():
  """Keys and values have scales, so what exceeds e4m3 is not NaN; what the rule keeps is wide."""
  model, step = MODELS["qwen3_5"], jax.jit(MODELS["qwen3_5"].decode)
  weights = random_weights(model, 1)
  tokens, _, position = separate(np.arange(24).reshape(2, 12))
  exact, _ = step(weights, model.init_cache(2, 16), tokens, position)
  cache = model.init_cache(2, 16, jnp.float8_e4m3fn)
  found, cache = step(weights, cache, tokens, position)
  assert 0 < np.abs(found - exact).mean() < 0.1
  assert cache[-1][0].values.dtype == jnp.float8_e4m3fn and cache[0][0].dtype == jnp.float32
  scaled = weights.layers.attention.replace(value=weights.layers.attention.value * 1e4)
  large = weights.replace(layers=weights.layers.replace(attention=scaled))
  assert np.isfinite(step(large, cache, tokens, position)[0]).all()


@pytest.mark.slow
def test_replaying_the_choices_changes_nothing():
  weights = random_weights(MOE, 6)
  row = separate(np.random.default_rng(6).integers(0, 48, (2, 8)))
  forward = jax.jit(lambda replay: MOE.forward_routed(weights, *row, replay=replay))
  hidden, did = forward(jnp.full((2, 8, 2, 2), moe.NOWHERE))
  assert did.sums.assigned.shape == (2, 4)
  again, same = forward(did.expert)
  np.testing.assert_allclose(again, hidden, **TOLERANCE)
  np.testing.assert_array_equal(same.expert, did.expert)
  moved = did.expert.at[0, 5, 0].set((did.expert[0, 5, 0] + 1) % 4)
  other, told = forward(moved)
  np.testing.assert_array_equal(told.expert, moved)
  changed = np.abs(np.asarray(other - hidden)).max(axis=-1) > 1e-4
  assert changed.tolist() == [[False] * 5 + [True] * 3, [False] * 8]


def test_rates_of_decay_stay_in_float32_and_are_not_decayed_themselves():
  weights = transfer.random_weights(DENSE)
  masked = decayed(weights).linear_layers.delta
  assert masked.mixed and masked.taps and not (masked.decay_log or masked.decay_bias or masked.norm)
  narrow = cast(weights, jnp.bfloat16).linear_layers.delta
  assert narrow.decay_log.dtype == narrow.decay_bias.dtype == jnp.float32
  assert narrow.mixed.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("qwen3_5", {"fsdp": 4, "tensor": 2}),
    ("qwen3_5_moe", {"expert": 2, "fsdp": 2, "tensor": 2}),
  ],
)
def test_sharded_equals_unsharded(name, axes):
  model, mesh = MODELS[name], make_mesh(**axes)
  weights = random_weights(model, 3)
  row = separate(np.random.default_rng(4).integers(0, 48, (8, 8)))

  def loss(weights, row, options):
    return jnp.sum(jnp.square(model.forward(weights, *row, **options)[..., :8]))

  def grad(**options):
    return jax.jit(jax.value_and_grad(lambda *a: loss(*a, options)))

  expected = grad()(weights, row)
  placed = jax.device_put(weights, shardings(model, mesh))
  rows = tuple(jax.device_put(x, batch_sharding(mesh)) for x in row)
  experts = {"experts": moe.sharded_experts(mesh)} if name == "qwen3_5_moe" else {}
  found = grad(attend_rows=context.attend_on(mesh), **experts)

  def same(a, b):  # to the largest entry; the delta rule's sums in another order
    scale = np.abs(b).max() or 1.0
    np.testing.assert_allclose(a / scale, b / scale, atol=5e-5)

  jax.tree.map(same, found(placed, rows), expected)


def test_rows_are_not_cut_over_a_context_axis():
  with pytest.raises(ValueError, match=r"mesh\.context is 2, expected 1: qwen3_5 carries a state"):
    make_forward(MODELS["qwen3_5"], make_mesh(context=2), dtype=jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_transformers_checkpoints_return_bitwise(moe_reference, tmp_path, name):
  source = moe_reference / name
  model = hf.load_model(source)
  stored = jnp.bfloat16 if name == "qwen3_5_moe" else jnp.float32
  weights = hf.load_weights(model, source)
  hf.save_weights(model, weights, tmp_path / "back", dtype=stored, copy_from=source)
  files, back = TensorFiles(source), TensorFiles(tmp_path / "back")
  assert back.names() == files.names()
  for tensor in files.names():
    assert back.dtype(tensor) == files.dtype(tensor), tensor
    np.testing.assert_array_equal(
      back.read(tensor).view(np.uint8), files.read(tensor).view(np.uint8)
    )
  assert hf.load_model(tmp_path / "back") == model


def test_the_text_model_of_a_model_of_images(moe_reference, tmp_path):
  """Its log-probs are those of the whole, whose order of layers does not repeat; it is written as a
  text model of its own.
  """
  source = moe_reference / "qwen3_5_images"
  model, weights, arrays = load(moe_reference, "qwen3_5_images")
  hidden = jax.jit(model.forward)(weights, *separate(arrays["tokens"]))
  logp = jax.nn.log_softmax(hidden @ model.unembedding(weights), axis=-1)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  hf.save_weights(model, weights, tmp_path / "text", copy_from=source)
  fields = json.loads((tmp_path / "text" / "config.json").read_text())
  assert fields["architectures"] == ["Qwen3_5ForCausalLM"] and "vision_config" not in fields
  assert hf.load_model(tmp_path / "text") == model
  jax.tree.map(np.testing.assert_array_equal, hf.load_weights(model, tmp_path / "text"), weights)
  theirs = {name for name in TensorFiles(source).names() if "visual" not in name}
  renamed = {name.replace("model.language_model.", "model.") for name in theirs}
  assert TensorFiles(tmp_path / "text").names() == renamed


def test_experts_in_one_tensor_are_read_in_boxes(tmp_path):
  """As the published files hold them, with parts that are passed over."""
  weights = transfer.random_weights(MOE)
  hf.save_weights(MOE, weights, tmp_path / "model")

  def fused(tensors):
    made = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in range(2):
      prefix = f"model.layers.{layer}.mlp.experts"
      each = [
        [tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(4)]
        for part in ("gate", "up", "down")
      ]
      made[f"{prefix}.gate_up_proj"] = np.concatenate([np.stack(x) for x in each[:2]], axis=1)
      made[f"{prefix}.down_proj"] = np.stack(each[2])
    made = {name.replace("model.", "model.language_model.", 1): x for name, x in made.items()}
    return made | {"mtp.fc.weight": np.zeros(2, np.float32)}

  rewrite(tmp_path / "model", fused)
  placed = shardings(MOE, make_mesh(expert=2, fsdp=2, tensor=2))
  loaded = hf.load_weights(MOE, tmp_path / "model", shardings=placed)
  jax.tree.map(np.testing.assert_array_equal, loaded, weights)
  files = TensorFiles(tmp_path / "model")
  entries = [TensorEntry("model.audio.x", (2,), np.dtype(np.float32), lambda: np.zeros(2, "f4"))]
  entries += [
    TensorEntry(n, files.shape(n), files.dtype(n), lambda n=n: files.read(n)) for n in files.names()
  ]
  write_tensors(tmp_path, entries)
  with pytest.raises(ValueError, match=r"1 unknown tensors: model\.audio\.x"):
    hf.load_weights(MOE, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_configuration_survives_config_json(name):
  model = MODELS[name]
  fields = json.loads(json.dumps(model.functions.to_hf(model.config)))
  bind = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}[name].from_hf
  assert bind(fields) == model
  wrapped = {"text_config": fields, "vision_config": {}, "model_type": "x", "image_token_id": 7}
  assert bind(wrapped | {"tie_word_embeddings": model.config.tied}) == model


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    (
      "qwen3_5",
      {"layer_types": ["x"] * 4},
      r"layer_types \['x', 'x', 'x', 'x'\] are",
    ),
    ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple of linear"),
    ("qwen3_5", {"linear_key_head_dim": "REMOVED"}, r"\['linear_key_head_dim'\] are missing"),
    ("qwen3_5", {"head_dim": None}, "head_dim=None, expected a whole number > 0"),
    ("qwen3_5", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "but rope_parameters="),
    ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=4"),
    ("qwen3_5", {"num_experts": 4}, "num_experts=4 is not known to the Qwen3.5 family"),
    ("qwen3_5", {"text_config": {}, "audio_config": {}}, "not known to the Qwen3.5 family"),
    ("qwen3_5_moe", {"num_experts": "REMOVED"}, r"\['num_experts'\] are missing"),
    ("qwen3_5_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
  ],
)
def test_configurations_refused_by_name(tmp_path, name, changes, message):
  fields = MODELS[name].functions.to_hf(MODELS[name].config)
  (tmp_path / "config.json").write_text(json.dumps(fields))
  assert hf.load_model(tmp_path) == MODELS[name]
  edit_config(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    hf.load_model(tmp_path)
