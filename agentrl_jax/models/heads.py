"""Heads that read hidden states: the critic's value."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.models.model import ParamSpec


@flax.struct.dataclass
class ValueHead:
  """A linear map from the hidden state to one number."""

  weight: Float[Array, "D"] | ParamSpec
  bias: Float[Array, ""] | ParamSpec


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  del key
  return jnp.zeros(shape, dtype)


def abstract_value_head(embed: int) -> ValueHead:
  """Starts at zero: the first value of every state is 0, whatever the model."""
  return ValueHead(
    weight=ParamSpec((embed,), jnp.float32, ("embed",), _zeros),
    bias=ParamSpec((), jnp.float32, (), _zeros),
  )


def value(head: ValueHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
  """In float32, whatever the dtype of the hidden states."""
  return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head.weight) + head.bias
