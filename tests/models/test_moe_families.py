"""Mixture-of-experts families against transformers: log-probs, gradients, packing, decoding,
meshes, files.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import (
  deepseek_v3,
  glm4_moe,
  hf,
  layers,
  moe,
  moe_decoder,
  qwen3_moe,
  sharding,
)
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.sharding import batch_sharding, make_mesh, shardings
from agentrl_jax.ops import routing
from tests.models.test_dense import (
  TOLERANCE,
  assert_decoded,
  assert_gradients,
  assert_same_sums,
  by_hf_name,
  load,
  random_weights,
  separate,
)
from tests.models.test_hf import edit_config, rewrite

CASES = [  # of tests/reference/moe_transformers.py
  *("qwen3_moe", "qwen3_moe_unnormalized", "glm4_moe", "glm4_moe_groups"),
  *("deepseek_v3", "deepseek_v3_direct"),
]
NARROW = {
  "qwen3_moe_unnormalized",
  "glm4_moe",
  "deepseek_v3_direct",
}  # bfloat16 with float32 correction biases
SIZES = {
  "vocab_size": 48, "embed": 16, "ffw": 24, "heads": 4, "kv_heads": 2, "head_dim": 4,
  "max_position": 64, "experts": 4, "expert_ffw": 12,
}  # fmt: skip
QWEN3 = qwen3_moe.bind(qwen3_moe.config(**SIZES, layers=2, experts_per_token=2, normalized=True))
GLM4 = glm4_moe.bind(
  moe_decoder.Config(
    **SIZES,
    layers=3,
    dense_layers=1,
    router=moe.Sigmoid(2, normalized=True, groups=2, groups_kept=1, scale=1.5),
    shared_ffw=12,
    rotary_dim=2,
    bias=True,
    query_key_norm=True,
    extra_layers=1,
  )
)
DEEPSEEK = deepseek_v3.bind(
  deepseek_v3.Config(
    **{name: size for name, size in SIZES.items() if name not in ("kv_heads", "head_dim")},
    layers=3,
    dense_layers=1,
    router=moe.Sigmoid(2, normalized=True, groups=2, groups_kept=1, scale=1.5),
    shared_ffw=12,
    plain_dim=4,
    rotary_dim=2,
    value_dim=6,
    latent=8,
    query_latent=10,
    rope_scaling=layers.Yarn(2.0, 32, attention_factor=1.0),
    mscale=1.0,
    mscale_all=1.0,
  )
)
FAMILIES = {"qwen3_moe": QWEN3, "glm4_moe": GLM4, "deepseek_v3": DEEPSEEK}


# Experts over their axis, inside them as an MLP is; the router's width and correction are whole.
SNAPSHOT = """
dense_layers.mlp.down        layers=1, ffw=24/tensor, embed=16/fsdp                    384
layers.moe.router            layers=2, embed=16/fsdp, -=4                              256
layers.moe.correction        layers=2, -=4                                             32
layers.moe.experts.gate      layers=2, experts=4/expert, embed=16/fsdp, ffw=12/tensor  768
layers.moe.experts.up        layers=2, experts=4/expert, embed=16/fsdp, ffw=12/tensor  768
layers.moe.experts.down      layers=2, experts=4/expert, ffw=12/tensor, embed=16/fsdp  768
layers.moe.shared.gate       layers=2, embed=16/fsdp, ffw=12/tensor                    384
"""


def slow_but(first, names):
  """All of them, the others than `first` outside the default suite."""
  return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(["qwen3_moe", "deepseek_v3"], CASES))
def test_log_probs_and_gradients_equal_transformers(moe_reference, name):
  model, weights, arrays = load(moe_reference, name)
  tokens, sample, position = separate(arrays["tokens"])

  def loss(weights):
    hidden, did = model.forward_routed(weights, tokens, sample, position)
    logp = jax.nn.log_softmax(hidden @ model.unembedding(weights), axis=-1)
    picked = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(arrays["weighting"] * picked), (logp, did.sums)

  gradient, (logp, sums) = jax.jit(jax.grad(loss, has_aux=True))(weights)
  np.testing.assert_allclose(logp, arrays["logp"], **TOLERANCE)
  found = by_hf_name(model, gradient)
  choosing = {name for name in found if "correction" in name}
  assert not any(found.pop(name).any() for name in choosing)  # they have no gradient
  assert_gradients(found, arrays)
  if "load_balance" in arrays:
    pooled = routing.pooled(sums)
    found = routing.load_balance_loss(pooled, pooled)
    np.testing.assert_allclose(found, arrays["load_balance"], **TOLERANCE)


def test_gradient_of_the_load_balance_equals_transformers(moe_reference):
  """The chosen experts are constants; routers and all below them learn from the probabilities."""
  model, weights, arrays = load(moe_reference, "qwen3_moe")
  row = separate(arrays["tokens"])
  _, did = jax.jit(model.forward_routed)(weights, *row)
  whole = routing.pooled(did.sums)

  def loss(weights):
    _, did = model.forward_routed(weights, *row)
    return routing.load_balance_loss(routing.pooled(did.sums), whole)

  gradient = jax.jit(jax.grad(loss))(weights)
  checked = 0
  for (spec, rule), ours in zip(hf.pairs(model), jax.tree.leaves(gradient), strict=True):
    for index, name in zip(hf.indices(rule, spec), hf.names(rule, spec), strict=True):
      expected = arrays.get(f"balance_grad:{name}")
      if expected is not None:
        assert_same_sums(np.asarray(ours[index]).transpose(rule.perm), expected, name)
        checked += 1
  assert checked == 3  # the routers of two layers, and the embedding


def test_packed_rows_equal_separate_ones(moe_reference):
  """Two samples of which one continues a stream of its own, and padding, which goes to no expert
  and is counted nowhere.
  """
  model, weights, arrays = load(moe_reference, "glm4_moe_groups")
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  packed = jnp.concatenate([tokens[0, :11], tokens[1, :7], tokens[0, :5]])[None]
  sample = jnp.asarray([[9] * 5 + [4] * 6 + [0] * 7 + [-1] * 5], jnp.int32)
  parent = jnp.asarray([[9] * 11 + [0] * 7 + [-1] * 5], jnp.int32)
  position = jnp.asarray([[*range(11), *range(7), *range(5)]], jnp.int32)
  forward = jax.jit(model.forward_routed)
  hidden, did = forward(weights, packed, sample, position, parent=parent)
  logp = jax.nn.log_softmax(hidden[0] @ model.unembedding(weights), axis=-1)
  np.testing.assert_allclose(logp[:11], arrays["logp"][0, :11], **TOLERANCE)
  np.testing.assert_allclose(logp[11:18], arrays["logp"][1, :7], **TOLERANCE)
  expert = np.asarray(did.expert[0])
  assert np.all(expert[18:] == moe.NOWHERE)
  np.testing.assert_array_equal(did.sums.tokens, [18.0, 18.0])
  counts = [np.bincount(expert[:18, layer].ravel(), minlength=6) for layer in range(2)]
  np.testing.assert_array_equal(did.sums.assigned, counts)


def test_replaying_the_choices_changes_nothing(moe_reference):
  """And those of one token moved to other experts change it alone and what follows it."""
  model, weights, arrays = load(moe_reference, "qwen3_moe")
  row = separate(arrays["tokens"][:, :8])
  forward = jax.jit(lambda replay: model.forward_routed(weights, *row, replay=replay))
  hidden, did = forward(jnp.full((2, 8, 2, 2), moe.NOWHERE))
  again, same = forward(did.expert)
  np.testing.assert_allclose(again, hidden, **TOLERANCE)
  np.testing.assert_array_equal(same.expert, did.expert)
  moved = (did.expert[0, 5] + 1) % 6
  other, told = forward(did.expert.at[0, 5].set(moved))
  np.testing.assert_array_equal(told.expert[0, 5], moved)
  changed = np.abs(np.asarray(other - hidden)).max(axis=-1) > 1e-3
  assert changed.tolist() == [[False] * 5 + [True] * 3, [False] * 8]


@pytest.mark.parametrize("name", slow_but(["deepseek_v3"], FAMILIES))
def test_decode_equals_forward(name):
  """In chunks whose ends are padding for the shorter row."""
  model = FAMILIES[name]
  weights = random_weights(model, 1)
  tokens, sample, position = separate(np.random.default_rng(2).integers(0, 48, (2, 12)))
  expected = jax.jit(model.forward)(weights, tokens, sample, position)
  assert_decoded(model, weights, model.init_cache(2, 16), tokens, expected, (4, 4, 4))


def test_table_snapshot():
  table = sharding.table(GLM4, make_mesh(expert=2, fsdp=2, tensor=2)).splitlines()
  lines = {tuple(line.split()) for line in table}
  assert lines >= {tuple(line.split()) for line in SNAPSHOT.strip().splitlines()}


MESHES = [
  ("glm4_moe", {"expert": 2, "fsdp": 2, "tensor": 2}),
  ("glm4_moe", {"expert": 4}),
  ("glm4_moe", {"expert": 2, "fsdp": 4}),
  ("glm4_moe", {"data": 2, "expert": 2, "context": 2}),
  ("qwen3_moe", {"expert": 2, "tensor": 2}),
  ("qwen3_moe", {"fsdp": 2, "tensor": 2}),
  ("deepseek_v3", {"expert": 2, "fsdp": 2, "tensor": 2}),
]


@pytest.mark.parametrize("case", slow_but([MESHES[0]], MESHES), ids=str)
def test_sharded_equals_unsharded(case):
  """A loss on hidden states and routers, with its gradient; weights lie as the table says."""
  name, axes = case
  model, mesh = FAMILIES[name], make_mesh(**axes)
  weights = random_weights(model, 3)
  row = separate(np.random.default_rng(4).integers(0, 48, (8, 8)))

  def loss(weights, row, experts):
    hidden, did = model.forward_routed(weights, *row, experts=experts)
    whole = jax.lax.stop_gradient(did.sums)  # the batch's shares are constants of the loss
    balance = routing.load_balance_loss(did.sums, whole)
    return jnp.sum(jnp.square(hidden[..., :8])) + balance, did.sums.assigned

  def grad(experts):
    return jax.jit(jax.value_and_grad(lambda *a: loss(*a, experts), has_aux=True))

  expected = grad(moe.compute_experts)(weights, row)
  placed = jax.device_put(weights, shardings(model, mesh))
  if axes.get("expert", 1) > 1:
    held = placed.layers.moe.experts.gate.sharding.shard_shape((2, 4, 16, 12))
    assert held[1] == 4 // axes["expert"]
  rows = tuple(jax.device_put(x, batch_sharding(mesh)) for x in row)
  found = grad(moe.sharded_experts(mesh))(placed, rows)
  jax.tree.map(lambda a, b: assert_same_sums(np.asarray(a), np.asarray(b)), found, expected)


@pytest.mark.parametrize("name", CASES)
def test_transformers_checkpoints_return_bitwise(moe_reference, tmp_path, name):
  """HF -> ours -> HF, every expert's tensors under their names and in their dtypes."""
  source = moe_reference / name
  model = hf.load_model(source)
  stored = jnp.bfloat16 if name in NARROW else jnp.float32
  hf.save_weights(
    model, hf.load_weights(model, source), tmp_path / "back", dtype=stored, copy_from=source
  )
  files, back = TensorFiles(source), TensorFiles(tmp_path / "back")
  # Shared experts of width 0 are not written: transformers makes them from n_shared_experts=0.
  held = {tensor for tensor in files.names() if 0 not in files.shape(tensor)}
  assert back.names() == held
  assert (held != files.names()) == (name == "deepseek_v3_direct")
  for tensor in held:
    assert back.dtype(tensor) == files.dtype(tensor)
    np.testing.assert_array_equal(
      back.read(tensor).view(np.uint8), files.read(tensor).view(np.uint8)
    )
  assert hf.load_model(tmp_path / "back") == model
  fields = json.loads(json.dumps(model.functions.to_hf(model.config)))
  (tmp_path / "ours").mkdir()
  (tmp_path / "ours" / "config.json").write_text(json.dumps(fields))
  assert hf.load_model(tmp_path / "ours") == model


