"""The GLM-4.5 family (GLM-4.5, GLM-4.5-Air): a few dense layers, then sigmoid routing with a
correction bias and a shared expert; a part of each head is rotated (GLM-4.5 Team 2025).
"""

import functools
from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hf_config, moe_decoder
from agentrl_jax.models.model import Family, Model
from agentrl_jax.models.moe_decoder import Config

_FIXED = {"hidden_act": "silu"}
_FIELDS = {
  "attention_bias": "bias",
  "first_k_dense_replace": "dense_layers",
  "moe_intermediate_size": "expert_ffw",
  "n_routed_experts": "experts",
  "num_nextn_predict_layers": "extra_layers",
  "use_qk_norm": "query_key_norm",
}
_OTHERS = {"n_shared_experts", "partial_rotary_factor"}
# transformers', where a config.json leaves a field out
_DEFAULTS = {
  "num_key_value_heads": 8,
  "num_nextn_predict_layers": 1,
  "partial_rotary_factor": 0.5,
  "rms_norm_eps": 1e-5,
  "use_qk_norm": False,
}


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = _DEFAULTS | dict(fields)
  rope = dict(hf_config.rope_fields(fields))
  fields["partial_rotary_factor"] = rope.pop(
    "partial_rotary_factor", fields["partial_rotary_factor"]
  )
  fields |= {"rope_parameters": rope, "rope_scaling": None}
  read = {*_FIELDS, *moe_decoder.SIGMOID_FIELDS, *_OTHERS}
  hf_config.check(fields, "GLM-4.5", fixed=_FIXED, read={*read, "output_router_logits"})
  missing = sorted(read - set(fields))
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  moe_decoder.require_counts(fields)
  theta, scaling = hf_config.read_rope(fields)
  sizes = hf_config.read_sizes(fields)
  return bind(
    Config(
      router=moe_decoder.read_sigmoid(fields),
      shared_ffw=fields["n_shared_experts"] * fields["moe_intermediate_size"],
      rotary_dim=int(sizes["head_dim"] * fields["partial_rotary_factor"]),
      rope_theta=theta,
      rope_scaling=scaling,
      **{ours: fields[name] for name, ours in _FIELDS.items()},
      **sizes,
    )
  )


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  return {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    **{name: getattr(config, ours) for name, ours in _FIELDS.items()},
    **moe_decoder.write_sigmoid(config.router),
    "n_shared_experts": config.shared_ffw // config.expert_ffw,
    "partial_rotary_factor": (config.rotary_dim or config.head_dim) / config.head_dim,
    **_FIXED,
  }


_FAMILY = Family(
  name="glm4_moe",
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
