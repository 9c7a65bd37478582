"""Families beside Llama: biases and further norms in the engine's layout, and pushes to the real
server.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import gemma3, hybrid_decoder, moe, qwen2, qwen3, qwen3_5, qwen3_5_moe
from agentrl_jax.models.decoder import Config
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.model import initialize
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.ops.quantize import Quantization
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
from agentrl_jax.transfer.engine_layout import (
  parameters,
  push_plan,
  quantized_weights,
  unplanned,
  untied,
)
from agentrl_jax.transfer.layout import apply, assemblies
from agentrl_jax.transfer.stage import source_layout
from agentrl_jax.transfer.transports.disk import DiskTransport
from tests.reference import transfer
from tests.transfer.test_sglang import changed, publish, reference, score

SIZES = {
  "vocab_size": 256, "embed": 64, "ffw": 128, "layers": 2, "heads": 4, "kv_heads": 2,
  "head_dim": 32, "max_position": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
  # SGLang's Qwen2 has no head dimension of its own.
  "qwen2": qwen2.bind(Config(**SIZES | {"head_dim": 16})),
  "qwen3": qwen3.bind(Config(**SIZES)),
  "gemma3": gemma3.bind(
    gemma3.Config(**SIZES, local=(True, False), window=5, query_scalar=20, tied=True)
  ),
}
SHARED = {"qkv_proj.weight": 0, "o_proj.weight": 1, "gate_up_proj.weight": 0, "down_proj.weight": 1}
OWN = {
  "qwen2": {"qkv_proj.bias": 0},
  "qwen3": {"q_norm.weight": None, "k_norm.weight": None},
  "gemma3": {
    "q_norm.weight": None,
    "k_norm.weight": None,
    "pre_feedforward_layernorm.weight": None,
    "post_feedforward_layernorm.weight": None,
  },
}
NORMS = {"input_layernorm.weight": None, "post_attention_layernorm.weight": None}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_place_in_the_engine(name):
  model = MODELS[name]
  weights = transfer.random_weights(model)
  leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
  sources = {".".join(key.name for key in path): np.asarray(leaf) for path, leaf in leaves}
  made = parameters(assemblies(model.rules, {k: v.shape for k, v in sources.items()}), 2)
  layer = "model.layers.1."
  found = {p.assembly.dst: p for p in made if p.assembly.dst.startswith(layer)}
  short = {k.removeprefix(layer).removeprefix("self_attn.").removeprefix("mlp."): p.axis
           for k, p in found.items()}  # fmt: skip
  assert short == SHARED | NORMS | OWN[name]
  if name == "qwen2":
    bias = apply(found[f"{layer}self_attn.qkv_proj.bias"].assembly, sources)
    parts = [sources[f"layers.attention.{k}_bias"][1] for k in ("query", "key", "value")]
    expected = [np.split(part, 2)[rank] for rank in range(2) for part in parts]
    np.testing.assert_array_equal(bias, np.concatenate(expected))


DELTA = SIZES | {
  "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6, "taps": 3, "rotary_dim": 8,
}  # fmt: skip
HYBRID = {
  "qwen3_5": qwen3_5.bind(hybrid_decoder.Config(**DELTA, linear=(True, False))),
  "qwen3_5_moe": qwen3_5_moe.bind(
    hybrid_decoder.Config(
      **DELTA,
      linear=(True, False),
      experts=3,
      expert_ffw=10,
      router=moe.Softmax(2, normalized=True),
    )
  ),
}
DELTA_PLACES = {
  **{f"linear_attn.{name}": 0 for name in ("A_log", "dt_bias", "conv1d.weight")},
  **{f"linear_attn.{name}": 0 for name in ("in_proj_qkvz.weight", "in_proj_ba.weight")},
  "linear_attn.norm.weight": None,
  "linear_attn.out_proj.weight": 1,
}
MLP_PLACES = {
  "qwen3_5": {"mlp.gate_up_proj.weight": 0, "mlp.down_proj.weight": 1},
  "qwen3_5_moe": {
    "mlp.gate.weight": None,
    "mlp.shared_expert_gate.weight": None,
    "mlp.shared_expert.gate_up_proj.weight": 0,
    "mlp.shared_expert.down_proj.weight": 1,
    "mlp.experts.w13_weight": 1,
    "mlp.experts.w2_weight": 2,
  },
}


@pytest.mark.parametrize("name", HYBRID)
def test_layers_of_the_delta_rule_have_their_place_in_the_engine(name):
  """Each rank has its queries, keys, values and gates in turn; attention has no prefix there."""
  model = HYBRID[name]
  weights = transfer.random_weights(model)
  leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
  sources = {".".join(key.name for key in path): np.asarray(leaf) for path, leaf in leaves}
  published = assemblies(model.rules, {k: v.shape for k, v in sources.items()})
  made = {p.assembly.dst: p for p in parameters(published, 2)}

  def places(layer):
    prefix = f"model.layers.{layer}."
    return {k.removeprefix(prefix): p.axis for k, p in made.items() if k.startswith(prefix)}

  assert places(0) == NORMS | DELTA_PLACES | MLP_PLACES[name]
  attention = {"qkv_proj.weight": 0, "o_proj.weight": 1} | OWN["qwen3"]
  assert places(1) == NORMS | attention | MLP_PLACES[name]
  delta = {k.removeprefix("linear_layers.delta."): v[0] for k, v in sources.items() if "delta" in k}
  channels = np.split(delta["mixed"].T, [16, 32])
  rows = [np.split(part, 2) for part in (*channels, delta["gate"].T)]
  expected = np.concatenate([part[rank] for rank in range(2) for part in rows])
  fused = made["model.layers.0.linear_attn.in_proj_qkvz.weight"].assembly
  np.testing.assert_array_equal(apply(fused, sources), expected)
  taps = np.split(delta["taps"].transpose(2, 1, 0), [16, 32])
  expected = np.concatenate([np.split(part, 2)[rank] for rank in range(2) for part in taps])
  fused = made["model.layers.0.linear_attn.conv1d.weight"].assembly
  np.testing.assert_array_equal(apply(fused, sources), expected)
  kept = quantized_weights(published, Quantization(block=None))
  quantized = {k.rpartition("linear_attn.")[2] for k in kept if "linear_attn" in k}
  assert quantized == {f"{k}.weight" for k in ("in_proj_qkv", "in_proj_z", "out_proj")}


@pytest.mark.parametrize("name", [*MODELS, *HYBRID])
def test_what_no_tensor_makes_is_found_by_the_engines_names(name):  # W7
  """All but what the engine makes by itself."""
  model = (MODELS | HYBRID)[name]
  weights = transfer.random_weights(model)
  made = assemblies(model.rules, {t.name: t.shape for t in source_layout(weights)})
  names = [part.dst for part in made]
  scales = [f"{n}_scale_inv" for n in quantized_weights(made, Quantization(block=None))]
  placed = [parameter.assembly.dst for parameter in parameters(made, 2)]
  assert unplanned(placed, names) == []
  assert unplanned(placed, placed) == []  # a direct push
  fp8 = [p.replace("weight", "weight_scale_inv") for p in placed if "gate_up_proj.w" in p]
  assert unplanned(fp8, [*names, *scales]) == [] and unplanned(fp8, names) == sorted(fp8)
  own = [
    "model.layers.1.self_attn.attn.k_scale", "model.layers.1.self_attn.rotary_emb.cos_sin_cache",
    "model.rotary_emb.inv_freq", "model.norm.gemma_weight", "visual.blocks.0.norm1.weight",
    "lm_head.weight",
  ]  # fmt: skip
  assert unplanned(own, names) == []
  held = [*placed, *own, "model.layers.2.mlp.down_proj.weight", "model.layers.1.mlp.gate.bias"]
  assert unplanned(held, names) == sorted(held[-2:])
  left = [n for n in names if not n.endswith("layers.0.input_layernorm.weight")]
  assert unplanned(placed, left) == ["model.layers.0.input_layernorm.weight"]


def test_a_tied_head_is_the_embedding():  # W21
  held = {"model.embed_tokens.weight": "1", "lm_head.weight": "2"}
  assert untied(held, held) == ""  # sent by itself
  assert untied(held | {"lm_head.weight": "1"}, ["model.embed_tokens.weight"]) == ""
  assert untied({"model.embed_tokens.weight": "1"}, ["model.embed_tokens.weight"]) == ""
  wrong = "lm_head.weight is not sent and is not model.embed_tokens.weight"
  assert untied(held, ["model.embed_tokens.weight"]) == wrong


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_server_starts_from_an_export_and_takes_a_push(name, sglang_python, tmp_path):
  """Both times it answers as transformers does."""
  model = MODELS[name]
  original = initialize(model, jax.random.key(0))
  original = jax.tree.map(lambda w: w + jnp.asarray(0.1, w.dtype), original)  # no bias is zero
  save_weights(model, original, tmp_path / "original")
  options = ServerOptions(
    tmp_path / "original",
    python=sglang_python,
    log=tmp_path / "server.log",
  )
  with SGLangServer(options) as server:
    got, _ = score(server)
    want = reference(sglang_python, model, original, tmp_path / "original", tmp_path / "copy")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    weights = changed(original, seed=1)
    spread = jax.device_put(weights, shardings(model, make_mesh(fsdp=4, tensor=2)))
    publish(server, model, spread, 1, DiskTransport(tmp_path / "staging"))
    got, _ = score(server)
    want = reference(sglang_python, model, weights, tmp_path / "original", tmp_path / "export")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", HYBRID)
def test_what_checkpoints_keep_in_float32_is_sent_so(name, ranks):
  """Decays of the delta rule: rounded to bfloat16 a sampler would forget at another rate."""
  model = HYBRID[name]
  layout = source_layout(transfer.random_weights(model))
  options = dict(quantization=None, bucket_bytes=1 << 20, align=16)
  made = push_plan(model, layout, "bfloat16", ranks, **options)
  wide = {segment.name for segment in made.segments if segment.dtype == "float32"}
  assert wide == {s.name for s in made.segments if s.name.endswith(".A_log")} != set()
