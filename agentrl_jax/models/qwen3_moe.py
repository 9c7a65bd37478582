"""The Qwen3 mixture-of-experts family: Qwen3's attention, and softmax routing in every layer (Yang
et al. 2025).
"""

import functools
from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hf_config, moe, moe_decoder
from agentrl_jax.models.model import Family, Model
from agentrl_jax.models.moe_decoder import Config

_FIXED = {
  "attention_bias": False,
  "decoder_sparse_step": 1,
  "hidden_act": "silu",
  "mlp_only_layers": [],
}
# transformers', where a config.json leaves a field out
_DEFAULTS = {"mlp_only_layers": [], "num_key_value_heads": 4}
_IGNORED = {"output_router_logits"}  # of transformers' own training
_READ = {"moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok"}
_BALANCE = "router_aux_loss_coef"
_EXPERTS = ("num_experts", "num_local_experts")  # one field; transformers 5 writes the second name


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def config(*, experts_per_token: int, normalized: bool, **sizes: Any) -> Config:
  """The `Config` of this family: `sizes` are its other fields."""
  router = moe.Softmax(experts_per_token, normalized)
  return Config(router=router, query_key_norm=True, **sizes)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = _DEFAULTS | dict(fields)
  fields["mlp_only_layers"] = fields["mlp_only_layers"] or []  # null is the default, too
  read = {*_IGNORED, *_READ, _BALANCE, *_EXPERTS, *hf_config.refuse_windows(fields)}
  hf_config.check(fields, "Qwen3-MoE", fixed=_FIXED, read=read)
  experts = [name for name in _EXPERTS if name in fields]
  missing = sorted(_READ - set(fields)) + ([] if experts else [_EXPERTS[0]])
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  hf_config.require_counts(fields, {experts[0], *_READ} - {"norm_topk_prob"})
  hf_config.require_experts(fields, experts[0])
  theta, scaling = hf_config.read_rope(fields)
  return bind(
    config(
      experts=fields[experts[0]],
      experts_per_token=fields["num_experts_per_tok"],
      normalized=fields["norm_topk_prob"],
      expert_ffw=fields["moe_intermediate_size"],
      load_balance=fields.get(_BALANCE, 0.001),  # transformers' default
      rope_theta=theta,
      rope_scaling=scaling,
      **hf_config.read_sizes(fields),
    )
  )


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  return {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    "moe_intermediate_size": config.expert_ffw,
    "norm_topk_prob": config.router.normalized,
    "num_experts": config.experts,
    "num_experts_per_tok": config.router.experts_per_token,
    _BALANCE: config.load_balance,
    **_FIXED,
    "use_sliding_window": False,
  }


_FAMILY = Family(
  name="qwen3_moe",
  abstract=moe_decoder.abstract_grouped_query,
  forward=functools.partial(moe_decoder.forward, moe_decoder.grouped_query),
  forward_routed=functools.partial(moe_decoder.forward_routed, moe_decoder.grouped_query),
  unembedding=decoder.unembedding,
  init_cache=decoder.init_cache,
  decode=functools.partial(moe_decoder.decode, moe_decoder.grouped_query),
  rules=moe_decoder.rules_grouped_query,
  to_hf=to_hf,
  units=decoder.units,
)
