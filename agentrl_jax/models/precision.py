"""Which weights are multiplied in FP8 and which are held as FP8: a table, and marks on the weights.

`matmul_fp8` and `grouped_fp8` multiply by the marks. The master weights stay what they are.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models.model import Model, Weights, is_spec, parameter_path
from agentrl_jax.ops.quantize import OCP, Quantization, dequantize, quantize

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


class May(NamedTuple):
  """What may be done with a weight in FP8."""

  multiply: bool  # its products, in training and sampling
  store: bool  # held as FP8 by the sampler


_BOTH, _NEVER = May(True, True), May(False, False)

# By the end of a weight's path in a model; what is not listed is `_NEVER`.
PLACES: Mapping[str, May] = {
  "attention.query": _BOTH,
  "attention.key": _BOTH,
  "attention.value": _BOTH,
  "attention.output": _BOTH,
  # Of latent attention; its `up` is taken apart when decoding, where it is multiplied as it is.
  "attention.query_down": _BOTH,
  "attention.down": _BOTH,
  "attention.up": _BOTH,
  "mlp.gate": _BOTH,
  "mlp.up": _BOTH,
  "mlp.down": _BOTH,
  "moe.shared.gate": _BOTH,
  "moe.shared.up": _BOTH,
  "moe.shared.down": _BOTH,
  "moe.experts.gate": _BOTH,
  "moe.experts.up": _BOTH,
  "moe.experts.down": _BOTH,
  # A choice of experts flips on the last bit; logits become log-probs; embeddings are looked up;
  # norms and biases are vectors.
  "moe.router": _NEVER,
  "moe.correction": _NEVER,
  "embedding": _NEVER,
  "unembedding": _NEVER,
  "final_norm": _NEVER,
}
MULTIPLIED = tuple(name for name, may in PLACES.items() if may.multiply)
STORED = tuple(name for name, may in PLACES.items() if may.store)
EXPERTS = tuple(name for name in PLACES if name.startswith("moe.experts."))


@dataclasses.dataclass(frozen=True)
class Fp8:
  """How products are computed.

  With `blocks` a scale for every 128 x 128 of a weight, every 1 x 128 of an activation or gradient
  (along what is summed over), else one for each operand. `history` 0 scales by the largest
  magnitude there is now (dynamic); n > 0 by the largest of the n steps before (delayed), one scale
  an operand. `gradient` is the format of what comes back; `places` are some of `MULTIPLIED`.
  """

  blocks: bool = True
  gradient: str = "float8_e5m2"
  history: int = 0
  places: tuple[str, ...] = MULTIPLIED

  def __post_init__(self):
    if self.gradient not in LARGEST:
      raise ValueError(f"gradient is {self.gradient!r}, expected one of {sorted(LARGEST)}")
    if self.history < 0:
      raise ValueError(f"history is {self.history}, expected at least 0")
    if self.history and self.blocks:
      raise ValueError(
        f"history is {self.history} with blocks, expected 0 or blocks=False: delayed scaling keeps "
        "one magnitude an operand"
      )
    wrong = [name for name in self.places if name not in MULTIPLIED]
    if wrong or not self.places:
      raise ValueError(f"places are {list(self.places)}, expected some of {list(MULTIPLIED)}")


@flax.struct.dataclass
class Amax:
  """Largest magnitudes of a product's operands, newest first; the gradient's is of what comes
  back. 0 is no step yet. Of experts each weight has its own, their rows one for all.
  """

  x: Float[Array, "... H"]
  weight: Float[Array, "... H"]
  gradient: Float[Array, "... H"]


History = dict[str, Amax]  # by the path of a weight, with a leading layer axis as it has


@flax.struct.dataclass
class Multiplied:
  """A weight whose products are in FP8."""

  weight: Array
  how: Fp8 = flax.struct.field(pytree_node=False)
  amax: Amax | None = None  # None: dynamic

  def plain(self, dtype: Any) -> Array:
    return self.weight.astype(dtype)


@flax.struct.dataclass
class Stored:
  """A weight held as FP8."""

  values: Array
  scales: Float[Array, "..."]
  how: Quantization = flax.struct.field(pytree_node=False)
  # How it is multiplied in FP8; None: in the dtype of the activations.
  products: Fp8 | None = flax.struct.field(pytree_node=False, default=None)

  def plain(self, dtype: Any) -> Array:
    """In `dtype`, with a leading expert axis where the values have one."""
    of = functools.partial(dequantize, how=self.how)
    of = of if self.values.ndim == 2 else jax.vmap(of)
    return of(self.values, self.scales).astype(dtype)


def _is_at(path: tuple[Any, ...], places: tuple[str, ...]) -> bool:
  """Whether a jax key path ends as one of the places."""
  name = "." + ".".join(parameter_path(path))
  return any(name.endswith("." + place) for place in places)


def marked(weights: Weights, how: Fp8, history: History | None = None) -> Weights:
  """The weights with those of `how.places` as `Multiplied`, for `matmul_fp8.matmul`.

  Args:
    history: of `fresh_history`'s form, for delayed scaling; without it scales are dynamic.
  """

  def one(path: tuple[Any, ...], weight: Array) -> Any:
    if not _is_at(path, how.places):
      return weight
    return Multiplied(weight, how, (history or {}).get(".".join(parameter_path(path))))

  return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_spec)


def require_places(model: Model, how: Fp8) -> None:
  """Raises ValueError for a model none of whose products are at `how.places`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.abstract(), is_leaf=is_spec)
  if not any(_is_at(path, how.places) for path, _ in leaves):
    raise ValueError(f"{model.family} has no product at {list(how.places)} to compute in FP8")


def fresh_history(weights: Weights, how: Fp8) -> History | None:
  """No step yet, for each product of these stacked weights; None where scaling is dynamic."""
  if not how.history:
    return None
  leaves, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_spec)
  found = {}
  for path, weight in leaves:
    if _is_at(path, how.places):
      each = jnp.zeros((*weight.shape[:-2], how.history), jnp.float32)
      rows = each[..., 0, :] if _is_at(path, EXPERTS) else each
      found[".".join(parameter_path(path))] = Amax(rows, each, rows)
  return found


def remembered(history: History, seen: History) -> History:
  """The history one step later; `seen` holds the step's magnitudes first, as products give them for
  a gradient of the history.
  """

  def one(old: Array, new: Array) -> Array:
    return jnp.concatenate([new[..., :1], old[..., :-1]], axis=-1)

  return jax.tree.map(one, history, seen)


def stored(weights: Weights, products: Fp8 | None = None) -> Weights:
  """The weights, one tree a layer (`model.unstack`), with those of `STORED` held as FP8.

  With `products` they are as these multiply them, at its places. Blocks are those of a push.
  """
  how = OCP if products is None or products.blocks else OCP._replace(block=None)
  places = () if products is None else products.places
  of = functools.partial(quantize, how=how)

  def one(path: tuple[Any, ...], weight: Array) -> Any:
    if not _is_at(path, STORED):
      return weight
    held = of(weight) if weight.ndim == 2 else jax.vmap(of)(weight)
    return Stored(*held, how, products if _is_at(path, places) else None)

  return jax.tree_util.tree_map_with_path(one, weights)
