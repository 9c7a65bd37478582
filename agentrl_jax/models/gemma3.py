"""The Gemma 3 family, text only: norms on both sides of attention and MLP, and layers that see a
sliding window between layers that see everything (Gemma Team 2025).

The two kinds of layer have rotary embeddings of their own. Norms multiply by 1 + weight, embeddings
by the square root of their size.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import attention, decoder, hf_config, layers
from agentrl_jax.models.decoder import DecoderWeights, KeyValueCache
from agentrl_jax.models.layers import RopeScaling
from agentrl_jax.models.model import Family, Model, Rule, param, unstack
from agentrl_jax.models.remat import Remat, save_everything


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one model."""

  vocab_size: int
  embed: int
  ffw: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  max_position: int
  local: tuple[bool, ...]  # for each layer, whether it sees only the window
  window: int  # positions a local layer sees, the query's own included
  query_scalar: int  # scores are divided by its square root
  rope_theta: float = 1e6  # of global layers, as is the scaling
  rope_scaling: RopeScaling | None = None
  local_rope_theta: float = 10000.0
  norm_epsilon: float = 1e-6
  tied: bool = True
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None


_EVERYWHERE = jnp.iinfo(jnp.int32).max  # the window of a layer that has none


@flax.struct.dataclass
class Layer:
  attention_norm: Float[Array, "D"]
  attention: layers.Attention
  attention_output_norm: Float[Array, "D"]
  mlp_norm: Float[Array, "D"]
  mlp: layers.MLP
  mlp_output_norm: Float[Array, "D"]


@flax.struct.dataclass
class _Rotations:
  everywhere: layers.Rotation
  local: layers.Rotation


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def abstract(config: Config) -> DecoderWeights:
  depth, embed = config.layers, config.embed
  norm = param((depth, embed), ("layers", None), layers.zeros)
  heads = config.heads, config.kv_heads, config.head_dim
  stacked = Layer(
    attention_norm=norm,
    attention=layers.Attention.abstract(depth, embed, *heads, norm=layers.zeros),
    attention_output_norm=norm,
    mlp_norm=norm,
    mlp=layers.MLP.abstract(depth, embed, config.ffw),
    mlp_output_norm=norm,
  )
  return decoder.around(config, stacked, norm=layers.zeros)


