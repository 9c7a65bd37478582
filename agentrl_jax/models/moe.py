"""A mixture of experts in place of the MLP: routers, experts computed without dropping a token, and
where experts lie on a mesh.

A router chooses K of E experts for each token, or is told which (the routing of the engine that
sampled the tokens, replayed: Ma et al. 2025); weights come from its own logits in either case. Axis
letters as in `layers`; F is the hidden width of one expert.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.models import layers
from agentrl_jax.models.grouped_fp8 import ON_ONE_DEVICE, Spread, grouped_product
from agentrl_jax.models.model import ParamSpec, param, parameter_path
from agentrl_jax.models.precision import Amax, Multiplied, Stored
from agentrl_jax.models.sharding import BATCH, RULES, Rules, partition
from agentrl_jax.types import RouterSums

NOWHERE = -1  # the expert of padding; in a replayed routing, of a position whose router chooses


@dataclasses.dataclass(frozen=True)
class Softmax:
  """The K largest probabilities; `normalized` to sum to one, or as they are."""

  experts_per_token: int
  normalized: bool


@dataclasses.dataclass(frozen=True)
class Sigmoid:
  """The K largest of sigmoid plus a correction that balances load without a loss, within the groups
  whose two best sum highest; weights are without the correction (DeepSeek-AI 2024, eq. 12-16).
  """

  experts_per_token: int
  normalized: bool
  groups: int
  groups_kept: int
  scale: float  # of the weights


@dataclasses.dataclass(frozen=True)
class RootSoftplus:
  """The K largest of the root of the softplus, plus a correction as of `Sigmoid` where there is
  one; weights are without it and sum to `scale` (DeepSeek V4, as transformers has it).
  """

  experts_per_token: int
  scale: float
  normalized: bool = True


Router = Softmax | Sigmoid | RootSoftplus


class Choice(NamedTuple):
  """What a router says of each token."""

  expert: Int[Array, "B T K"]
  weight: Float[Array, "B T K"]
  probability: Float[Array, "B T E"]  # sums to one


@flax.struct.dataclass
class Routing:
  """Beside the hidden states: what the L routers of a model did."""

  sums: RouterSums
  expert: Int[Array, "B T L K"]  # NOWHERE on padding; can be replayed


@flax.struct.dataclass
class Experts:
  """E gated MLPs; weights may be `Multiplied`."""

  gate: Float[Array, "E D F"]
  up: Float[Array, "E D F"]
  down: Float[Array, "E F D"]
  limit: float | None = flax.struct.field(pytree_node=False, default=None)  # as of `layers.clamped`


@flax.struct.dataclass
class MoE:
  router: Float[Array, "D E"]
  correction: Float[Array, "E"] | None  # of a router that has one; its gradient is zero
  experts: Experts
  shared: layers.MLP | None  # an expert of every token
  shared_gate: Float[Array, "D 1"] | None = None  # whose sigmoid weights the shared expert

  @classmethod
  def abstract(
    cls,
    depth: int,
    embed: int,
    ffw: int,
    *,
    experts: int,
    shared_ffw: int,
    router: Router,
    gated: bool = False,
    corrected: bool | None = None,
    limit: float | None = None,
  ) -> "MoE":
    """Specs of `depth` layers.

    Args:
      shared_ffw: 0 for no shared expert.
      gated: whether the shared expert is.
      corrected: whether routers have a correction; by default those that are `Sigmoid`.
      limit: of what every expert activates, see `layers.clamped`.
    """

    def spec(inputs: int, outputs: int, axes: tuple[str, str]) -> Any:
      shape, axes_ = (depth, experts, inputs, outputs), ("layers", "experts", *axes)
      return param(shape, axes_, layers.scaled_normal)

    wide = spec(embed, ffw, ("embed", "ffw"))
    gate = param((depth, embed, 1), ("layers", "embed", None), layers.scaled_normal)
    corrected = isinstance(router, Sigmoid) if corrected is None else corrected
    return cls(
      router=param((depth, embed, experts), ("layers", "embed", None), layers.scaled_normal),
      correction=param((depth, experts), ("layers", None), layers.zeros) if corrected else None,
      experts=Experts(gate=wide, up=wide, down=spec(ffw, embed, ("ffw", "embed")), limit=limit),
      shared=layers.MLP.abstract(depth, embed, shared_ffw) if shared_ffw else None,
      shared_gate=gate if gated else None,
    )


def is_correction(path: tuple[Any, ...]) -> bool:
  """Whether the jax key path of a weight ends at a router's correction."""
  return parameter_path(path)[-1] == "correction"


