"""Products with weights in FP8, and weights held as FP8.

Both operands of a product are rounded to 8 bits with a scale for each block or for the whole, and
summed in float32: e4m3 forward, e5m2 or e4m3 for what comes back (Micikevicius et al. 2022; blocks
as DeepSeek-AI 2024, section 3.3). The master weights stay what they are. A number too large for its
format becomes the largest there is, never infinite or NaN; a NaN stays one.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models import layers
from agentrl_jax.models.model import Model, Weights, is_spec, parameter_path
from agentrl_jax.ops.quantize import (
  OCP,
  Quantization,
  block_amax,
  dequantize,
  finite,
  quantize,
  quantize_with,
  scales_of,
)

BLOCK = 128
_WEIGHT = OCP  # 128 x 128, the numbers that a push sends
_ROWS = OCP._replace(block=(1, BLOCK))  # along a row: of what is summed over in the product
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_FLOAT32 = float(jnp.finfo(jnp.float32).max)


class May(NamedTuple):
  """What may be done with a weight in FP8."""

  multiply: bool  # its products, in training and sampling
  store: bool  # held as FP8 by the sampler


_BOTH, _STORE, _NEVER = May(True, True), May(False, True), May(False, False)

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
  # The grouped product computes in the dtype of the activations.
  "moe.experts.gate": _STORE,
  "moe.experts.up": _STORE,
  "moe.experts.down": _STORE,
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
    if self.gradient not in _LARGEST:
      raise ValueError(f"gradient is {self.gradient!r}, expected one of {sorted(_LARGEST)}")
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
  back. 0 is no step yet.
  """

  x: Float[Array, "... H"]
  weight: Float[Array, "... H"]
  gradient: Float[Array, "... H"]


History = dict[str, Amax]  # by the path of a weight, with a leading layer axis as it has


@flax.struct.dataclass
class Multiplied:
  """A weight whose products are in FP8."""

  weight: Array
  amax: Amax | None = None  # None: dynamic

  def plain(self, dtype: Any) -> Array:
    return self.weight.astype(dtype)


@flax.struct.dataclass
class Stored:
  """A weight held as FP8."""

  values: Array
  scales: Float[Array, "..."]
  how: Quantization = flax.struct.field(pytree_node=False)
  multiplied: bool = flax.struct.field(pytree_node=False, default=False)  # its products in FP8 too

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
  """The weights with those of `how.places` as `Multiplied`, for `make_matmul(how)`.

  Args:
    history: of `fresh_history`'s form, for delayed scaling; without it scales are dynamic.
  """

  def one(path: tuple[Any, ...], weight: Array) -> Any:
    if not _is_at(path, how.places):
      return weight
    return Multiplied(weight, (history or {}).get(".".join(parameter_path(path))))

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
      empty = jnp.zeros((*weight.shape[:-2], how.history), jnp.float32)
      found[".".join(parameter_path(path))] = Amax(empty, empty, empty)
  return found


def remembered(history: History, seen: History) -> History:
  """The history one step later; `seen` holds the step's magnitudes first, as the gradient of the
  history that `make_matmul` gives.
  """

  def one(old: Array, new: Array) -> Array:
    return jnp.concatenate([new[..., :1], old[..., :-1]], axis=-1)

  return jax.tree.map(one, history, seen)


def stored(weights: Weights, products: Fp8 | None = None) -> Weights:
  """The weights, one tree a layer (`model.unstack`), with those of `STORED` held as FP8.

  With `products` they are as `make_matmul(products)` multiplies them, at its places.
  """
  how = _WEIGHT if products is None or products.blocks else _WEIGHT._replace(block=None)
  places = () if products is None else products.places
  of = functools.partial(quantize, how=how)

  def one(path: tuple[Any, ...], weight: Array) -> Any:
    if not _is_at(path, STORED):
      return weight
    held = of(weight) if weight.ndim == 2 else jax.vmap(of)(weight)
    return Stored(*held, how, multiplied=_is_at(path, places))

  return jax.tree_util.tree_map_with_path(one, weights)


def make_matmul(how: Fp8) -> layers.Matmul:
  """A product for `Model.forward` and `Model.decode`: FP8 with weights that are `Multiplied`, or
  `Stored` for that (forward only, by dynamic scales); in the dtype of the activations with all
  others.
  """

  def matmul(x: Float[Array, "... I"], weight: Any) -> Float[Array, "... O"]:
    if isinstance(weight, Multiplied):
      return _product(how, x, weight.weight.astype(x.dtype), weight.amax)
    if isinstance(weight, Stored) and weight.multiplied:
      rows = x.reshape(-1, x.shape[-1])
      made = _scaled_product(_quantized(rows, how), Operand(weight.values, weight.scales), x.dtype)
      return made.reshape(*x.shape[:-1], -1)
    return layers.matmul(x, weight)

  return matmul


class Operand(NamedTuple):
  """A matrix in FP8; one scale for all of it, or those of its blocks."""

  values: Array
  scale: Array

  @property
  def T(self) -> "Operand":
    return Operand(self.values.T, self.scale.T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: Fp8, x: Array, weight: Array, amax: Amax | None) -> Array:
  return _forward(how, x, weight, amax)[0]


