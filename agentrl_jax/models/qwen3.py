"""The Qwen3 family, dense: the pre-norm decoder that normalises each head's query and key (Yang et
al. 2025).

The head dimension is a size of its own: heads * head_dim need not be the embedding's.
"""

from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hf_config
from agentrl_jax.models.decoder import Config, DecoderWeights
from agentrl_jax.models.model import Family, Model, Rule

_FIXED = {"attention_bias": False, "hidden_act": "silu"}
# transformers', where a config.json leaves a field out
_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def abstract(config: Config) -> DecoderWeights:
  return decoder.abstract(config, query_key_norm=True)


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face Qwen3 checkpoint."""
  return decoder.rules(config, query_key_norm=True)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = _DEFAULTS | dict(fields)
  hf_config.check(fields, "Qwen3", fixed=_FIXED, read=hf_config.refuse_windows(fields))
  theta, scaling = hf_config.read_rope(fields)
  return bind(Config(rope_theta=theta, rope_scaling=scaling, **hf_config.read_sizes(fields)))


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  return {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    **_FIXED,
    "use_sliding_window": False,
  }


_FAMILY = Family(
  name="qwen3",
  abstract=abstract,
  forward=decoder.forward,
  unembedding=decoder.unembedding,
  init_cache=decoder.init_cache,
  decode=decoder.decode,
  rules=rules,
  to_hf=to_hf,
  units=decoder.units,
)
