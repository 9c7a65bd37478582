"""The Llama family: pre-norm blocks of grouped-query attention and a gated MLP (Touvron et al.
2023).

Serves SmolLM, SmolLM2 and Llama 1-3.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.models import attention, layers
from agentrl_jax.models.layers import RopeScaling
from agentrl_jax.models.model import Family, Model, Rule, param, unstack

# A transformation of the scanned layer function, such as `functools.partial(jax.checkpoint,
# policy=...)`.
Remat = Callable[[Callable[..., Any]], Callable[..., Any]]


def save_everything(function: Callable[..., Any]) -> Callable[..., Any]:
  """No rematerialisation: every activation of the forward pass is kept for the backward pass."""
  return function


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one Llama model."""

  vocab_size: int
  embed: int
  ffw: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  max_position: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  tied: bool = False  # the unembedding is the transposed embedding
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None


@flax.struct.dataclass
class Layer:
  attention_norm: Float[Array, "D"]
  attention: layers.Attention
  mlp_norm: Float[Array, "D"]
  mlp: layers.MLP


@flax.struct.dataclass
class LlamaWeights:
  """`layers` is stacked: each of its arrays has a leading layer axis (or is a tuple, see
  `model.unstack`).
  """

  embedding: Float[Array, "V D"]
  layers: Layer | tuple[Layer, ...]
  final_norm: Float[Array, "D"]
  unembedding: Float[Array, "D V"] | None  # None where tied


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def _embedding_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def abstract(config: Config) -> LlamaWeights:
  depth, embed, vocab = config.layers, config.embed, config.vocab_size
  norm = param((depth, embed), ("layers", None), layers.ones)
  head = None if config.tied else param((embed, vocab), ("embed", "vocab"), layers.scaled_normal)
  return LlamaWeights(
    embedding=param((vocab, embed), ("vocab", "embed"), _embedding_init),
    layers=Layer(
      attention_norm=norm,
      attention=layers.Attention.abstract(
        depth, embed, config.heads, config.kv_heads, config.head_dim
      ),
      mlp_norm=norm,
      mlp=layers.MLP.abstract(depth, embed, config.ffw),
    ),
    final_norm=param((embed,), (None,), layers.ones),
    unembedding=head,
  )


def units(config: Config) -> Mapping[str, int]:
  """A head is not cut."""
  return {"heads": config.heads, "kv_heads": config.kv_heads}


def _block(
  config: Config,
  layer: Layer,
  x: Float[Array, "B T D"],
  by: layers.Rotation,
  mix: layers.Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  with jax.named_scope("attention"):
    normed = layers.rms_norm(x, layer.attention_norm, config.norm_epsilon)
    mixed, kept = layers.attention(
      layer.attention, normed, by, mix, head_dim=config.head_dim, matmul=matmul
    )
    x = x + mixed
  with jax.named_scope("mlp"):
    normed = layers.rms_norm(x, layer.mlp_norm, config.norm_epsilon)
    return x + layers.mlp(layer.mlp, normed, matmul=matmul), kept


def _rotation(config: Config, position: Int[Array, "B T"]) -> layers.Rotation:
  frequencies = layers.rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
  return layers.rotation(position, frequencies)


def forward(
  config: Config,
  weights: LlamaWeights,
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  position: Int[Array, "B T"],
  *,
  parent: Int[Array, "B T"] | None = None,
  dtype: Any = jnp.float32,
  remat: Remat = save_everything,
  matmul: layers.Matmul = layers.matmul,
) -> Float[Array, "B T D"]:
  """See `Model.forward`."""
  by = _rotation(config, position)

  def mix(query: Array, key: Array, value: Array) -> tuple[Array, None]:
    return attention.attend(query, key, value, sample, parent), None

  def body(x: Array, layer: Layer) -> tuple[Array, None]:
    return _block(config, layer, x, by, mix, matmul)

  x = weights.embedding[tokens].astype(dtype)
  x, _ = jax.lax.scan(remat(body), x, weights.layers)
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon)


def unembedding(config: Config, weights: LlamaWeights) -> Float[Array, "D V"]:
  if config.tied:
    return weights.embedding.T
  assert weights.unembedding is not None
  return weights.unembedding


def init_cache(
  config: Config, rows: int, length: int, dtype: Any
) -> tuple[tuple[Array, Array], ...]:
  """A pair for each layer, keys [rows, K, H, length] and values [rows, K, length, H]."""
  keys = rows, config.kv_heads, config.head_dim, length
  values = rows, config.kv_heads, length, config.head_dim
  return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.layers))