def rebalanced(weights: Any, assigned: Float[Array, "L E"], rate: float) -> Any:
  """A model's weights with its routers' corrections `rate` lower for experts that were chosen more
  often than the mean, and `rate` higher for those less often (DeepSeek-AI 2024, section 2.1.2).
  """
  load = jnp.sum(assigned, axis=-1, keepdims=True) / assigned.shape[-1]
  change = jnp.asarray(rate, jnp.float32) * jnp.sign(load - assigned)

  def one(path: tuple[Any, ...], weight: Array) -> Array:
    return weight + change if is_correction(path) else weight

  return jax.tree_util.tree_map_with_path(one, weights)


# (experts, x [B T D], expert [B T K] of each token or NOWHERE, weight [B T K]) -> [B T D]
ComputeExperts = Callable[[Experts, Array, Array, Array], Array]


def choose(
  router: Router,
  logits: Float[Array, "B T E"],
  correction: Float[Array, "E"] | None,
  replay: Int[Array, "B T K"] | None = None,
) -> Choice:
  """Experts of each token and their weights.

  Args:
    replay: the experts to take, in any order; NOWHERE where the router shall choose.
  """
  if isinstance(router, Softmax):
    score = probability = jax.nn.softmax(logits, axis=-1)
    wanted = score
  elif isinstance(router, RootSoftplus):
    score = jnp.sqrt(jax.nn.softplus(logits))
    probability = score / jnp.sum(score, axis=-1, keepdims=True)
    wanted = score if correction is None else score + correction.astype(score.dtype)[None, None]
  else:
    assert correction is not None
    score = jax.nn.sigmoid(logits)
    probability = score / jnp.sum(score, axis=-1, keepdims=True)
    wanted = _within_best_groups(score + correction.astype(score.dtype)[None, None], router)
  # A choice is a constant: the router learns through the weights of what it chose.
  _, expert = jax.lax.top_k(jax.lax.stop_gradient(wanted), router.experts_per_token)
  if replay is not None:
    told = jnp.all(replay != NOWHERE, axis=-1, keepdims=True)
    expert = jnp.where(told, replay, expert)
  weight = jnp.take_along_axis(score, expert, axis=-1)
  if router.normalized:
    weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
  scale = 1.0 if isinstance(router, Softmax) else router.scale
  return Choice(expert, weight * scale, probability)


def _within_best_groups(score: Float[Array, "B T E"], router: Sigmoid) -> Float[Array, "B T E"]:
  """Minus infinity outside the groups kept; groups are contiguous and of equal size."""
  if router.groups == router.groups_kept:
    return score
  grouped = score.reshape(*score.shape[:-1], router.groups, -1)
  best, _ = jax.lax.top_k(grouped, 2)
  _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), router.groups_kept)
  mask = jnp.any(jax.nn.one_hot(kept, router.groups, dtype=bool), axis=-2)
  return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(score.shape)


def moe(
  router: Router,
  weights: MoE,
  x: Float[Array, "B T D"],
  real: Bool[Array, "B T"],
  replay: Int[Array, "B T K"] | None,
  *,
  compute: ComputeExperts,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], tuple[RouterSums, Int[Array, "B T K"]]]:
  """Mixed experts, the sums of this layer (without the layer axis), and the experts taken.

  Router logits are float32. Positions that are not `real` go to no routed expert and count nowhere.
  """
  logits = jnp.einsum(
    "btd,de->bte", x.astype(jnp.float32), layers.plain(weights.router, jnp.float32)
  )
  choice = choose(router, logits, weights.correction, replay)
  expert = jnp.where(real[..., None], choice.expert, NOWHERE)
  mixed = compute(_ready(weights.experts, x.dtype), x, expert, choice.weight)
  if weights.shared is not None:
    shared = layers.mlp(weights.shared, x, matmul=matmul, limit=weights.experts.limit)
    if weights.shared_gate is not None:
      shared = shared * jax.nn.sigmoid(matmul(x, weights.shared_gate))
    mixed = mixed + shared
  return mixed, (sums_of(choice.probability, logits, expert, real), expert)


