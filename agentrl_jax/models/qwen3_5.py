"""The Qwen3.5 and Qwen3.6 families, dense, text only: three layers of the gated delta rule for each
of gated attention (Qwen Team 2026).

A checkpoint of text and images is read as the text model in it, and written as that alone.
"""

from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder, hybrid_decoder, hybrid_hf
from agentrl_jax.models.hybrid_decoder import Config
from agentrl_jax.models.model import Family, Model

_NAME = "Qwen3.5"
_FIXED = {"mlp_only_layers": []}


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = hybrid_hf.text_fields(fields, _NAME)
  return bind(Config(**hybrid_hf.read(fields, _NAME, fixed=_FIXED)))


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, of a text model."""
  return {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    **hybrid_hf.write(config),
  }


_FAMILY = Family(
  name="qwen3_5",
  abstract=hybrid_decoder.abstract,
  forward=hybrid_decoder.forward,
  unembedding=decoder.unembedding,
  init_cache=hybrid_decoder.init_cache,
  decode=hybrid_decoder.decode,
  rules=hybrid_decoder.rules,
  to_hf=to_hf,
  units=hybrid_decoder.units,
  checkpoint=hybrid_hf.TextFiles,
  whole_prefixes=True,
)
