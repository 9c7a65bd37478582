"""The pre-norm decoder that Qwen3.5 and Qwen3.6 are: layers of the gated delta rule, and between
them layers of gated attention; an MLP or a mixture of experts in each.

The order repeats after a few layers, and one repetition is the body of the scan over layers. Norms
multiply by 1 + weight, but for that of what the delta rule reads.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import attention, decoder, layers, moe
from agentrl_jax.models.delta_net import DeltaNet, Remember, delta_net, remember_cache, remember_row
from agentrl_jax.models.layers import Matmul, Mix, RopeScaling, Rotation
from agentrl_jax.models.model import Rule, param, unstack
from agentrl_jax.models.remat import Remat, save_everything

# For each layer in order: keys and values, or channels [rows, C, X-1] and memory [rows, J*R, P, V].
HybridCache = tuple[tuple[Any, Any], ...]
MixTokens = Callable[[Any, Array], tuple[Array, Any]]  # (layer, x [B T D]) -> ([B T D], kept)


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one model."""

  vocab_size: int
  embed: int
  ffw: int  # of the MLP, or of the shared expert where there are experts
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  max_position: int
  linear: tuple[bool, ...]  # for each layer, whether it is one of the delta rule
  key_heads: int  # of the delta rule, as are the next four
  value_heads: int
  key_dim: int
  value_dim: int
  taps: int  # of the short convolution
  rotary_dim: int
  experts: int = 0
  expert_ffw: int = 0
  router: moe.Softmax | None = None  # None where there are no experts
  load_balance: float = 0.0
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  tied: bool = False
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None

  @property
  def period(self) -> int:
    """The fewest layers after which their order repeats."""
    return next(
      size
      for size in range(1, self.layers + 1)
      if self.layers % size == 0 and self.linear == self.linear[:size] * (self.layers // size)
    )


@flax.struct.dataclass
class Layer:
  """Of one kind; what it does not have is None."""

  mix_norm: Float[Array, "D"]
  delta: DeltaNet | None
  attention: layers.Attention | None  # its query holds each head's gate after its query
  mlp_norm: Float[Array, "D"]
  mlp: layers.MLP | None
  moe: moe.MoE | None


@flax.struct.dataclass
class HybridWeights:
  """Two stacks of `Layer`, each with a leading axis of its own layers (or a tuple, see
  `model.unstack`); None where there are none of a kind.
  """

  embedding: Float[Array, "V D"]
  linear_layers: Any
  layers: Any
  final_norm: Float[Array, "D"]
  unembedding: Float[Array, "D V"] | None  # None where tied


def abstract(config: Config) -> HybridWeights:
  def stack(linear: bool) -> Layer | None:
    depth = config.linear.count(linear)
    return _layer_specs(config, depth, linear) if depth else None

  outer = decoder.around(config, stack(False), norm=layers.zeros)
  return HybridWeights(linear_layers=stack(True), **vars(outer))


def _layer_specs(config: Config, depth: int, linear: bool) -> Layer:
  norm = param((depth, config.embed), ("layers", None), layers.zeros)
  experts = mlp = None
  if config.router is None:
    mlp = layers.MLP.abstract(depth, config.embed, config.ffw)
  else:
    experts = moe.MoE.abstract(
      depth,
      config.embed,
      config.expert_ffw,
      experts=config.experts,
      shared_ffw=config.ffw,
      router=config.router,
      gated=True,
    )
  return Layer(
    mix_norm=norm,
    delta=DeltaNet.abstract(config, depth) if linear else None,
    attention=None if linear else _attention_specs(config, depth),
    mlp_norm=norm,
    mlp=mlp,
    moe=experts,
  )


def _attention_specs(config: Config, depth: int) -> layers.Attention:
  sizes = config.heads, config.kv_heads, config.head_dim
  specs = layers.Attention.abstract(depth, config.embed, *sizes, norm=layers.zeros)
  both = (depth, config.embed, config.heads * 2 * config.head_dim)
  query = param(both, ("layers", "embed", "heads"), layers.scaled_normal)
  return dataclasses.replace(specs, query=query)


def units(config: Config) -> Mapping[str, int]:
  """A head is not cut."""
  return {**decoder.units(config), "value_heads": config.value_heads}


def _gated_attention(
  config: Config, by: Rotation, mix: Mix, matmul: Matmul, layer: Layer, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T D"], Any]:
  """Grouped-query attention whose mixed values are weighted by a gate before the output."""
  weights, norm = layer.attention, _norm(config)
  assert weights is not None and weights.query_norm is not None and weights.key_norm is not None
  both = matmul(x, weights.query).reshape(*x.shape[:-1], config.heads, -1)
  query, gate = jnp.split(both, 2, axis=-1)
  heads = *x.shape[:-1], config.kv_heads, config.head_dim
  key, value = (matmul(x, w).reshape(heads) for w in (weights.key, weights.value))
  query, key = norm(query, weights.query_norm), norm(key, weights.key_norm)
  mixed, kept = mix(layers.rotate(query, by), layers.rotate(key, by), value)
  mixed = mixed * jax.nn.sigmoid(gate)
  return matmul(mixed.reshape(*x.shape[:-1], -1), weights.output), kept


def _norm(config: Config) -> layers.Norm:
  return functools.partial(layers.zero_centred_norm, epsilon=config.norm_epsilon)


def _block(
  config: Config,
  layer: Layer,
  x: Float[Array, "B T D"],
  mix: MixTokens,
  real: Bool[Array, "B T"],
  told: Int[Array, "B T K"] | None,
  experts: moe.ComputeExperts,
  matmul: Matmul,
) -> tuple[Float[Array, "B T D"], Any, Any]:
  """One layer: x after it, what `mix` kept, and what its router did (None without one)."""
  norm = _norm(config)
  with jax.named_scope("delta_net" if layer.attention is None else "attention"):
    mixed, kept = mix(layer, norm(x, layer.mix_norm))
    x = x + mixed
  normed = norm(x, layer.mlp_norm)
  if layer.mlp is not None:
    with jax.named_scope("mlp"):
      return x + layers.mlp(layer.mlp, normed, matmul=matmul), kept, None
  assert layer.moe is not None and config.router is not None
  with jax.named_scope("moe"):
    mixed, did = moe.moe(
      config.router, layer.moe, normed, real, told, compute=experts, matmul=matmul
    )
  return x + mixed, kept, did


def _mixers(
  config: Config, by: Rotation, mix: Mix, remember: Remember, matmul: Matmul
) -> dict[bool, MixTokens]:
  """By whether the layer is one of the delta rule."""

  def linear(layer: Layer, x: Array) -> tuple[Array, Any]:
    assert layer.delta is not None
    return delta_net(config, layer.delta, x, remember, matmul)

  return {True: linear, False: functools.partial(_gated_attention, config, by, mix, matmul)}


def _rotation(config: Config, position: Int[Array, "B T"]) -> Rotation:
  return layers.rotation(position, config.rotary_dim, config.rope_theta, config.rope_scaling)


def forward_routed(
  config: Config,
  weights: HybridWeights,
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
  matmul: Matmul = layers.matmul,
) -> tuple[Float[Array, "B T D"], moe.Routing | None]:
  """See `Model.forward_routed`. Of a row's streams that others continue, each lies directly before
  the first of these, and none before the last of another's.
  """

  def mix(query: Array, key: Array, value: Array) -> tuple[Array, None]:
    return attend_rows(query, key, value, sample, parent, None), None

  remember = functools.partial(remember_row, config, sample, parent)
  mixers = _mixers(config, _rotation(config, position), mix, remember, matmul)

  def body(linear: bool, x: Array, inputs: tuple[Layer, Array | None]) -> tuple[Array, Any]:
    layer, told = inputs
    x, _, did = _block(config, layer, x, mixers[linear], sample >= 0, told, experts, matmul)
    return x, did

  bodies = {linear: remat(functools.partial(body, linear)) for linear in (True, False)}

  def repetition(x: Array, inputs: tuple[Any, Any, Array | None]) -> tuple[Array, Any]:
    linear, full, told = inputs
    each, did = _in_order(config.linear[: config.period], linear, full), []
    for place, (is_linear, layer) in enumerate(each):
      x, done = bodies[is_linear](x, (layer, None if told is None else told[place]))
      did.append(done)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *did)

  def folded(stack: Any) -> Any:
    count = config.layers // config.period
    return jax.tree.map(lambda w: w.reshape(count, -1, *w.shape[1:]), stack)

  told = None if replay is None else jnp.moveaxis(replay, 2, 0)
  inputs = folded((weights.linear_layers, weights.layers, told))
  x, did = jax.lax.scan(repetition, weights.embedding[tokens].astype(dtype), inputs)
  hidden = _norm(config)(x, weights.final_norm)
  if did is None:
    return hidden, None
  sums, expert = jax.tree.map(lambda part: part.reshape(config.layers, *part.shape[2:]), did)
  return hidden, moe.Routing(sums=sums, expert=jnp.moveaxis(expert, 0, 2))


def _in_order(kinds: tuple[bool, ...], linear: Any, full: Any) -> list[tuple[bool, Layer]]:
  """The layers of two stacks in the model's order, with whether each is one of the delta rule."""

  def split(stack: Any) -> Iterator[Layer]:
    leaves, tree = jax.tree.flatten(stack)
    # Unlike that of an index, the gradient of a split is one concatenation.
    parts = [jnp.split(leaf, len(leaf)) for leaf in leaves]
    return (tree.unflatten([part[0] for part in each]) for each in zip(*parts, strict=True))

  stacks = {True: split(linear), False: split(full)}
  return [(kind, next(stacks[kind])) for kind in kinds]


def forward(*arguments: Any, **options: Any) -> Float[Array, "B T D"]:
  """See `Model.forward`."""
  return forward_routed(*arguments, **options)[0]


def init_cache(config: Config, rows: int, length: int, dtype: Any) -> HybridCache:
  """Of FP8 are keys and values alone: the others are small, and carried along a whole row."""
  keys = rows, config.kv_heads, config.head_dim, length
  values = rows, config.kv_heads, length, config.head_dim
  channels = rows, 2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim
  memory = rows, config.value_heads, config.key_dim, config.value_dim
  wide = jnp.float32 if dtype == jnp.float8_e4m3fn else dtype

  def empty(linear: bool) -> tuple[attention.Cached, attention.Cached]:
    if linear:
      return jnp.zeros((*channels, config.taps - 1), wide), jnp.zeros(memory, jnp.float32)
    return attention.empty_cache(keys, values, dtype)

  return tuple(empty(linear) for linear in config.linear)


def decode(
  config: Config,
  weights: HybridWeights,
  cache: HybridCache,
  tokens: Int[Array, "B N"],
  position: Int[Array, "B N"],
  *,
  experts: moe.ComputeExperts = moe.compute_experts,
  dtype: Any = jnp.float32,
  matmul: Matmul = layers.matmul,
) -> tuple[Float[Array, "B N D"], HybridCache]:
  """See `Model.decode`; a row has `whole_prefixes`."""
  by = _rotation(config, jnp.maximum(position, 0))
  each = unstack(weights)
  stacks = {True: iter(each.linear_layers), False: iter(each.layers)}
  x, updated = weights.embedding[tokens].astype(dtype), []
  for linear, of_layer in zip(config.linear, cache, strict=True):
    remember = functools.partial(remember_cache, config, position, of_layer)

    def run(layer: Layer, x: Array, mix: Mix, linear: bool = linear, remember: Remember = remember):
      mixer = _mixers(config, by, mix, remember, matmul)[linear]
      return _block(config, layer, x, mixer, position >= 0, None, experts, matmul)[:2]

    layer = next(stacks[linear])
    if linear:
      x, kept = run(layer, x, _no_mix)
    else:
      x, (kept,) = decoder.decode_layers(run, [layer], (of_layer,), x, position)
    updated.append(kept)
  return _norm(config)(x, weights.final_norm), tuple(updated)


def _no_mix(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
  raise AssertionError("a layer of the delta rule mixes no keys and values")


_VECTORS = {
  *("mix_norm", "mlp_norm", "query_norm", "key_norm", "norm", "decay_log", "decay_bias"),
}  # fmt: skip
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_DELTA_RULES = {
  "linear_attn.in_proj_qkv.weight": "mixed",
  "linear_attn.in_proj_z.weight": "gate",
  "linear_attn.in_proj_a.weight": "decay",
  "linear_attn.in_proj_b.weight": "strength",
  "linear_attn.conv1d.weight": "taps",
  "linear_attn.A_log": "decay_log",
  "linear_attn.dt_bias": "decay_bias",
  "linear_attn.norm.weight": "norm",
  "linear_attn.out_proj.weight": "output",
}


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of a Hugging Face checkpoint of the text model."""
  shared = {
    "input_layernorm.weight": ("mix_norm",),
    "post_attention_layernorm.weight": ("mlp_norm",),
  }
  shared |= decoder.MLP_RULES if config.router is None else _moe_rules()
  linear = {name: ("delta", field) for name, field in _DELTA_RULES.items()}
  full = decoder.attention_rules(query_key_norm=True)
  return decoder.rules_around(
    config,
    (
      *_layer_rules(config, "linear_layers", True, shared | linear),
      *_layer_rules(config, "layers", False, shared | full),
    ),
  )


def _moe_rules() -> dict[str, tuple[str, ...]]:
  routed: dict[str, tuple[str, ...]] = {
    "mlp.gate.weight": ("moe", "router"),
    "mlp.shared_expert_gate.weight": ("moe", "shared_gate"),
  }
  for theirs, ours in _MATRICES.items():
    routed[f"mlp.experts.{{expert}}.{theirs}.weight"] = ("moe", "experts", ours)
    routed[f"mlp.shared_expert.{theirs}.weight"] = ("moe", "shared", ours)
  return routed


def _layer_rules(
  config: Config, stack: str, linear: bool, places: Mapping[str, tuple[str, ...]]
) -> tuple[Rule, ...]:
  numbers = tuple(number for number, kind in enumerate(config.linear) if kind == linear)

  def rule(name: str, path: tuple[str, ...]) -> Rule:
    field = path[-1]
    perm = (2, 1, 0) if field == "taps" else (0,) if field in _VECTORS else (1, 0)
    return Rule(
      "model.layers.{layer}." + name,
      (stack, *path),
      perm,
      numbers=numbers,
      float32=field == "decay_log",
    )

  return tuple(rule(name, path) for name, path in places.items()) if numbers else ()