def _ready(experts: Experts, dtype: Any) -> Experts:
  """All as arrays or `Multiplied`, those held in other forms in `dtype`: the product of groups
  takes no others. What is `Stored` for products in FP8 is quantised again, to the same numbers.
  """

  def one(weight: Any) -> Any:
    if isinstance(weight, Array | Multiplied):
      return weight
    plain = layers.plain(weight, dtype)
    products = weight.products if isinstance(weight, Stored) else None
    return plain if products is None else Multiplied(plain, products)

  return Experts(one(experts.gate), one(experts.up), one(experts.down), experts.limit)


def sums_of(
  probability: Float[Array, "B T E"],
  logits: Float[Array, "B T E"],
  expert: Int[Array, "B T K"],
  real: Bool[Array, "B T"],
) -> RouterSums:
  squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
  return RouterSums(
    assigned=_counts(expert.reshape(-1), logits.shape[-1]).astype(jnp.float32),
    probability=jnp.sum(jnp.where(real[..., None], probability, 0.0), axis=(0, 1)),
    squared_log_total=jnp.sum(jnp.where(real, squares, 0.0)),
    tokens=jnp.sum(real, dtype=jnp.float32),
  )


def _counts(expert: Int[Array, "N"], experts: int) -> Int[Array, "E"]:
  """How often each expert is named: by comparing, as scattering is slow on accelerators."""
  named = expert[:, None] == jnp.arange(experts, dtype=expert.dtype)[None]
  return jnp.sum(named, axis=0, dtype=jnp.int32)


def compute_experts(
  weights: Experts,
  x: Float[Array, "B T D"],
  expert: Int[Array, "B T K"],
  weight: Float[Array, "B T K"],
  spread: Spread = ON_ONE_DEVICE,
) -> Float[Array, "B T D"]:
  """Each token's experts, weighted and summed; zero where all are NOWHERE.

  Tokens are sorted by expert, so that the work is that of the experts chosen.
  """
  experts, count = _array(weights.gate).shape[0], expert.shape[-1]
  flat = x.reshape(-1, x.shape[-1])
  last = jnp.where(expert == NOWHERE, experts, expert).reshape(-1)
  order = jnp.argsort(last)
  place = jnp.arange(order.shape[0], dtype=order.dtype)
  back = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
  sizes = _counts(last, experts)
  rows = _dispatch(flat, order, back, count)
  gate, up = (grouped_product(rows, w, sizes, spread) for w in (weights.gate, weights.up))
  gate, up = layers.clamped(gate, up, weights.limit)
  hidden = jax.nn.silu(gate) * up
  made = _restore(grouped_product(hidden, weights.down, sizes, spread), order, back)
  made = made.reshape(*expert.shape, -1)
  summed = jnp.einsum(
    "btkd,btk->btd", made, weight.astype(x.dtype), preferred_element_type=jnp.float32
  )
  return summed.astype(x.dtype)


def _array(weight: Any) -> Any:
  return weight.weight if isinstance(weight, Multiplied) else weight


