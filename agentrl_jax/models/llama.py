"""The Llama family: the pre-norm decoder without biases (Touvron et al. 2023).

Serves SmolLM, SmolLM2 and Llama 1-3.
"""

from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hf_config
from agentrl_jax.models.decoder import Config
from agentrl_jax.models.model import Family, Model

_FIXED = {
  "attention_bias": False,
  "hidden_act": "silu",
  "mlp_bias": False,
  "pretraining_tp": 1,
  "rope_interleaved": False,
}


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  hf_config.check(fields, "Llama", fixed=_FIXED, read={"is_llama_config"})
  theta, scaling = hf_config.read_rope(fields)
  return bind(Config(rope_theta=theta, rope_scaling=scaling, **hf_config.read_sizes(fields)))


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    **_FIXED,
  }


_FAMILY = Family(
  name="llama",
  abstract=decoder.abstract,
  forward=decoder.forward,
  unembedding=decoder.unembedding,
  init_cache=decoder.init_cache,
  decode=decoder.decode,
  rules=decoder.rules,
  to_hf=to_hf,
  units=decoder.units,
)