def test_experts_are_read_in_boxes_and_further_prediction_layers_passed_over(tmp_path):
  weights = random_weights(GLM4, 5)
  hf.save_weights(GLM4, weights, tmp_path / "model")
  extra = {f"model.layers.3.{name}": np.zeros(2, np.float32) for name in ("enorm", "mlp.gate")}
  rewrite(tmp_path / "model", lambda tensors: tensors | extra)
  placed = shardings(GLM4, make_mesh(expert=2, fsdp=2, tensor=2))
  loaded = hf.load_weights(GLM4, tmp_path / "model", shardings=placed)
  jax.tree.map(np.testing.assert_array_equal, loaded, weights)
  assert loaded.layers.moe.experts.down.addressable_shards[0].data.shape == (2, 2, 6, 8)
  rewrite(tmp_path / "model", lambda tensors: tensors | {"model.layers.4.x": extra.popitem()[1]})
  with pytest.raises(ValueError, match=r"1 unknown tensors: model\.layers\.4\.x"):
    hf.load_weights(GLM4, tmp_path / "model")


def test_fields_left_out_are_what_transformers_takes():
  fields = glm4_moe.to_hf(GLM4.config) | {"num_attention_heads": 8}
  del fields["rms_norm_eps"], fields["num_key_value_heads"]
  found = glm4_moe.from_hf(fields).config
  assert (found.norm_epsilon, found.kv_heads) == (1e-5, 8)
  fields = qwen3_moe.to_hf(QWEN3.config)
  del fields["num_key_value_heads"]
  assert qwen3_moe.from_hf(fields).config.kv_heads == 4


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported, expected 1"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ("qwen3_moe", {"num_experts": "REMOVED"}, r"\['num_experts'\] are missing"),
    ("qwen3_moe", {"shared_expert": 1}, "shared_expert=1 is not known to the Qwen3-MoE family"),
    ("glm4_moe", {"n_group": "REMOVED"}, r"\['n_group'\] are missing"),
    ("glm4_moe", {"n_group": 3}, "n_routed_experts=4 is no multiple of n_group=3"),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds num_experts=4"),
    ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok=None, expected a whole num"),
    ("glm4_moe", {"topk_group": 3}, "topk_group=3 of n_group=2 .* expected as many at most"),
    ("glm4_moe", {"n_group": 4}, "topk_group=1 of n_group=4 .* two experts a group"),
    ("glm4_moe", {"n_shared_experts": None}, "n_shared_experts=None, expected a whole number > -1"),
    ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace=4 exceeds num_hidden_layers"),
    ("glm4_moe", {"rope_scaling": {"x": 1}, "rope_parameters": {"y": 1}}, "but rope_parameters="),
    ("deepseek_v3", {"n_group": None}, "n_group=None, expected a whole number > 0"),
    ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim=0, expected a whole number > 0"),
    ("glm4_moe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 exceeds the experts of topk_g"),
    ("deepseek_v3", {"scoring_func": "x"}, "scoring_func='x' is not supported, expected 'sigmoid'"),
    ("deepseek_v3", {"kv_lora_rank": "REMOVED"}, r"\['kv_lora_rank'\] are missing"),
    ("deepseek_v3", {"quantization_config": {}}, "quantization_config={} is not known to the Dee"),
    ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("glm4_moe", {"scoring_func": "x"}, "scoring_func='x' is not known to the GLM-4.5 family"),
  ],
)
def test_configurations_refused_by_name(tmp_path, family, changes, message):
  fields = FAMILIES[family].functions.to_hf(FAMILIES[family].config)
  (tmp_path / "config.json").write_text(json.dumps(fields))
  assert hf.load_model(tmp_path) == FAMILIES[family]
  edit_config(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    hf.load_model(tmp_path)