def _block(
  config: Config,
  layer: Layer,
  x: Float[Array, "B T D"],
  by: layers.Rotation,
  mix: layers.Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  norm = functools.partial(layers.zero_centred_norm, epsilon=config.norm_epsilon)

  def mix_scaled(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
    """Attention divides scores by the root of the head dimension; here it is another number."""
    factor = (config.head_dim / config.query_scalar) ** 0.5
    return mix(query * jnp.asarray(factor, query.dtype), key, value)

  with jax.named_scope("attention"):
    mixed, kept = layers.attention(
      layer.attention,
      norm(x, layer.attention_norm),
      by,
      mix_scaled,
      head_dim=config.head_dim,
      matmul=matmul,
      norm=norm,
    )
    x = x + norm(mixed, layer.attention_output_norm)
  with jax.named_scope("mlp"):
    made = layers.mlp(layer.mlp, norm(x, layer.mlp_norm), matmul=matmul, activation=_gelu)
    return x + norm(made, layer.mlp_output_norm), kept


_gelu = functools.partial(jax.nn.gelu, approximate=True)


def _embed(
  config: Config, weights: DecoderWeights, tokens: Int[Array, "B T"], dtype: Any
) -> Float[Array, "B T D"]:
  return weights.embedding[tokens].astype(dtype) * jnp.asarray(config.embed**0.5, dtype)


def _rotations(config: Config, position: Int[Array, "B T"]) -> _Rotations:
  return _Rotations(
    everywhere=layers.rotation(position, config.head_dim, config.rope_theta, config.rope_scaling),
    local=layers.rotation(position, config.head_dim, config.local_rope_theta, None),
  )


def forward(
  config: Config,
  weights: DecoderWeights,
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  position: Int[Array, "B T"],
  *,
  parent: Int[Array, "B T"] | None = None,
  dtype: Any = jnp.float32,
  remat: Remat = save_everything,
  attend_rows: attention.AttendRows = attention.attend,
  matmul: layers.Matmul = layers.matmul,
) -> Float[Array, "B T D"]:
  """See `Model.forward`. Both kinds of layer are one scan: which it is, is an input of its body."""
  rotations = _rotations(config, position)

  def body(x: Array, of_layer: tuple[Layer, Bool[Array, ""]]) -> tuple[Array, None]:
    layer, local = of_layer
    by = jax.tree.map(functools.partial(jnp.where, local), rotations.local, rotations.everywhere)
    window = attention.Window(position, jnp.where(local, config.window, _EVERYWHERE))

    def mix(query: Array, key: Array, value: Array) -> tuple[Array, None]:
      return attend_rows(query, key, value, sample, parent, window), None

    return _block(config, layer, x, by, mix, matmul)

  x = _embed(config, weights, tokens, dtype)
  x, _ = jax.lax.scan(remat(body), x, (weights.layers, jnp.asarray(config.local)))
  return layers.zero_centred_norm(x, weights.final_norm, config.norm_epsilon)


def decode(
  config: Config,
  weights: DecoderWeights,
  cache: KeyValueCache,
  tokens: Int[Array, "B N"],
  position: Int[Array, "B N"],
  *,
  dtype: Any = jnp.float32,
  matmul: layers.Matmul = layers.matmul,
) -> tuple[Float[Array, "B N D"], KeyValueCache]:
  """See `Model.decode`. Local layers keep keys and values outside their window as well."""
  rotations = _rotations(config, jnp.maximum(position, 0))

  def run(of_layer: tuple[Layer, bool], x: Array, mix: layers.Mix) -> tuple[Array, Any]:
    layer, local = of_layer
    by = rotations.local if local else rotations.everywhere
    return _block(config, layer, x, by, mix, matmul)

  x = _embed(config, weights, tokens, dtype)
  of_layers = zip(unstack(weights).layers, config.local, strict=True)
  windows = [config.window if local else None for local in config.local]
  x, cache = decoder.decode_layers(run, of_layers, cache, x, position, windows)
  return layers.zero_centred_norm(x, weights.final_norm, config.norm_epsilon), cache


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face Gemma 3 text checkpoint."""
  norms = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
  }
  places = decoder.attention_rules(query_key_norm=True) | decoder.MLP_RULES
  places |= {f"{name}.weight": (field,) for name, field in norms.items()}
  return decoder.rules_around(config, decoder.layer_rules(places))


_FIXED = {
  "attention_bias": False,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
  "hidden_activation": "gelu_pytorch_tanh",
  "use_bidirectional_attention": False,
}
_OWN = {"query_pre_attn_scalar": "query_scalar", "sliding_window": "window"}
_READ = frozenset({
  *("_sliding_window_pattern", "layer_types", "rope_local_base_freq", "sliding_window_pattern"),
  *("cache_implementation", "hidden_act"),  # neither is used by the model
  *_OWN,
})  # fmt: skip
_DEFAULTS = {  # transformers', where a config.json leaves a field out
  "head_dim": 256,
  "num_key_value_heads": 4,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
  "tie_word_embeddings": True,
  "bos_token_id": 2,
  "eos_token_id": 1,
  "pad_token_id": 0,
}


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json` of the text model.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = _DEFAULTS | dict(fields)
  hf_config.check(fields, "Gemma 3", fixed=_FIXED, read=_READ)
  hf_config.require_counts(fields, ["sliding_window"])
  hf_config.read_positive(fields, "query_pre_attn_scalar", 1.0)
  sizes = hf_config.read_sizes(fields) | {ours: fields[name] for name, ours in _OWN.items()}
  return bind(Config(local=_read_local(fields), **_read_ropes(fields), **sizes))


def _read_local(fields: Mapping[str, Any]) -> tuple[bool, ...]:
  """Which layers slide: as listed, or all but every n-th."""
  count = fields["num_hidden_layers"]
  every = fields.get("sliding_window_pattern", 6)
  kinds = fields.get("layer_types")
  if kinds is None:
    return tuple((layer + 1) % every != 0 for layer in range(count))
  known = {"sliding_attention": True, "full_attention": False}
  if len(kinds) != count or not set(kinds) <= set(known):
    raise ValueError(f"layer_types {kinds} are not supported, expected {count} of {list(known)}")
  return tuple(known[kind] for kind in kinds)


def _read_ropes(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Both spellings: `rope_parameters` by kind of layer, and the older three fields."""
  parts = fields.get("rope_parameters") or {}
  unknown = sorted(set(parts) - {"full_attention", "sliding_attention"})
  if unknown:
    raise ValueError(f"rope_parameters {unknown} are not known, expected one set a kind of layer")
  everywhere = (parts.get("full_attention") or {}) | (fields.get("rope_scaling") or {})
  local = parts.get("sliding_attention") or {}
  length = fields["max_position_embeddings"]
  if hf_config.read_scaling(local, length) is not None:
    raise ValueError(f"rope scaling {local} of sliding_attention is not supported")
  return {
    "rope_theta": hf_config.read_positive({**fields, **everywhere}, "rope_theta", 1e6),
    "rope_scaling": hf_config.read_scaling(everywhere, length),
    "local_rope_theta": hf_config.read_positive(
      local, "rope_theta", hf_config.read_positive(fields, "rope_local_base_freq", 10000.0)
    ),
  }


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  kinds = ["sliding_attention" if local else "full_attention" for local in config.local]
  return {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    "rope_local_base_freq": config.local_rope_theta,
    "layer_types": kinds,
    **{name: getattr(config, ours) for name, ours in _OWN.items()},
    **_FIXED,
  }


_FAMILY = Family(
  name="gemma3",
  abstract=abstract,
  forward=forward,
  unembedding=decoder.unembedding,
  init_cache=decoder.init_cache,
  decode=decode,
  rules=rules,
  to_hf=to_hf,
  units=decoder.units,
)
