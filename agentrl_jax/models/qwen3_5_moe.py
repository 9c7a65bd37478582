"""The Qwen3.5 and Qwen3.6 mixtures of experts, text only: the layers of `qwen3_5` with softmax
routing and a gated shared expert in each (Qwen Team 2026).
"""

from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hf_config, hybrid_decoder, hybrid_hf, moe
from agentrl_jax.models.hybrid_decoder import Config
from agentrl_jax.models.model import Family, Model

_NAME = "Qwen3.5-MoE"
_FIXED = {"mlp_only_layers": []}
_SHARED = "shared_expert_intermediate_size"
_READ = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", _SHARED}
_BALANCE = "router_aux_loss_coef"
_UNUSED = {"intermediate_size", "output_router_logits"}  # of an MLP that there is none, of training


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = hybrid_hf.text_fields(fields, _NAME)
  balance = fields.pop(_BALANCE, 0.001)  # transformers' default
  fields = {name: value for name, value in fields.items() if name not in _UNUSED}
  if _SHARED in fields:
    fields["intermediate_size"] = fields[_SHARED]
  sizes = hybrid_hf.read(fields, _NAME, fixed=_FIXED, also=_READ)
  hf_config.require_experts(fields, "num_experts")
  return bind(
    Config(
      experts=fields["num_experts"],
      expert_ffw=fields["moe_intermediate_size"],
      router=moe.Softmax(fields["num_experts_per_tok"], normalized=True),
      load_balance=balance,
      **sizes,
    )
  )


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, of a text model."""
  assert config.router is not None
  fields = hybrid_hf.write(config)
  return {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    **{name: value for name, value in fields.items() if name not in _UNUSED},
    "moe_intermediate_size": config.expert_ffw,
    "num_experts": config.experts,
    "num_experts_per_tok": config.router.experts_per_token,
    _SHARED: config.ffw,
    _BALANCE: config.load_balance,
  }


_FAMILY = Family(
  name="qwen3_5_moe",
  abstract=hybrid_decoder.abstract,
  forward=hybrid_decoder.forward,
  forward_routed=hybrid_decoder.forward_routed,
  unembedding=decoder.unembedding,
  init_cache=hybrid_decoder.init_cache,
  decode=hybrid_decoder.decode,
  rules=hybrid_decoder.rules,
  to_hf=to_hf,
  units=hybrid_decoder.units,
  checkpoint=hybrid_hf.TextFiles,
  whole_prefixes=True,
)
