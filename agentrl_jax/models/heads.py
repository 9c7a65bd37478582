"""Heads that read hidden states: the critic's value, as a number or as a distribution over bins."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models.model import param


@flax.struct.dataclass
class ValueHead:
  """A linear map from the hidden state to one number."""

  weight: Float[Array, "D"]
  bias: Float[Array, ""]


@flax.struct.dataclass
class CategoricalHead:
  """A linear map to logits of K bins, whose centres lie evenly from `low` to `high`."""

  weight: Float[Array, "D K"]
  bias: Float[Array, "K"]
  low: float = flax.struct.field(pytree_node=False)
  high: float = flax.struct.field(pytree_node=False)


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  del key
  return jnp.zeros(shape, dtype)


def abstract_value_head(embed: int) -> ValueHead:
  """Starts at zero: the first value of every state is 0, whatever the model."""
  return ValueHead(
    weight=param((embed,), ("embed",), _zeros),
    bias=param((), (), _zeros),
  )


def abstract_categorical_head(embed: int, bins: int, low: float, high: float) -> CategoricalHead:
  """Starts uniform: the first value of every state is the middle of `low` and `high`."""
  if bins < 2 or not low < high:
    raise ValueError(f"{bins} bins from {low} to {high}, expected at least 2 and low < high")
  return CategoricalHead(
    weight=param((embed, bins), ("embed", None), _zeros),
    bias=param((bins,), (None,), _zeros),
    low=low,
    high=high,
  )


def value(head: ValueHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
  """In float32, whatever the dtype of the hidden states."""
  return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head.weight) + head.bias


def value_logits(head: CategoricalHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T K"]:
  """In float32, whatever the dtype of the hidden states."""
  logits = jnp.einsum("btd,dk->btk", hidden.astype(jnp.float32), head.weight)
  return logits + head.bias[None, None, :]
