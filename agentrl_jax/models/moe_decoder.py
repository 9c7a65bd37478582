"""The pre-norm decoder whose layers, after a few dense ones, have a mixture of experts for an MLP.

Families differ in their attention, which the functions here are given first, and in their router.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import attention, decoder, hf_config, layers, moe
from agentrl_jax.models.decoder import KeyValueCache, Remat, save_everything
from agentrl_jax.models.layers import Mix, RopeScaling, Rotation
from agentrl_jax.models.model import Rule, param, unstack


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one model with grouped-query attention."""

  vocab_size: int
  embed: int
  ffw: int  # of the dense layers' MLP
  layers: int  # all of them
  heads: int
  kv_heads: int
  head_dim: int
  max_position: int
  experts: int
  expert_ffw: int
  router: moe.Router
  dense_layers: int = 0  # the first so many have an MLP
  shared_ffw: int = 0  # hidden width of the shared experts together
  rotary_dim: int | None = None  # dimensions of a head that are rotated; all by default
  bias: bool = False  # of queries, keys and values
  query_key_norm: bool = False
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  tied: bool = False
  load_balance: float = 0.0  # coefficient of the load-balance loss in the model's own training
  extra_layers: int = 0  # that predict further tokens; not part of the model, passed over in files
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None

  @property
  def prediction_layers(self) -> range:
    return range(self.layers, self.layers + self.extra_layers)


@flax.struct.dataclass
class DenseLayer:
  attention_norm: Float[Array, "D"]
  attention: Any
  mlp_norm: Float[Array, "D"]
  mlp: layers.MLP


@flax.struct.dataclass
class RoutedLayer:
  attention_norm: Float[Array, "D"]
  attention: Any
  mlp_norm: Float[Array, "D"]
  moe: moe.MoE


@flax.struct.dataclass
class MoEWeights:
  """`dense_layers` come first; each stack has a leading layer axis (or is a tuple, see
  `model.unstack`).
  """

  embedding: Float[Array, "V D"]
  dense_layers: Any  # of DenseLayer; None where there are none
  layers: Any  # of RoutedLayer
  final_norm: Float[Array, "D"]
  unembedding: Float[Array, "D V"] | None  # None where tied


# (config, weights, x [B T D] normalised, rotation, mix, matmul) -> ([B T D], what `mix` kept)
Attend = Callable[[Any, Any, Array, Rotation, Mix, layers.Matmul], tuple[Array, Any]]


def abstract(config: Any, attention: Callable[[int], Any]) -> MoEWeights:
  """Specs of the weights; `attention(depth)` gives those of so many layers."""
  routed, dense = config.layers - config.dense_layers, config.dense_layers
  embed = config.embed

  def around(depth: int) -> dict[str, Any]:
    norm = param((depth, embed), ("layers", None), layers.ones)
    return {"attention_norm": norm, "attention": attention(depth), "mlp_norm": norm}

  experts = moe.MoE.abstract(
    routed,
    embed,
    config.expert_ffw,
    experts=config.experts,
    shared_ffw=config.shared_ffw,
    router=config.router,
  )
  outer = decoder.around(config, RoutedLayer(moe=experts, **around(routed)))
  first = DenseLayer(mlp=layers.MLP.abstract(dense, embed, config.ffw), **around(dense))
  return MoEWeights(dense_layers=first if dense else None, **vars(outer))


def _half(
  attend: Attend,
  config: Any,
  layer: Any,
  x: Float[Array, "B T D"],
  by: Rotation,
  mix: Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Array, Any]:
  """x after attention, the same normalised for the second half of the layer, and what mix kept."""
  norm = functools.partial(layers.rms_norm, epsilon=config.norm_epsilon)
  with jax.named_scope("attention"):
    mixed, kept = attend(config, layer.attention, norm(x, layer.attention_norm), by, mix, matmul)
    x = x + mixed
  return x, norm(x, layer.mlp_norm), kept


def rotation(config: Any, position: Int[Array, "B T"]) -> Rotation:
  width = config.rotary_dim or config.head_dim
  return layers.rotation(position, width, config.rope_theta, config.rope_scaling)


