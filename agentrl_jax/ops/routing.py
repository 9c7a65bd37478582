"""Losses on what the routers of a mixture of experts did, from sums that add over micro-batches."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.types import RouterSums


def load_balance_loss(sums: RouterSums, whole: RouterSums) -> Float[Array, ""]:
  """E sum_e f_e P_e, mean over layers (Fedus et al. 2022, eq. 4-6).

  f_e is the mean number of times that a token of `whole` chose expert e, P_e its mean probability.
  With K experts a token a balanced router gives K.

  Args:
    sums: of the micro-batch; its probabilities carry the gradient.
    whole: of the batch that the loss is about, a constant. The losses of micro-batches with the
      same `whole` add up to that of the batch, gradients too.
  """
  tokens = jnp.maximum(whole.tokens, 1.0)
  experts = sums.probability.shape[-1]
  each = jnp.einsum("le,le,l->l", whole.assigned, sums.probability, tokens**-2)
  return experts * jnp.sum(each) / each.shape[0]


def router_z_loss(sums: RouterSums, whole: RouterSums) -> Float[Array, ""]:
  """The mean square of the routers' log total, which keeps logits small (Zoph et al. 2022, eq. 5).

  Arguments as of `load_balance_loss`; mean over tokens and layers.
  """
  each = sums.squared_log_total / jnp.maximum(whole.tokens, 1.0)
  return jnp.sum(each) / each.shape[0]


def pooled(sums: RouterSums) -> RouterSums:
  """The layers as one, whose load-balance loss is that of Hugging Face's Qwen3-MoE."""
  add = {name: jnp.sum(value, axis=0, keepdims=True) for name, value in vars(sums).items()}
  return RouterSums(**add)