def _with_array(weight: Any, array: Any) -> Any:
  return dataclasses.replace(weight, weight=array) if isinstance(weight, Multiplied) else array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(
  x: Float[Array, "N D"], order: Int[Array, "N*K"], back: Int[Array, "N*K"], count: int
) -> Float[Array, "N*K D"]:
  """Each row `count` times, in `order`. The gradients here and of `_restore` are gathers by the
  inverse order, where those of indexing would be scatters.
  """
  del back
  return x[order // count]


def _dispatch_backward(count: int, back: Array, grad: Array) -> tuple[Array, None, None]:
  each = grad[back].reshape(-1, count, grad.shape[-1])
  return jnp.sum(each, axis=1, dtype=jnp.float32).astype(grad.dtype), None, None


_dispatch.defvjp(
  lambda x, order, back, count: (_dispatch(x, order, back, count), back), _dispatch_backward
)


@jax.custom_vjp
def _restore(x: Float[Array, "M D"], order: Int[Array, "M"], back: Int[Array, "M"]) -> Array:
  """The rows as they lay before they were put in `order`."""
  del order
  return x[back]


_restore.defvjp(
  lambda x, order, back: (x[back], order), lambda order, grad: (grad[order], None, None)
)


def sharded_experts(mesh: Mesh, *, rules: Rules = RULES) -> ComputeExperts:
  """`compute_experts` with experts over the mesh axis `expert` and their width over `tensor`.

  Each device gathers the tokens of its expert axis, computes the experts it holds, and the parts
  are summed and scattered back: no token is dropped and no shape depends on the routing. Rows of
  the batch lie over that axis too, so that attention is not repeated along it.

  In FP8 each device rounds the part that it multiplies. Blocks are those of one device where
  `tensor` cuts the width at multiples of 128 and rows lie over `expert` alone; other axes of the
  batch leave other rows beside each other in the blocks of a weight's gradient.
  """

  def placed(weights: Experts) -> Experts:
    def of(weight: Any, *axes: str) -> Any:
      spec = ParamSpec(_array(weight).shape, None, axes, layers.zeros)
      where = partition(spec, mesh, rules=rules)
      if isinstance(weight, Multiplied) and weight.amax is not None:
        copies: Any = PartitionSpec()
        each: Any = PartitionSpec(*where[:1])
        weight = dataclasses.replace(weight, amax=Amax(copies, each, copies))
      return _with_array(weight, where)

    wide = of(weights.gate, "experts", "embed", "ffw")
    down = of(weights.down, "experts", "ffw", "embed")
    return Experts(gate=wide, up=wide, down=down, limit=weights.limit)

  def compute(weights: Experts, x: Array, expert: Array, weight: Array) -> Array:
    specs = placed(weights)
    tokens = PartitionSpec(*BATCH, None)
    run = jax.shard_map(
      functools.partial(_on_device, specs, tuple(mesh.axis_names)),
      mesh=mesh,
      in_specs=(specs, tokens, tokens, tokens),
      out_specs=tokens,
      check_vma=False,
    )
    return run(weights, x, expert, weight)

  return compute


def _on_device(
  specs: Experts,
  axes: tuple[str, ...],
  weights: Experts,
  x: Array,
  expert: Array,
  weight: Array,
) -> Array:
  """What one device of `sharded_experts` does; `specs` say how the whole weights are spread over
  the mesh, whose axes these are.
  """
  experts_axis, embed_axis, width_axis = (*_array(specs.gate), None, None, None)[:3]
  if embed_axis:
    gather = functools.partial(jax.lax.all_gather, axis_name=embed_axis, tiled=True)

    def gathered(weight: Any, axis: int) -> Any:
      return _with_array(weight, gather(_array(weight), axis=axis))

    weights = Experts(
      gate=gathered(weights.gate, 1),
      up=gathered(weights.up, 1),
      down=gathered(weights.down, 2),
      limit=weights.limit,
    )
  if experts_axis:
    gather = functools.partial(jax.lax.all_gather, axis_name=experts_axis, axis=0, tiled=True)
    x, expert, weight = gather(x), gather(expert), gather(weight)
    held = _array(weights.gate).shape[0]
    expert = expert - jax.lax.axis_index(experts_axis) * held
    expert = jnp.where((expert >= 0) & (expert < held), expert, NOWHERE)
  spread = Spread(axes, tuple(axis for axis in axes if axis != experts_axis))
  # Says what part of the rows is expected to stay here, for plans: no shape does.
  with jax.named_scope(f"one_in_{jax.lax.axis_size(experts_axis) if experts_axis else 1}_rows"):
    made = compute_experts(weights, x, expert, weight, spread)
  if width_axis:
    made = jax.lax.psum(made, width_axis)
  if experts_axis:
    made = jax.lax.psum_scatter(made, experts_axis, scatter_dimension=0, tiled=True)
  return made