def forward_routed(
  attend: Attend,
  config: Any,
  weights: MoEWeights,
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  position: Int[Array, "B T"],
  *,
  parent: Int[Array, "B T"] | None = None,
  replay: Int[Array, "B T L K"] | None = None,
  experts: moe.ComputeExperts = moe.compute_experts,
  dtype: Any = jnp.float32,
  remat: Remat = save_everything,
  attend_rows: attention.AttendRows = attention.attend,
  matmul: layers.Matmul = layers.matmul,
) -> tuple[Float[Array, "B T D"], moe.Routing]:
  """See `Model.forward_routed`."""
  by = rotation(config, position)

  def mix(query: Array, key: Array, value: Array) -> tuple[Array, None]:
    return attend_rows(query, key, value, sample, parent, None), None

  def dense(x: Array, layer: DenseLayer) -> tuple[Array, None]:
    x, normed, _ = _half(attend, config, layer, x, by, mix, matmul)
    return x + layers.mlp(layer.mlp, normed, matmul=matmul), None

  def routed(x: Array, inputs: tuple[RoutedLayer, Array | None]) -> tuple[Array, Any]:
    layer, told = inputs
    x, normed, _ = _half(attend, config, layer, x, by, mix, matmul)
    with jax.named_scope("moe"):
      mixed, did = moe.moe(
        config.router, layer.moe, normed, sample >= 0, told, compute=experts, matmul=matmul
      )
    return x + mixed, did

  x = weights.embedding[tokens].astype(dtype)
  if weights.dense_layers is not None:
    x, _ = jax.lax.scan(remat(dense), x, weights.dense_layers)
  told = None if replay is None else jnp.moveaxis(replay, 2, 0)
  x, (sums, expert) = jax.lax.scan(remat(routed), x, (weights.layers, told))
  routing = moe.Routing(sums=sums, expert=jnp.moveaxis(expert, 0, 2))
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon), routing


def forward(attend: Attend, *arguments: Any, **options: Any) -> Float[Array, "B T D"]:
  """See `Model.forward`."""
  return forward_routed(attend, *arguments, **options)[0]


def decode(
  attend: Attend,
  config: Any,
  weights: MoEWeights,
  cache: KeyValueCache,
  tokens: Int[Array, "B N"],
  position: Int[Array, "B N"],
  *,
  experts: moe.ComputeExperts = moe.compute_experts,
  dtype: Any = jnp.float32,
  matmul: layers.Matmul = layers.matmul,
) -> tuple[Float[Array, "B N D"], KeyValueCache]:
  """See `Model.decode`."""
  real: Bool[Array, "B N"] = position >= 0
  by = rotation(config, jnp.maximum(position, 0))

  def run(layer: DenseLayer | RoutedLayer, x: Array, mix: Mix) -> tuple[Array, Any]:
    x, normed, kept = _half(attend, config, layer, x, by, mix, matmul)
    if isinstance(layer, DenseLayer):
      return x + layers.mlp(layer.mlp, normed, matmul=matmul), kept
    mixed, _ = moe.moe(config.router, layer.moe, normed, real, None, compute=experts, matmul=matmul)
    return x + mixed, kept

  x = weights.embedding[tokens].astype(dtype)
  each = unstack(weights)
  x, cache = decoder.decode_layers(run, (*each.dense_layers, *each.layers), cache, x, position)
  return layers.rms_norm(x, weights.final_norm, config.norm_epsilon), cache


