"""Adapters: what they change, what is trained, and the PEFT format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.products import Products, whole_policy
from agentrl_jax.learner.state import abstract_state, make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models import llama, lora
from agentrl_jax.models.lora import Adapter, Lora
from agentrl_jax.models.precision import Fp8
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.learner.toy import random_batch
from tests.models.test_deepseek_v4 import V4
from tests.models.test_dense import random_weights
from tests.models.test_moe_families import DEEPSEEK, QWEN3

SIZES = dict(
  vocab_size=32, embed=16, ffw=32, layers=2, heads=4, kv_heads=2, head_dim=8, max_position=64
)
MODEL = llama.bind(llama.Config(**SIZES))
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "down_proj", "lm_head"))


def random_adapters(model, how, seed=0):
  """With a `b` that changes something."""
  rng = np.random.default_rng(seed)

  def one(spec):
    return jnp.asarray(rng.normal(0, 0.3, spec.shape), jnp.float32)

  return {
    path: Adapter(one(specs.a), one(specs.b)) for path, specs in lora.abstract(model, how).items()
  }


def hidden(model, weights, how=None):
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, 32, (2, 10)), jnp.int32)
  options = {} if how is None else Products(lora=how).options
  position = jnp.broadcast_to(jnp.arange(10), (2, 10))
  return jax.jit(
    lambda w: (
      model.forward(w, tokens, jnp.zeros_like(tokens), position, **options) @ model.unembedding(w)
    )
  )(weights)


EVERYWHERE = {
  "llama": (MODEL, LORA),
  "qwen3_moe": (QWEN3, Lora(2, 4.0, ("k_proj", "gate", "up_proj"))),
  "deepseek_v3": (DEEPSEEK, Lora(2, 4.0, ("kv_b_proj", "o_proj", "gate_proj", "down_proj"))),
  "deepseek_v4": (V4, Lora(2, 4.0, ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "gate", "w1", "head"))),
}


@pytest.mark.parametrize(
  "name",
  ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in [*EVERYWHERE][1:])],
)
def test_merged_is_adapted_and_fresh_adapters_change_nothing(name):
  """Routers and routed experts among them."""
  model, how = EVERYWHERE[name]
  weights, adapters = random_weights(model, 0), random_adapters(model, how)
  plain = hidden(model, weights)
  adapted = hidden(model, lora.attached(weights, adapters, how), how)
  np.testing.assert_allclose(
    adapted, hidden(model, lora.merged(weights, adapters, how)), rtol=2e-5, atol=2e-5
  )
  assert np.abs(adapted - plain).max() > 0.01
  fresh = {path: one.replace(b=jnp.zeros_like(one.b)) for path, one in adapters.items()}
  unchanged = hidden(model, lora.attached(weights, fresh, how), how)
  np.testing.assert_allclose(unchanged, plain, rtol=1e-6, atol=1e-6)


def one_step(mesh, rows, products, dtype=jnp.float32):
  """(state before, state after, metrics, log-probs before)."""
  batch = random_batch(3, rows=16, vocabulary=32)
  optimizer = optax.adam(1e-2)
  state = make_state(MODEL, optimizer, mesh, seed=1, products=products)
  evaluate = make_evaluate(MODEL, mesh, rows=rows, products=products, dtype=dtype)
  policy = evaluate(state.weights, batch, None, state.beside)
  noise = np.random.default_rng(0).normal(0, 0.1, batch.tokens.shape).astype(np.float32)
  old = np.where(batch.action, np.asarray(policy.logp) + noise, 0.0).astype(np.float32)
  loss_batch = make_prepare(grpo())(batch, Aux(old_logp=old))
  step = make_step(MODEL, optimizer, grpo(), mesh, micro_rows=rows, products=products, dtype=dtype)
  before = jax.device_get(state)
  state, metrics = step(state, loss_batch)
  after = evaluate(state.weights, batch, None, state.beside)
  return before, jax.device_get(state), metrics, (policy.logp, after.logp)


def test_a_step_trains_adapters_alone_on_one_device_and_on_a_mesh():
  products = Products(lora=LORA)
  before, after, metrics, (old, new) = one_step(make_mesh(data=1), 16, products)
  jax.tree.map(np.testing.assert_array_equal, before.weights, after.weights)
  for path, one in after.beside.adapters.items():
    assert np.abs(one.b).max() > 0, path  # a does not move while b is zero
  held = sum(leaf.size for leaf in jax.tree.leaves(after.opt_state))
  adapters = sum(leaf.size for leaf in jax.tree.leaves(after.beside.adapters))
  assert held == 2 * adapters + 1  # two moments, a count
  assert float(metrics["gradient_norm"].total) > 0 and np.abs(np.asarray(new - old)).max() > 1e-3

  sharded = one_step(make_mesh(data=2, fsdp=2, tensor=2), 2, products)[1]
  # Adam's first update is 0.01 g / (|g| + 1e-8), which magnifies rounding of gradients near 1e-8.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
    after.beside.adapters, sharded.beside.adapters,
  )  # fmt: skip


@pytest.mark.slow
def test_frozen_weights_may_be_bfloat16_and_products_fp8():
  how = Lora(rank=2, alpha=4.0, targets=("v_proj", "up_proj"), base_dtype="bfloat16")
  products = Products(Fp8(blocks=False, history=2), how)
  before, after, _, _ = one_step(make_mesh(data=1), 16, products, jnp.bfloat16)
  assert after.weights.layers.mlp.up.dtype == jnp.bfloat16
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(after.beside.adapters))
  for amax in after.beside.history.values():
    assert (amax.x[:, 0] > 0).all() and (amax.x[:, 1:] == 0).all()
    assert (amax.gradient[:, 0] > 0).any()
  merged = jax.jit(lambda w, b: whole_policy(products, w, b))(after.weights, after.beside)
  assert merged.layers.mlp.up.dtype == jnp.bfloat16
  assert (merged.layers.mlp.up != before.weights.layers.mlp.up).any()
  assert (merged.layers.mlp.down == before.weights.layers.mlp.down).all()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v4"])
def test_peft_directories_and_back(name, tmp_path):
  """Names and shapes as PEFT 0.21.2 writes and reads them: [rank, in] and [out, rank]."""
  model, how = EVERYWHERE[name]
  adapters = random_adapters(model, how)
  lora.save(model, adapters, how, tmp_path / "adapter", base="some/base")
  tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == "some/base"
  assert (settings["r"], settings["lora_alpha"]) == (how.rank, how.alpha)
  prefix = "base_model.model.model.layers.1"
  if name == "llama":
    np.testing.assert_array_equal(
      tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"],
      adapters["layers.attention.query"].a[1].T,
    )
    assert tensors[f"{prefix}.mlp.down_proj.lora_B.weight"].shape == (16, 3)
    assert tensors["base_model.model.lm_head.lora_A.weight"].shape == (3, 16)
    assert len(tensors) == 2 * (2 + 2 + 1)
    # As PEFT writes it, an adapted head's own weight lies beside.
    tensors["base_model.model.lm_head.base_layer.weight"] = np.zeros((32, 16), np.float32)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
  elif name == "deepseek_v4":  # which PEFT does not know: its published names
    lead = "base_model.model"
    assert tensors[f"{lead}.layers.1.ffn.experts.3.w1.lora_B.weight"].shape == (12, 2)
    assert tensors[f"{lead}.layers.2.attn.compressor.wkv.lora_A.weight"].shape == (2, 16)
    assert tensors[f"{lead}.head.lora_A.weight"].shape == (2, 16)
  else:
    assert tensors[f"{prefix}.mlp.experts.3.up_proj.lora_B.weight"].shape == (12, 2)
    assert tensors[f"{prefix}.mlp.gate.lora_A.weight"].shape == (2, 16)
  jax.tree.map(np.testing.assert_array_equal, lora.load(model, how, tmp_path / "adapter"), adapters)


def test_a_state_begins_at_an_adapter(tmp_path):
  adapters = random_adapters(MODEL, LORA)
  lora.save(MODEL, adapters, LORA, tmp_path / "adapter")
  how = Lora(**{**vars(LORA), "start": str(tmp_path / "adapter")})
  mesh = make_mesh(fsdp=2)
  state = make_state(MODEL, optax.sgd(1.0), mesh, products=Products(lora=how))
  jax.tree.map(np.testing.assert_array_equal, state.beside.adapters, adapters)
  abstract = abstract_state(MODEL, optax.sgd(1.0), mesh, products=Products(lora=how))
  assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, abstract)


def test_what_cannot_be_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"alpha is 0\.0, expected more than 0"):
    Lora(alpha=0.0)
  with pytest.raises(ValueError, match="rank is 0"):
    Lora(rank=0)
  with pytest.raises(ValueError, match=r"targets \['c_attn'\] are no modules of llama, there are"):
    lora.abstract(MODEL, Lora(targets=("q_proj", "c_attn")))
  directory = tmp_path / "adapter"
  lora.save(MODEL, random_adapters(MODEL, LORA), LORA, directory)
  with pytest.raises(ValueError, match="r is 3, this run has 4"):
    lora.load(MODEL, Lora(**{**vars(LORA), "rank": 4}), directory)
  settings = json.loads((directory / "adapter_config.json").read_text())
  (directory / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
  with pytest.raises(ValueError, match="use_dora is True, supported is False"):
    lora.load(MODEL, LORA, directory)
  (directory / "adapter_config.json").write_text(json.dumps(settings))
  tensors = load_file(directory / "adapter_model.safetensors")
  tensors["base_model.model.model.norm.lora_A.weight"] = tensors.popitem()[1]
  save_file(tensors, directory / "adapter_model.safetensors")
  with pytest.raises(ValueError, match="1 missing tensors"):
    lora.load(MODEL, LORA, directory)
