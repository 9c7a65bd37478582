"""The decoder that DeepSeek V4 is: attention over a window and compressed blocks, experts chosen by
token in the first layers and by score afterwards, and a residual of several streams.

A layer is two halves, attention and experts, whose kinds change independently; each kind is a stack
of its own.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import (
  attention,
  compressed_attention,
  decoder,
  hyper,
  layers,
  moe,
)
from agentrl_jax.models.compressed_attention import Attention, Compressor, Indexer, Sight
from agentrl_jax.models.layers import Matmul, RopeScaling
from agentrl_jax.models.model import Initializer, param, unstack
from agentrl_jax.models.remat import Remat, save_everything

WINDOW, SPARSE, HEAVY = "window", "sparse", "heavy"  # attention: no blocks, indexed ones, long ones
HASHED, ROUTED = "hashed", "routed"  # experts: by token, by score
STACKS = {  # of the weights, by what they hold
  WINDOW: "window_layers", SPARSE: "sparse_layers", HEAVY: "heavy_layers",
  HASHED: "hash_layers", ROUTED: "layers",
}  # fmt: skip

V4Cache = tuple[compressed_attention.Held, ...]  # for each layer in order
Order = tuple[tuple[str, str], ...]  # for each layer, the kinds of its attention and its experts


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and constants of one model."""

  vocab_size: int
  embed: int
  layers: int
  heads: int
  head_dim: int
  max_position: int
  order: Order
  window: int  # positions that attention sees one by one
  sparse_block: int  # positions compressed to one key, in layers with an indexer
  heavy_block: int  # and in those without
  index_heads: int
  index_dim: int
  index_kept: int  # blocks that the indexer leaves to a query
  rotary_dim: int  # the last so many dimensions of a head
  query_latent: int
  groups: int  # of heads, in the output projection
  group_latent: int
  streams: int  # of the residual
  sinkhorn_steps: int
  mix_epsilon: float
  experts: int
  expert_ffw: int
  router: moe.RootSoftplus
  limit: float  # of what experts activate
  rope_theta: float = 10000.0  # of layers that have no blocks
  block_rope_theta: float = 160000.0  # of those that have, as is the scaling
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  tied: bool = False
  extra_layers: int = 0  # that predict further tokens; not part of the model, passed over in files
  bos_token_id: int | None = None
  eos_token_id: int | tuple[int, ...] | None = None
  pad_token_id: int | None = None

  def sight(self, kind: str) -> Sight:
    """What a layer whose attention is of this kind sees."""
    return Sight(
      window=self.window,
      block={WINDOW: None, SPARSE: self.sparse_block, HEAVY: self.heavy_block}[kind],
      kept=self.index_kept if kind == SPARSE else None,
      rotary_dim=self.rotary_dim,
      rope_theta=self.rope_theta if kind == WINDOW else self.block_rope_theta,
      rope_scaling=None if kind == WINDOW else self.rope_scaling,
      norm_epsilon=self.norm_epsilon,
    )

  @property
  def mix(self) -> hyper.Constants:
    return hyper.Constants(self.sinkhorn_steps, self.mix_epsilon, self.norm_epsilon)

  def numbers(self, kind: str) -> tuple[int, ...]:
    """The layers that have a half of this kind."""
    return tuple(layer for layer, kinds in enumerate(self.order) if kind in kinds)


@flax.struct.dataclass
class AttentionHalf:
  mix: hyper.Connection
  norm: Float[Array, "D"]
  attention: Attention


@flax.struct.dataclass
class ExpertHalf:
  mix: hyper.Connection
  norm: Float[Array, "D"]
  table: Float[Array, "V K"] | None  # the experts of each token, where they are not chosen by score
  moe: moe.MoE


@flax.struct.dataclass
class V4Weights:
  """Stacks of halves by kind, each with a leading axis of its own layers (or a tuple, see
  `model.unstack`); None where there are none of a kind.
  """

  embedding: Float[Array, "V D"]
  window_layers: Any  # of AttentionHalf, as the next two
  sparse_layers: Any
  heavy_layers: Any
  hash_layers: Any  # of ExpertHalf
  layers: Any  # of ExpertHalf
  end: hyper.Connection
  final_norm: Float[Array, "D"]
  unembedding: Float[Array, "D V"] | None