def decode(
  config: Config,
  weights: LlamaWeights,
  cache: tuple[tuple[Array, Array], ...],
  tokens: Int[Array, "B N"],
  position: Int[Array, "B N"],
  *,
  dtype: Any = jnp.float32,
  matmul: layers.Matmul = layers.matmul,
) -> tuple[Float[Array, "B N D"], tuple[tuple[Array, Array], ...]]:
  """See `Model.decode`. Layers are unrolled: caches threaded through a scan would be copied every
  step.
  """
  by = _rotation(config, jnp.maximum(position, 0))
  x = weights.embedding[tokens].astype(dtype)
  updated = []
  for layer, (keys, values) in zip(unstack(weights).layers, cache, strict=True):

    def mix(
      query: Array, key: Array, value: Array, keys: Array = keys, values: Array = values
    ) -> tuple[Array, tuple[Array, Array]]:
      kept = (
        attention.write_keys(keys, key, position),
        attention.write_values(values, value, position),
      )
      return attention.attend_cache(query, *kept, position), kept

    x, kept = _block(config, layer, x, by, mix, matmul)
    updated.append(kept)
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon), tuple(updated)


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face Llama checkpoint; a tied head has none of its own."""
  part = "model.layers.{layer}."
  matrices = {
    "self_attn.q_proj": ("attention", "query"),
    "self_attn.k_proj": ("attention", "key"),
    "self_attn.v_proj": ("attention", "value"),
    "self_attn.o_proj": ("attention", "output"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
  }
  norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
  found = [Rule("model.embed_tokens.weight", ("embedding",), (0, 1))]
  found += [
    Rule(f"{part}{name}.weight", ("layers", *path), (1, 0)) for name, path in matrices.items()
  ]
  found += [Rule(f"{part}{name}.weight", ("layers", field), (0,)) for name, field in norms.items()]
  found += [Rule("model.norm.weight", ("final_norm",), (0,))]
  if not config.tied:
    found += [Rule("lm_head.weight", ("unembedding",), (1, 0))]
  return tuple(found)


# config.json fields that change nothing here, whatever they hold.
_IGNORED = {
  *("_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype"),
  *("id2label", "initializer_range", "is_encoder_decoder", "is_llama_config", "label2id"),
  *("model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict"),
  *("torch_dtype", "transformers.js_config", "transformers_version", "use_cache"),
}
# Fields read below, beside the tables.
_READ = {"head_dim", "rope_parameters", "rope_scaling", "rope_theta"}
# Fields of which only this value is implemented.
_FIXED = {
  "attention_bias": False,
  "hidden_act": "silu",
  "mlp_bias": False,
  "pretraining_tp": 1,
  "rope_interleaved": False,
}
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "embed",
  "intermediate_size": "ffw",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "max_position_embeddings": "max_position",
}
_OPTIONS = {
  "num_key_value_heads": "kv_heads",
  "rms_norm_eps": "norm_epsilon",
  "tie_word_embeddings": "tied",
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "pad_token_id": "pad_token_id",
}


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  for name, value in fields.items():
    if name in _FIXED and value != _FIXED[name]:
      raise ValueError(f"config field {name}={value!r} is not supported, expected {_FIXED[name]!r}")
    if name not in {*_IGNORED, *_READ, *_FIXED, *_SIZES, *_OPTIONS}:
      raise ValueError(f"config field {name}={value!r} is not known to the Llama family")
  missing = [name for name in _SIZES if name not in fields]
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  sizes = {ours: fields[name] for name, ours in (_SIZES | _OPTIONS).items() if name in fields}
  sizes.setdefault("kv_heads", sizes["heads"])
  if isinstance(sizes.get("eos_token_id"), list):
    sizes["eos_token_id"] = tuple(sizes["eos_token_id"])
  theta, scaling = _rope_from_hf(fields)
  head_dim = fields.get("head_dim") or sizes["embed"] // sizes["heads"]
  if sizes["heads"] % sizes["kv_heads"]:
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    raise ValueError(
      f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    )
  return bind(Config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, **sizes))


def _rope_from_hf(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
  rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
  theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind == "linear":
    return theta, layers.Linear(rope["factor"])
  if kind == "llama3":
    return theta, layers.Llama3(
      factor=rope["factor"],
      low_frequency=rope["low_freq_factor"],
      high_frequency=rope["high_freq_factor"],
      original_length=rope["original_max_position_embeddings"],
    )
  raise ValueError(
    f"config field rope_type={kind!r} is not supported, expected 'default', 'linear' or 'llama3'"
  )


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  fields = {name: getattr(config, ours) for name, ours in (_SIZES | _OPTIONS).items()}
  fields |= _FIXED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": config.head_dim,
    "rope_theta": config.rope_theta,
  }
  match config.rope_scaling:
    case layers.Linear(factor):
      fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    case layers.Llama3(factor, low, high, original):
      fields["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
      }
  return fields


_FAMILY = Family(
  name="llama",
  abstract=abstract,
  forward=forward,
  unembedding=unembedding,
  init_cache=init_cache,
  decode=decode,
  rules=rules,
  to_hf=to_hf,
  units=units,
)
