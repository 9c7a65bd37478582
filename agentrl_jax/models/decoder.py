"""The pre-norm decoder that Llama, Qwen2 and Qwen3 are, and the parts of it that other families
share.

Its layers add attention(norm(x)) and mlp(norm(x)) to x. Families differ in what their weights hold
(biases, query and key norms), which `abstract` and `rules` are told and the rest sees in the tree.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.models import attention, layers
from agentrl_jax.models.layers import RopeScaling
from agentrl_jax.models.model import Rule, param, unstack
from agentrl_jax.models.remat import Remat, save_everything

# A pair for each layer, keys [rows, K, H, length] and values [rows, K, length, H].
KeyValueCache = tuple[tuple[attention.Cached, attention.Cached], ...]


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
class DecoderWeights:
  """`layers` is stacked: each of its arrays has a leading layer axis (or is a tuple, see
  `model.unstack`).
  """

  embedding: Float[Array, "V D"]
  layers: Any  # of `Layer`, or of another family's
  final_norm: Float[Array, "D"]
  unembedding: Float[Array, "D V"] | None  # None where tied


def _embedding_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def abstract(config: Config, *, bias: bool = False, query_key_norm: bool = False) -> DecoderWeights:
  """Specs of the weights.

  Args:
    bias: whether queries, keys and values have one.
    query_key_norm: whether each head's query and key are normalised.
  """
  depth = config.layers
  norm = param((depth, config.embed), ("layers", None), layers.ones)
  return around(
    config,
    Layer(
      attention_norm=norm,
      attention=layers.Attention.abstract(
        depth,
        config.embed,
        config.heads,
        config.kv_heads,
        config.head_dim,
        bias=bias,
        norm=layers.ones if query_key_norm else None,
      ),
      mlp_norm=norm,
      mlp=layers.MLP.abstract(depth, config.embed, config.ffw),
    ),
  )


def around(config: Any, stacked: Any, *, norm: Any = layers.ones) -> DecoderWeights:
  """Specs of the layers' together with embedding, final norm (which starts from `norm`) and head.

  Args:
    config: any family's, with `embed`, `vocab_size` and `tied`.
  """
  embed, vocab = config.embed, config.vocab_size
  head = None if config.tied else param((embed, vocab), ("embed", "vocab"), layers.scaled_normal)
  return DecoderWeights(
    embedding=param((vocab, embed), ("vocab", "embed"), _embedding_init),
    layers=stacked,
    final_norm=param((embed,), (None,), norm),
    unembedding=head,
  )


def units(config: Any) -> Mapping[str, int]:
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
  norm = functools.partial(layers.rms_norm, epsilon=config.norm_epsilon)
  with jax.named_scope("attention"):
    mixed, kept = layers.attention(
      layer.attention,
      norm(x, layer.attention_norm),
      by,
      mix,
      head_dim=config.head_dim,
      matmul=matmul,
      norm=norm,
    )
    x = x + mixed
  with jax.named_scope("mlp"):
    return x + layers.mlp(layer.mlp, norm(x, layer.mlp_norm), matmul=matmul), kept


def _rotation(config: Config, position: Int[Array, "B T"]) -> layers.Rotation:
  return layers.rotation(position, config.head_dim, config.rope_theta, config.rope_scaling)


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
  """See `Model.forward`."""
  by = _rotation(config, position)

  def mix(query: Array, key: Array, value: Array) -> tuple[Array, None]:
    return attend_rows(query, key, value, sample, parent, None), None

  def body(x: Array, layer: Layer) -> tuple[Array, None]:
    return _block(config, layer, x, by, mix, matmul)

  x = weights.embedding[tokens].astype(dtype)
  x, _ = jax.lax.scan(remat(body), x, weights.layers)
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon)


def unembedding(config: Any, weights: DecoderWeights) -> Float[Array, "D V"]:
  if config.tied:
    return weights.embedding.T
  assert weights.unembedding is not None
  return weights.unembedding


def init_cache(config: Any, rows: int, length: int, dtype: Any) -> KeyValueCache:
  keys = rows, config.kv_heads, config.head_dim, length
  values = rows, config.kv_heads, length, config.head_dim
  return tuple(attention.empty_cache(keys, values, dtype) for _ in range(config.layers))


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
  """See `Model.decode`."""
  by = _rotation(config, jnp.maximum(position, 0))

  def run(layer: Layer, x: Array, mix: layers.Mix) -> tuple[Array, Any]:
    return _block(config, layer, x, by, mix, matmul)

  x = weights.embedding[tokens].astype(dtype)
  x, cache = decode_layers(run, unstack(weights).layers, cache, x, position)
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon), cache


def decode_layers(
  run: Callable[[Any, Array, layers.Mix], tuple[Array, Any]],
  unstacked: Iterable[Any],
  cache: KeyValueCache,
  x: Float[Array, "B N D"],
  position: Int[Array, "B N"],
  windows: Sequence[int | None] | None = None,
) -> tuple[Float[Array, "B N D"], KeyValueCache]:
  """Applies `run(layer, x, mix)` layer by layer, where `mix` writes to the layer's cache and
  attends to it, as far back as the layer's window reaches.

  Layers are unrolled: caches threaded through a scan would be copied every step.
  """

  def cached(keys: attention.Cached, values: attention.Cached, window: int | None) -> layers.Mix:
    def mix(
      query: Array, key: Array, value: Array
    ) -> tuple[Array, tuple[attention.Cached, attention.Cached]]:
      kept = (
        attention.write_keys(keys, key, position),
        attention.write_values(values, value, position),
      )
      return attention.attend_cache(query, *kept, position, window), kept

    return mix

  windows = windows or [None] * len(cache)
  updated = []
  for layer, of_layer, window in zip(unstacked, cache, windows, strict=True):
    x, kept = run(layer, x, cached(*of_layer, window))
    updated.append(kept)
  return x, tuple(updated)


MLP_RULES = {
  "mlp.gate_proj.weight": ("mlp", "gate"),
  "mlp.up_proj.weight": ("mlp", "up"),
  "mlp.down_proj.weight": ("mlp", "down"),
}


def rules(config: Config, *, bias: bool = False, query_key_norm: bool = False) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face checkpoint; arguments as of `abstract`."""
  places = attention_rules(bias=bias, query_key_norm=query_key_norm) | MLP_RULES
  places |= {
    "input_layernorm.weight": ("attention_norm",),
    "post_attention_layernorm.weight": ("mlp_norm",),
  }
  return rules_around(config, layer_rules(places))


