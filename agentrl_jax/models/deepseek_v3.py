"""The DeepSeek V3 family: attention over a compressed latent instead of keys and values (MLA), and
sigmoid routing within groups after a few dense layers (DeepSeek-AI 2024).

Axis letters beside those of `layers`: C latent, Q query latent, P and R the dimensions of a head
without and with a rotation, V those of its value.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models import attention, decoder, hf_config, layers, moe, moe_decoder
from agentrl_jax.models.decoder import KeyValueCache
from agentrl_jax.models.layers import Mix, RopeScaling, Rotation
from agentrl_jax.models.model import Family, Model, Rule, param
from agentrl_jax.models.moe_decoder import MoEWeights

_LATENT_EPSILON = 1e-6  # of the norms of latents, whatever `rms_norm_eps` is


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one model."""

  vocab_size: int
  embed: int
  ffw: int  # of the dense layers' MLP
  layers: int  # all of them
  heads: int
  plain_dim: int
  rotary_dim: int
  value_dim: int
  latent: int
  query_latent: int | None  # None: queries are projected from x
  max_position: int
  experts: int
  expert_ffw: int
  router: moe.Sigmoid
  dense_layers: int
  shared_ffw: int  # hidden width of the shared experts together
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  mscale: float | None = None  # YaRN's: of the rotary embedding over that of all dimensions,
  mscale_all: float | None = None  # which scales the scores
  norm_epsilon: float = 1e-6
  tied: bool = False
  extra_layers: int = 0  # that predict further tokens; not part of the model, passed over in files
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None

  @property
  def prediction_layers(self) -> range:
    return range(self.layers, self.layers + self.extra_layers)


@flax.struct.dataclass
class LatentAttention:
  """Projections; `down` makes the latent of all heads' keys and values, and the one rotated key."""

  query_down: Float[Array, "D Q"] | None
  query_norm: Float[Array, "Q"] | None
  query: Float[Array, "Q N*(P+R)"]  # from x where there is no query latent
  down: Float[Array, "D C+R"]
  norm: Float[Array, "C"]
  up: Float[Array, "C N*(P+V)"]
  output: Float[Array, "N*V D"]


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


def abstract(config: Config) -> MoEWeights:
  return moe_decoder.abstract(config, functools.partial(_attention_specs, config))


def _attention_specs(config: Config, depth: int) -> LatentAttention:
  def spec(inputs: int, outputs: int, axes: tuple[str | None, str | None]) -> Any:
    return param((depth, inputs, outputs), ("layers", *axes), layers.scaled_normal)

  def norm(size: int) -> Any:
    return param((depth, size), ("layers", None), layers.ones)

  embed, heads, latent, from_ = config.embed, config.heads, config.latent, config.query_latent
  wide = heads * (config.plain_dim + config.rotary_dim)
  return LatentAttention(
    query_down=spec(embed, from_, ("embed", None)) if from_ else None,
    query_norm=norm(from_) if from_ else None,
    query=spec(from_ or embed, wide, (None if from_ else "embed", "heads")),
    down=spec(embed, latent + config.rotary_dim, ("embed", None)),
    norm=norm(latent),
    up=spec(latent, heads * (config.plain_dim + config.value_dim), (None, "heads")),
    output=spec(heads * config.value_dim, embed, ("heads", "embed")),
  )


def units(config: Config) -> Mapping[str, int]:
  """A head is not cut."""
  return {"heads": config.heads}


def _project(
  config: Config, weights: LatentAttention, x: Array, by: Rotation, matmul: layers.Matmul
) -> tuple[Array, Array, Array, Array]:
  """(plain query [B T N P], rotated query [B T N R], latent [B T C], rotated key [B T 1 R]).

  The softmax scales by the square root of P + R; YaRN's factor for scores goes into the query.
  """
  if weights.query_down is not None and weights.query_norm is not None:
    down = matmul(x, weights.query_down)
    query = matmul(layers.rms_norm(down, weights.query_norm, _LATENT_EPSILON), weights.query)
  else:
    query = matmul(x, weights.query)
  query = query.reshape(*x.shape[:-1], config.heads, -1)
  query = query * jnp.asarray(_score_factor(config), query.dtype)
  plain, turned = jnp.split(query, [config.plain_dim], axis=-1)
  latent, key = jnp.split(matmul(x, weights.down), [config.latent], axis=-1)
  latent = layers.rms_norm(latent, weights.norm, _LATENT_EPSILON)
  return plain, _rotate(turned, by), latent, _rotate(key[:, :, None], by)


def _rotate(x: Float[Array, "B T N R"], by: Rotation) -> Float[Array, "B T N R"]:
  """Checkpoints hold the two of a rotated pair side by side; afterwards they are apart, in queries
  and keys alike.
  """
  return layers.rotate(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), by)


