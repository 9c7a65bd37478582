"""A model is a family's plain functions bound to one configuration; weights are a pytree described
by its specs.

`abstract()` is the one description of the weights: initial values, shardings and checkpoints follow
from it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Weights = Any  # pytree of arrays, or of ParamSpec, of one family's `flax.struct` dataclasses
Cache = Any  # pytree of arrays with the row axis first, one entry per layer
# Names of weights whose steps bfloat16 cannot tell apart, or that decide over many positions.
KEEP_FLOAT32 = (
  *("correction", "decay_log", "decay_bias"),
  *("mixing", "mixing_bias", "mixing_scale", "place_bias", "sinks", "table"),
)
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]  # (key, shape, dtype)


class ParamSpec(NamedTuple):
  """One weight array before it exists."""

  shape: tuple[int, ...]
  dtype: Any
  axes: tuple[str | None, ...]  # logical axis names, mapped to mesh axes by `models.sharding`
  init: Initializer


def param(
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  init: Initializer,
  dtype: Any = jnp.float32,
) -> Any:
  """A `ParamSpec`, typed as the array whose place it holds in a tree of weights."""
  return ParamSpec(shape, dtype, axes, init)


class Rule(NamedTuple):
  """How one Hugging Face tensor lies in our tree: rename, stack and transpose, never a computation.

  The tensor `name`, with `{layer}` replaced by `first_layer` + l (or by `numbers[l]`) and
  `{expert}` by e, is our array at `path` taken at indices l, e of its leading axes (the whole array
  where `name` has neither), with its axes permuted: axis i of the Hugging Face tensor is axis
  `perm[i]` of ours.
  """

  name: str
  path: tuple[str, ...]
  perm: tuple[int, ...]
  first_layer: int = 0
  float32: bool = False  # stored so, whatever the rest of a checkpoint is stored as
  whole: bool = False  # whole numbers, stored as int64; here in float32, which holds them exactly
  numbers: tuple[int, ...] | None = None  # of the layers, where they do not follow each other

  def tensor(self, index: tuple[int, ...]) -> str:
    """The name at an index of the leading axes: (), (layer,) or (layer, expert)."""
    layer, expert = (*index, 0, 0)[:2]
    number = self.first_layer + layer if self.numbers is None else self.numbers[layer]
    return self.name.format(layer=number, expert=expert)


class Family(NamedTuple):
  """The functions of one family; each takes its configuration first. Shapes as in `Model`."""

  name: str
  abstract: Callable[..., Weights]
  forward: Callable[..., Array]
  unembedding: Callable[..., Array]
  init_cache: Callable[..., Cache]
  decode: Callable[..., tuple[Array, Cache]]
  rules: Callable[[Any], tuple[Rule, ...]]
  to_hf: Callable[[Any], dict[str, Any]]  # the configuration as a config.json
  units: Callable[
    [Any], Mapping[str, int]
  ]  # indivisible parts of a logical axis, where not its size
  forward_routed: Callable[..., tuple[Array, Any]] | None = None  # of a mixture of experts
  # A `checkpoint_files.TensorFiles` as one whose names `rules` knows, where a file has others.
  checkpoint: Callable[[Any], Any] = lambda files: files
  whole_prefixes: bool = False  # a cache row can be continued or copied at its end only
  shares_prompts: bool = True  # a sample of a row may continue another, see `parent` of `forward`


@dataclasses.dataclass(frozen=True)
class Model:
  """All that learner, sampler and transfer need to know of a model; hashable, so it may be static
  in jit.
  """

  functions: Family
  config: Any  # the family's frozen dataclass

  @property
  def family(self) -> str:
    return self.functions.name

  @property
  def rules(self) -> tuple[Rule, ...]:
    """The map between our tree and a Hugging Face checkpoint."""
    return self.functions.rules(self.config)

  @property
  def units(self) -> Mapping[str, int]:
    """Into how many parts a logical axis may be cut at most, for axes that hold several elements a
    part.
    """
    return self.functions.units(self.config)

  @property
  def load_balance(self) -> float:
    """Coefficient of the routers' load-balance loss that the checkpoint's configuration names."""
    return getattr(self.config, "load_balance", 0.0)

  def abstract(self) -> Weights:
    """The weights' tree with `ParamSpec` leaves."""
    return self.functions.abstract(self.config)

  def forward(
    self,
    weights: Weights,
    tokens: Int[Array, "B T"],
    sample: Int[Array, "B T"],
    position: Int[Array, "B T"],
    *,
    parent: Int[Array, "B T"] | None = None,
    **options: Any,
  ) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, for packed rows.

    Args:
      sample: a position attends to earlier ones of the same row with the same id; -1 is padding,
        whose hidden states are finite and meaningless.
      position: of the token within its sample, from 0; read by the rotary embedding.
      parent: the id of the stream of the same row that a position's sample continues, its own where
        none. Raises ValueError for a family that has not `shares_prompts`.
      **options: `dtype` of activations (float32), `remat` (a transformation of the layer function
        such as `jax.checkpoint`), `matmul` (a `models.layers.Matmul`), `attend_rows` (an
        `attention.AttendRows`: `context.attend_on(mesh)` on a mesh).
    """
    options |= self._continuing(parent)
    return self.functions.forward(self.config, weights, tokens, sample, position, **options)

  def forward_routed(
    self,
    weights: Weights,
    tokens: Int[Array, "B T"],
    sample: Int[Array, "B T"],
    position: Int[Array, "B T"],
    *,
    parent: Int[Array, "B T"] | None = None,
    **options: Any,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """`forward`, and what the routers did: a `moe.Routing`, or None of a model without experts.

    Options of `forward` for a mixture of experts, here and there: `replay` [B T L K], the experts
    to take instead of those that the routers would choose (L its routed layers; -1 where they shall
    choose), and `experts` (a `moe.ComputeExperts`: `moe.sharded_experts(mesh)` on a mesh).
    """
    if self.functions.forward_routed is None:
      return self.forward(weights, tokens, sample, position, parent=parent, **options), None
    options |= self._continuing(parent)
    return self.functions.forward_routed(self.config, weights, tokens, sample, position, **options)

  def _continuing(self, parent: Int[Array, "B T"] | None) -> dict[str, Any]:
    if parent is None:
      return {}
    if not self.functions.shares_prompts:
      raise ValueError(
        f"samples that continue others are not supported for {self.family}, expected rows that "
        "repeat what samples begin with (share_prompts=False)"
      )
    return {"parent": parent}

  def unembedding(self, weights: Weights) -> Float[Array, "D V"]:
    """The matrix from hidden states to logits; the transposed embedding where they are tied."""
    return self.functions.unembedding(self.config, weights)

  def init_cache(self, rows: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty key-value cache for `rows` sequences of at most `length` tokens."""
    return self.functions.init_cache(self.config, rows, length, dtype)

  def decode(
    self,
    weights: Weights,
    cache: Cache,
    tokens: Int[Array, "B N"],
    position: Int[Array, "B N"],
    **options: Any,
  ) -> tuple[Float[Array, "B N D"], Cache]:
    """Appends N tokens to each row of the cache; donate the cache so that it is updated in place.

    Row b of the cache holds one sequence from index 0. Keys and values of `tokens[b, n]` are
    written at index `position[b, n]`, and the token attends to indices up to it. A position of -1
    is padding: nothing is written, and its hidden state is finite and meaningless. Where a family
    has `whole_prefixes`, positions follow those that the row was given last, or begin at 0, and
    padding comes last. Options: `dtype`, `matmul` as in `forward`.
    """
    return self.functions.decode(self.config, weights, cache, tokens, position, **options)