def attention_rules(
  *, bias: bool = False, query_key_norm: bool = False
) -> dict[str, tuple[str, ...]]:
  """Where the tensors of a layer's `self_attn` lie in the layer."""
  projections = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
  places = {f"{theirs}.weight": ours for theirs, ours in projections.items()}
  if bias:
    places |= {f"{t}.bias": f"{ours}_bias" for t, ours in projections.items() if ours != "output"}
  if query_key_norm:
    places |= {"q_norm.weight": "query_norm", "k_norm.weight": "key_norm"}
  return {f"self_attn.{name}": ("attention", field) for name, field in places.items()}


def layer_rules(places: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
  """Rules for tensors of each layer by name: projections are transposed, vectors are not."""
  return tuple(
    Rule(
      "model.layers.{layer}." + name,
      ("layers", *path),
      (1, 0) if name.endswith("_proj.weight") else (0,),
    )
    for name, path in places.items()
  )


def rules_around(config: Any, of_layers: Iterable[Rule]) -> tuple[Rule, ...]:
  """With those of embedding, final norm and head; a tied head has no tensor of its own."""
  head = () if config.tied else (Rule("lm_head.weight", ("unembedding",), (1, 0)),)
  return (
    Rule("model.embed_tokens.weight", ("embedding",), (0, 1)),
    *of_layers,
    Rule("model.norm.weight", ("final_norm",), (0,)),
    *head,
  )