def _score_factor(config: Config) -> float:
  if not (isinstance(config.rope_scaling, layers.Yarn) and config.mscale_all):
    return 1.0
  factor = config.rope_scaling.factor
  return (0.1 * config.mscale_all * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _expanded(
  config: Config,
  weights: LatentAttention,
  x: Float[Array, "B T D"],
  by: Rotation,
  mix: Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  """Keys and values of every head are made from the latent: least work where all are new."""
  plain, turned, latent, key = _project(config, weights, x, by, matmul)
  made = matmul(latent, weights.up).reshape(*x.shape[:-1], config.heads, -1)
  own, value = jnp.split(made, [config.plain_dim], axis=-1)
  key = jnp.broadcast_to(key, (*own.shape[:-1], config.rotary_dim))
  query = jnp.concatenate([plain, turned], axis=-1)
  mixed, kept = mix(query, jnp.concatenate([own, key], axis=-1), value)
  return matmul(mixed.reshape(*x.shape[:-1], -1), weights.output), kept


def _absorbed(
  config: Config,
  weights: LatentAttention,
  x: Float[Array, "B T D"],
  by: Rotation,
  mix: Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  """The same with queries taken to the latent instead, which all heads share as their one key and
  value: the cache holds the latent, and no key or value is ever made.
  """
  plain, turned, latent, key = _project(config, weights, x, by, matmul)
  up = layers.plain(weights.up, x.dtype).reshape(config.latent, config.heads, -1)
  to_key, to_value = jnp.split(up, [config.plain_dim], axis=-1)
  query = jnp.concatenate([jnp.einsum("btnp,cnp->btnc", plain, to_key), turned], axis=-1)
  # `mix` divides by the root of the width it sees, C + R.
  width = (config.latent + config.rotary_dim) / (config.plain_dim + config.rotary_dim)
  one = latent[:, :, None]
  mixed, kept = mix(
    query * jnp.asarray(width**0.5, query.dtype), jnp.concatenate([one, key], axis=-1), one
  )
  value = jnp.einsum("btnc,cnv->btnv", mixed, to_value)
  return matmul(value.reshape(*x.shape[:-1], -1), weights.output), kept


def init_cache(config: Config, rows: int, length: int, dtype: Any) -> KeyValueCache:
  """Of one head: the latent and the rotated key as its key, the latent again as its value."""
  keys = rows, 1, config.latent + config.rotary_dim, length
  values = rows, 1, length, config.latent
  return tuple(attention.empty_cache(keys, values, dtype) for _ in range(config.layers))


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face checkpoint."""
  places = {
    "kv_a_proj_with_mqa.weight": "down",
    "kv_a_layernorm.weight": "norm",
    "kv_b_proj.weight": "up",
    "o_proj.weight": "output",
  }
  if config.query_latent:
    places |= {"q_a_proj.weight": "query_down", "q_a_layernorm.weight": "query_norm"}
  places |= {"q_b_proj.weight" if config.query_latent else "q_proj.weight": "query"}
  of_attention = {f"self_attn.{name}": ("attention", field) for name, field in places.items()}
  return moe_decoder.rules(config, of_attention)


_FIXED = {
  "attention_bias": False,
  "hidden_act": "silu",
  "moe_layer_freq": 1,
  "pretraining_tp": 1,
  "rope_interleave": True,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
}
_FIELDS = {
  "first_k_dense_replace": "dense_layers",
  "kv_lora_rank": "latent",
  "moe_intermediate_size": "expert_ffw",
  "n_routed_experts": "experts",
  "num_nextn_predict_layers": "extra_layers",
  "q_lora_rank": "query_latent",
  "qk_nope_head_dim": "plain_dim",
  "qk_rope_head_dim": "rotary_dim",
  "v_head_dim": "value_dim",
}
_SIZES = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_IMPLIED = {"qk_head_dim"}  # by other fields, as are head_dim and num_key_value_heads
# Of the original code and of transformers' own training; they change nothing here.
_IGNORED = {"auto_map", "aux_loss_alpha", "ep_size", "output_router_logits", "seq_aux"}


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = {"num_nextn_predict_layers": 1, **fields}  # transformers' default
  read = {*_FIELDS, *moe_decoder.SIGMOID_FIELDS, "n_shared_experts"}
  hf_config.check(fields, "DeepSeek V3", fixed=_FIXED, read={*read, *_IMPLIED, *_IGNORED})
  missing = sorted(read - set(fields))
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  moe_decoder.require_counts(fields)
  hf_config.require_counts(fields, _SIZES if fields["q_lora_rank"] else _SIZES - {"q_lora_rank"})
  theta, scaling = hf_config.read_rope(fields)
  rope = hf_config.rope_fields(fields)
  sizes = hf_config.read_sizes(fields | {"num_key_value_heads": None, "head_dim": None})
  for implied in ("head_dim", "kv_heads"):
    del sizes[implied]
  return bind(
    Config(
      router=moe_decoder.read_sigmoid(fields),
      shared_ffw=fields["n_shared_experts"] * fields["moe_intermediate_size"],
      rope_theta=theta,
      rope_scaling=scaling,
      mscale=rope.get("mscale"),
      mscale_all=rope.get("mscale_all_dim"),
      **{ours: fields[name] for name, ours in _FIELDS.items()},
      **sizes,
    )
  )


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, spelt as every transformers version reads it."""
  rope = hf_config.write_rope(config.rope_theta, config.rope_scaling)
  if "rope_scaling" in rope:
    both = {"mscale": config.mscale, "mscale_all_dim": config.mscale_all}
    rope["rope_scaling"] |= {name: value for name, value in both.items() if value is not None}
  return {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **hf_config.write_sizes(config),
    "num_key_value_heads": config.heads,
    **rope,
    **{name: getattr(config, ours) for name, ours in _FIELDS.items()},
    **moe_decoder.write_sigmoid(config.router),
    "n_shared_experts": config.shared_ffw // config.expert_ffw,
    **_FIXED,
  }


_FAMILY = Family(
  name="deepseek_v3",
  abstract=abstract,
  forward=functools.partial(moe_decoder.forward, _expanded),
  forward_routed=functools.partial(moe_decoder.forward_routed, _expanded),
  unembedding=decoder.unembedding,
  init_cache=init_cache,
  decode=functools.partial(moe_decoder.decode, _absorbed),
  rules=rules,
  to_hf=to_hf,
  units=units,
)