def unstack(weights: Weights) -> Weights:
  """The same weights with `layers`, and each other stack whose name ends so, as a tuple of one tree
  a layer instead of stacked arrays.

  `decode` takes both; this form saves it a copy of every layer's weights in every call.
  """
  if isinstance(weights.layers, tuple):
    return weights

  def split(stacked: Any) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(stacked)
    count = leaves[0].shape[0] if leaves else 0
    return tuple(jax.tree.map(lambda w, i=index: w[i], stacked) for index in range(count))

  names = [field.name for field in dataclasses.fields(weights)]
  stacks = [name for name in names if name.endswith("layers")]
  return weights.replace(**{name: split(getattr(weights, name)) for name in stacks})


def on_host(weights: Weights) -> Weights:
  """The weights as numpy arrays, with what `unstack` took apart stacked again."""
  held = jax.tree.map(np.asarray, weights)
  names = [field.name for field in dataclasses.fields(held)]
  apart = {name: getattr(held, name) for name in names if isinstance(getattr(held, name), tuple)}
  stacked = {name: jax.tree.map(lambda *w: np.stack(w), *trees) for name, trees in apart.items()}
  return held.replace(**stacked)


def cast(weights: Weights, dtype: Any) -> Weights:
  """The weights in the dtype that the model computes in, but for those of KEEP_FLOAT32."""

  def one(path: tuple[Any, ...], weight: Array) -> Array:
    return weight if parameter_path(path)[-1] in KEEP_FLOAT32 else weight.astype(dtype)

  return jax.tree_util.tree_map_with_path(one, weights)


def is_spec(node: Any) -> bool:
  return isinstance(node, ParamSpec)


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
  """A jax key path as attribute names, the form used by `Rule.path`."""
  return tuple(str(getattr(entry, "name", getattr(entry, "idx", entry))) for entry in path)


def initialize(model: Model, key: jax.Array) -> Weights:
  """Random weights, as `draw` makes them."""
  return draw(model.abstract(), key)


def draw(specs: Any, key: jax.Array) -> Any:
  """Random arrays of a tree of `ParamSpec`s; each one's key is folded from its name, so it does not
  depend on the others.

  Jit it with `out_shardings` so that each device makes only its part.
  """

  def make(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
    name = zlib.crc32(".".join(parameter_path(path)).encode())
    return spec.init(jax.random.fold_in(key, name), spec.shape, spec.dtype)

  return jax.tree_util.tree_map_with_path(make, specs, is_leaf=is_spec)