def abstract(config: Config) -> V4Weights:
  def stack(kind: str) -> Any:
    depth = len(config.numbers(kind))
    specs = _expert_specs if kind in (HASHED, ROUTED) else _attention_specs
    return specs(config, depth, kind) if depth else None

  outer = vars(decoder.around(config, None))
  end = hyper.Connection.abstract_end(config.embed, config.streams)
  return V4Weights(**outer | {STACKS[kind]: stack(kind) for kind in STACKS}, end=end)


def _outside(config: Config, depth: int) -> dict[str, Any]:
  """What every half begins with."""
  norm = param((depth, config.embed), ("layers", None), layers.ones)
  return {"mix": hyper.Connection.abstract(depth, config.embed, config.streams), "norm": norm}


def _attention_specs(config: Config, depth: int, kind: str) -> AttentionHalf:
  """Latents are cut as `embed` is, as no other axis of these matrices could be."""
  embed, latent, groups = config.embed, config.query_latent, config.groups
  wide, narrow = config.heads * config.head_dim, groups * config.group_latent

  def spec(inputs: int, outputs: int, axes: tuple[str, str | None]) -> Any:
    return param((depth, inputs, outputs), ("layers", *axes), layers.scaled_normal)

  def norm(size: int) -> Any:
    return param((depth, size), ("layers", None), layers.ones)

  sight = config.sight(kind)
  compressor = indexer = None
  overlap = kind == SPARSE
  if sight.block is not None:
    compressor = Compressor.abstract(depth, embed, config.head_dim, sight.block, overlap=overlap)
    if overlap:
      indexer = Indexer(
        compressor=Compressor.abstract(depth, embed, config.index_dim, sight.block, overlap=True),
        query=spec(latent, config.index_heads * config.index_dim, ("embed", None)),
        weight=spec(embed, config.index_heads, ("embed", None)),
      )
  return AttentionHalf(
    attention=Attention(
      query_down=spec(embed, latent, ("embed", None)),
      query_norm=norm(latent),
      query=spec(latent, wide, ("embed", "heads")),
      key=spec(embed, config.head_dim, ("embed", None)),
      key_norm=norm(config.head_dim),
      sinks=param((depth, config.heads), ("layers", None), layers.zeros),
      group=spec(wide // groups, narrow, ("embed", "heads")),
      output=spec(narrow, embed, ("heads", "embed")),
      compressor=compressor,
      indexer=indexer,
    ),
    **_outside(config, depth),
  )


def _expert_specs(config: Config, depth: int, kind: str) -> ExpertHalf:
  table = None
  if kind == HASHED:
    shape = (depth, config.vocab_size, config.router.experts_per_token)
    table = param(shape, ("layers", "vocab", None), _in_turn(config.experts))
  experts = moe.MoE.abstract(
    depth,
    config.embed,
    config.expert_ffw,
    experts=config.experts,
    shared_ffw=config.expert_ffw,
    router=config.router,
    corrected=kind == ROUTED,
    limit=config.limit,
  )
  return ExpertHalf(table=table, moe=experts, **_outside(config, depth))


@functools.cache
def _in_turn(experts: int) -> Initializer:
  """A table that goes through all experts again and again."""

  def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    _, tokens, count = shape
    turn = jnp.arange(tokens * count).reshape(tokens, count) % experts
    return jnp.broadcast_to(turn, shape).astype(dtype)

  return init


def units(config: Config) -> Mapping[str, int]:
  """A group of heads is not cut."""
  return {"heads": config.groups}


def _attend(
  config: Config,
  kind: str,
  half: AttentionHalf,
  x: Float[Array, "B T S D"],
  see: compressed_attention.See,
  by: layers.Rotation,
  matmul: Matmul,
) -> tuple[Float[Array, "B T S D"], Any]:
  """The streams after a half of attention, and what `see` kept."""
  with jax.named_scope("attention"):
    inner, ways = hyper.enter(half.mix, x, config.mix)
    made, kept = compressed_attention.attention(
      half.attention,
      layers.wide_norm(inner, half.norm, config.norm_epsilon),
      by,
      see,
      heads=config.heads,
      groups=config.groups,
      norm_epsilon=config.norm_epsilon,
      matmul=matmul,
    )
    return hyper.leave(x, made, ways), kept


def _mix_experts(
  config: Config,
  half: ExpertHalf,
  x: Float[Array, "B T S D"],
  tokens: Int[Array, "B T"],
  real: Bool[Array, "B T"],
  told: Int[Array, "B T K"] | None,
  experts: moe.ComputeExperts,
  matmul: Matmul,
) -> tuple[Float[Array, "B T S D"], Any]:
  """The streams after a half of experts, and what its router did."""
  with jax.named_scope("moe"):
    if half.table is not None:
      told = jnp.round(half.table[tokens]).astype(jnp.int32)
    inner, ways = hyper.enter(half.mix, x, config.mix)
    normed = layers.wide_norm(inner, half.norm, config.norm_epsilon)
    made, did = moe.moe(config.router, half.moe, normed, real, told, compute=experts, matmul=matmul)
    return hyper.leave(x, made, ways), did


def _streams(config: Config, weights: V4Weights, tokens: Array, dtype: Any) -> Array:
  x = weights.embedding[tokens].astype(dtype)[:, :, None]
  return jnp.broadcast_to(x, (*x.shape[:2], config.streams, config.embed))


def _hidden(config: Config, weights: V4Weights, x: Float[Array, "B T S D"]) -> Array:
  joined = hyper.end(weights.end, x, config.mix)
  return layers.wide_norm(joined, weights.final_norm, config.norm_epsilon)


# (x [B T S D], the halves of a layer, of experts with its replay) -> (x, what its router did)
_Layer = Callable[[Array, tuple[AttentionHalf, tuple[ExpertHalf, Any]]], tuple[Array, Any]]


def forward_routed(
  config: Config,
  weights: V4Weights,
  tokens: Int[Array, "B T"],
  sample: Int[Array, "B T"],
  position: Int[Array, "B T"],
  *,
  replay: Int[Array, "B T L K"] | None = None,
  experts: moe.ComputeExperts = moe.compute_experts,
  dtype: Any = jnp.float32,
  remat: Remat = save_everything,
  attend_rows: attention.AttendRows = attention.attend,
  matmul: Matmul = layers.matmul,
) -> tuple[Float[Array, "B T D"], moe.Routing]:
  """See `Model.forward_routed`: L are the layers whose routers choose, those by token are not among
  them. Attention is the same whatever `attend_rows` is.
  """
  del attend_rows
  rotations = {kind: config.sight(kind).rotation(position) for kind in (WINDOW, SPARSE)}
  rotations[HEAVY] = rotations[SPARSE]

  def layer(
    kinds: tuple[str, str], x: Array, halves: tuple[AttentionHalf, tuple[ExpertHalf, Any]]
  ) -> tuple[Array, Any]:
    of_attention, (of_experts, told) = halves
    by = rotations[kinds[0]]
    see = functools.partial(
      compressed_attention.see_row, config.sight(kinds[0]), sample, position, by, matmul
    )
    x, _ = _attend(config, kinds[0], of_attention, x, see, by, matmul)
    x, did = _mix_experts(config, of_experts, x, tokens, sample >= 0, told, experts, matmul)
    return x, did if kinds[1] == ROUTED else None

  bodies = {kinds: remat(functools.partial(layer, kinds)) for kinds in set(config.order)}
  stacks = {kind: getattr(weights, name) for kind, name in STACKS.items()}
  told = None if replay is None else jnp.moveaxis(replay, 2, 0)
  stacks |= {HASHED: (stacks[HASHED], None), ROUTED: (stacks[ROUTED], told)}
  first, period = _folding(config.order)
  x = _streams(config, weights, tokens, dtype)
  x, did, rest = _run(bodies, config.order[:first], stacks, x)
  parts = [did]
  if period:
    order, count = config.order[first : first + period], (config.layers - first) // period

    def repetition(x: Array, stacks: Mapping[str, Any]) -> tuple[Array, Any]:
      x, did, _ = _run(bodies, order, stacks, x)
      return x, did

    used = {kind: stack for kind, stack in rest.items() if any(kind in kinds for kinds in order)}
    folded = jax.tree.map(lambda w: w.reshape(count, -1, *w.shape[1:]), used)
    x, did = jax.lax.scan(repetition, x, folded)
    parts.append(jax.tree.map(lambda made: made.reshape(-1, *made.shape[2:]), did))
  known = [part for part in parts if part is not None]
  sums, expert = jax.tree.map(lambda *made: jnp.concatenate(made), *known)
  routing = moe.Routing(sums=sums, expert=jnp.moveaxis(expert, 0, 2))
  return _hidden(config, weights, x), routing


def _folding(order: Order) -> tuple[int, int]:
  """(layers before the order repeats itself to the end, layers of one repetition), so that fewest
  are compiled; a repetition of 0 where there is none.
  """

  def repeats(first: int, size: int) -> bool:
    rest = order[first:]
    return len(rest) % size == 0 and rest == rest[:size] * (len(rest) // size)

  found = [
    (first, size)
    for first in range(len(order))
    for size in range(1, (len(order) - first) // 2 + 1)
    if repeats(first, size)
  ]
  return min(found, key=sum, default=(len(order), 0))


def _run(
  bodies: Mapping[tuple[str, str], _Layer], order: Order, stacks: Mapping[str, Any], x: Array
) -> tuple[Array, Any, dict[str, Any]]:
  """x after these layers, what their routers did (None where none chose), and the stacks without
  their halves.
  """
  count = collections.Counter(kind for kinds in order for kind in kinds)
  each, rest = {}, {}
  for kind, stack in stacks.items():
    leaves, tree = jax.tree.flatten(stack)
    # Unlike that of an index, the gradient of a split is one concatenation.
    parts = [jnp.split(leaf, [*range(1, count[kind] + 1)]) for leaf in leaves]
    each[kind] = iter([tree.unflatten([p[i][0] for p in parts]) for i in range(count[kind])])
    rest[kind] = tree.unflatten([p[-1] for p in parts])
  done = []
  for kinds in order:
    x, did = bodies[kinds](x, (next(each[kinds[0]]), next(each[kinds[1]])))
    done += [] if did is None else [did]
  return x, jax.tree.map(lambda *made: jnp.stack(made), *done) if done else None, rest


def forward(*arguments: Any, **options: Any) -> Float[Array, "B T D"]:
  """See `Model.forward`."""
  return forward_routed(*arguments, **options)[0]


def init_cache(config: Config, rows: int, length: int, dtype: Any) -> V4Cache:
  """Raises ValueError for an FP8 cache."""
  if dtype == jnp.float8_e4m3fn:
    raise ValueError("an FP8 cache is not supported for deepseek_v4, expected a wider dtype")
  return tuple(
    compressed_attention.empty_cache(
      config.sight(kind), rows, length, config.head_dim, config.index_dim, dtype
    )
    for kind, _ in config.order
  )


def decode(
  config: Config,
  weights: V4Weights,
  cache: V4Cache,
  tokens: Int[Array, "B N"],
  position: Int[Array, "B N"],
  *,
  experts: moe.ComputeExperts = moe.compute_experts,
  dtype: Any = jnp.float32,
  matmul: Matmul = layers.matmul,
) -> tuple[Float[Array, "B N D"], V4Cache]:
  """See `Model.decode`; a row has `whole_prefixes`."""
  each = unstack(weights)
  halves = {kind: iter(getattr(each, name)) for kind, name in STACKS.items()}
  x, updated = _streams(config, weights, tokens, dtype), []
  for (kind, second), held in zip(config.order, cache, strict=True):
    sight = config.sight(kind)
    by = sight.rotation(jnp.maximum(position, 0))
    see = functools.partial(compressed_attention.see_cache, sight, held, position, by, matmul)
    x, kept = _attend(config, kind, next(halves[kind]), x, see, by, matmul)
    x, _ = _mix_experts(
      config, next(halves[second]), x, tokens, position >= 0, None, experts, matmul
    )
    updated.append(kept)
  return _hidden(config, weights, x), tuple(updated)