def grouped_query(
  config: Config,
  weights: layers.Attention,
  x: Float[Array, "B T D"],
  by: Rotation,
  mix: Mix,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  """The attention of `Config`."""
  norm = functools.partial(layers.rms_norm, epsilon=config.norm_epsilon)
  return layers.attention(weights, x, by, mix, head_dim=config.head_dim, matmul=matmul, norm=norm)


def abstract_grouped_query(config: Config) -> MoEWeights:
  def specs(depth: int) -> layers.Attention:
    return layers.Attention.abstract(
      depth,
      config.embed,
      config.heads,
      config.kv_heads,
      config.head_dim,
      bias=config.bias,
      norm=layers.ones if config.query_key_norm else None,
    )

  return abstract(config, specs)


def rules_grouped_query(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face checkpoint."""
  places = decoder.attention_rules(bias=config.bias, query_key_norm=config.query_key_norm)
  return rules(config, places)


def rules(config: Any, of_attention: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face checkpoint, given where those of a layer's attention lie."""
  places = dict(of_attention) | {
    "input_layernorm.weight": ("attention_norm",),
    "post_attention_layernorm.weight": ("mlp_norm",),
  }
  matrices = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
  routed = {"mlp.gate.weight": ("moe", "router")}
  routed |= {
    f"mlp.experts.{{expert}}.{theirs}.weight": ("moe", "experts", ours)
    for theirs, ours in matrices.items()
  }
  if config.shared_ffw:
    routed |= {
      f"mlp.shared_experts.{theirs}.weight": ("moe", "shared", ours)
      for theirs, ours in matrices.items()
    }
  if isinstance(config.router, moe.Sigmoid):
    routed |= {"mlp.gate.e_score_correction_bias": ("moe", "correction")}
  found = _layer_rules(places | routed, "layers", config.dense_layers)
  if config.dense_layers:
    found = _layer_rules(places | decoder.MLP_RULES, "dense_layers", 0) + found
  return decoder.rules_around(config, found)


def _layer_rules(
  places: Mapping[str, tuple[str, ...]], stack: str, first_layer: int
) -> tuple[Rule, ...]:
  def rule(name: str, path: tuple[str, ...]) -> Rule:
    matrix = name.endswith(("proj.weight", "proj_with_mqa.weight", "mlp.gate.weight"))
    return Rule(
      "model.layers.{layer}." + name,
      (stack, *path),
      (1, 0) if matrix else (0,),
      first_layer,
      float32=name.endswith("e_score_correction_bias"),
    )

  return tuple(rule(name, path) for name, path in places.items())


SIGMOID_FIELDS = {  # of a config.json, by the name of ours
  "n_group": "groups",
  "norm_topk_prob": "normalized",
  "num_experts_per_tok": "experts_per_token",
  "routed_scaling_factor": "scale",
  "topk_group": "groups_kept",
}


def require_counts(fields: Mapping[str, Any]) -> None:
  """Raises ValueError for what counts layers, experts or groups and cannot, by name."""
  positive = ("moe_intermediate_size", "n_group", "n_routed_experts", "num_experts_per_tok")
  hf_config.require_counts(fields, (*positive, "topk_group"))
  others = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")
  hf_config.require_counts(fields, others, least=0)
  dense, count = fields["first_k_dense_replace"], fields["num_hidden_layers"]
  if dense > count:
    raise ValueError(f"first_k_dense_replace={dense} exceeds num_hidden_layers={count}")


def read_sigmoid(fields: Mapping[str, Any]) -> moe.Sigmoid:
  """The router that a `config.json` describes.

  Raises:
    ValueError: experts that do not divide into the groups, groups of one expert where some are
      left out, or more groups or experts a token than there are.
  """
  router = moe.Sigmoid(**{ours: fields[name] for name, ours in SIGMOID_FIELDS.items()})
  experts, groups = fields["n_routed_experts"], router.groups
  if experts % groups:
    raise ValueError(f"n_routed_experts={experts} is no multiple of n_group={groups}")
  if router.groups_kept > groups or (router.groups_kept < groups == experts):
    raise ValueError(
      f"topk_group={router.groups_kept} of n_group={groups} with n_routed_experts={experts}: "
      "expected as many at most, and two experts a group where some are left out"
    )
  if router.experts_per_token > experts // groups * router.groups_kept:
    raise ValueError(
      f"num_experts_per_tok={router.experts_per_token} exceeds the experts of "
      f"topk_group={router.groups_kept} groups of {experts // groups}"
    )
  return router


def write_sigmoid(router: moe.Router) -> dict[str, Any]:
  """The inverse of `read_sigmoid`."""
  assert isinstance(router, moe.Sigmoid)
  return {name: getattr(router, ours) for name, ours in SIGMOID_FIELDS.items()}
