"""Heads that read hidden states: the critic's value."""

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


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  del key
  return jnp.zeros(shape, dtype)


def abstract_value_head(embed: int) -> ValueHead:
  """Starts at zero: the first value of every state is 0, whatever the model."""
  return ValueHead(
    weight=param((embed,), ("embed",), _zeros),
    bias=param((), (), _zeros),
  )


def value(head: ValueHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
  """In float32, whatever the dtype of the hidden states."""
  return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head.weight) + head.bias