def _forward(how: Fp8, x: Array, weight: Array, amax: Amax | None) -> tuple[Array, tuple[Any, ...]]:
  """Kept for the backward pass are operands in FP8 only."""
  rows = x.reshape(-1, x.shape[-1])
  seen = None
  if how.blocks:
    held = _quantized(weight, how, of_weight=True)
    made = _scaled_product(_quantized(rows, how), held, x.dtype)
    kept = _quantized(rows.T, how)  # the weight's gradient sums over tokens
  else:
    coded, x_now = _whole(rows, "float8_e4m3fn", None if amax is None else amax.x)
    held, weight_now = _whole(weight, "float8_e4m3fn", None if amax is None else amax.weight)
    made = _scaled_product(coded, held, x.dtype)
    kept = coded.T
    seen = None if amax is None else (x_now, weight_now)
  return made.reshape(*x.shape[:-1], -1), (kept, held, amax, seen)


def _backward(how: Fp8, saved: tuple[Any, ...], grad: Array) -> tuple[Array, Array, Amax | None]:
  kept, held, amax, seen = saved
  rows = grad.reshape(-1, grad.shape[-1])
  if how.blocks:
    backward, tokens = _quantized(rows, how, how.gradient), _quantized(rows.T, how, how.gradient)
    onto_x = _scaled_product(backward, held.T, grad.dtype)
    of_weight = _scaled_product(kept, tokens.T, grad.dtype)
  else:
    coded, now = _whole(rows, how.gradient, None if amax is None else amax.gradient)
    onto_x = _scaled_product(coded, held.T, grad.dtype)
    of_weight = _scaled_product(kept, coded, grad.dtype)
    amax = None if amax is None else _newest(amax, seen[0], seen[1], now)
  return onto_x.reshape(*grad.shape[:-1], -1), of_weight, amax


_product.defvjp(_forward, _backward)


def _newest(amax: Amax, x: Array, weight: Array, gradient: Array) -> Amax:
  """The step's magnitudes in place of a gradient of the history: nothing learns from that."""
  first = jnp.zeros_like(amax.x).at[0].set
  return Amax(first(x), first(weight), first(gradient))


def _quantized(
  values: Float[Array, "M K"], how: Fp8, dtype: str = "float8_e4m3fn", *, of_weight: bool = False
) -> Operand:
  """Rows in FP8 with scales of what there is now."""
  block = None if not how.blocks else (_WEIGHT if of_weight else _ROWS).block
  return Operand(*quantize(finite(values), Quantization(dtype, block, top=_LARGEST[dtype])))


def _whole(
  values: Float[Array, "M K"], dtype: str, history: Float[Array, "H"] | None
) -> tuple[Operand, Array]:
  """Values with one scale, and their largest magnitude now; the scale is of the history once there
  is one.
  """
  how = Quantization(dtype, None, top=_LARGEST[dtype])
  values = finite(values)
  now = used = block_amax(values, how)
  if history is not None:
    before = jnp.max(history)
    used = jnp.where(before > 0, before, now)
  scale = scales_of(used, how)
  return Operand(quantize_with(values, scale, how), scale), now


def _scaled_product(left: Operand, right: Operand, dtype: Any) -> Array:
  """left [M K] @ right [K N] in `dtype`, where scales are of the whole, or of left's [1 x 128]
  ([M, K / 128]) and right's [128 x 128] or [128 x 1].
  """
  if left.scale.ndim == 0:
    made = _saturated(_saturated(_dot(left.values, right.values) * left.scale) * right.scale)
  else:
    columns = _by_column(right.scale, right.values.shape[1])
    made = _blocks(left.values, left.scale, right.values, columns)
  return jnp.clip(made, *_range(dtype)).astype(dtype)


def _blocks(left: Array, left_scale: Array, right: Array, right_scale: Array) -> Array:
  """Block after block of what is summed over, each scaled before it is added."""
  count = left_scale.shape[1]
  extra = count * BLOCK - left.shape[1]
  left, right = jnp.pad(left, ((0, 0), (0, extra))), jnp.pad(right, ((0, extra), (0, 0)))
  part_of = jax.lax.dynamic_slice_in_dim

  def add(number: Array, total: Array) -> Array:
    at = number * BLOCK
    part = _dot(part_of(left, at, BLOCK, 1), part_of(right, at, BLOCK, 0))
    part = _saturated(part * part_of(left_scale, number, 1, 1))
    return total + _saturated(part * part_of(right_scale, number, 1, 0))

  start = jnp.zeros((left.shape[0], right.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, count, add, start)


def _by_column(scale: Float[Array, "K/128 ..."], columns: int) -> Float[Array, "K/128 N"]:
  return scale if scale.shape[1] == columns else jnp.repeat(scale, BLOCK, 1)[:, :columns]


def _dot(left: Array, right: Array) -> Float[Array, "M N"]:
  axes = (((1,), (0,)), ((), ()))
  return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _saturated(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
  return jnp.clip(x, -_FLOAT32, _FLOAT32)


def _range(dtype: Any) -> tuple[float, float]:
  largest = float(jnp.finfo(dtype).max)
  return -largest, largest
