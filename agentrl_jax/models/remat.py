"""What of a layer's forward pass is kept for its backward pass: transformations of the layer
function that a model scans, given to `Model.forward` as `remat`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.models.attention import MIXED
from agentrl_jax.models.sharding import BATCH

Layer = Callable[..., tuple[jax.Array, Any]]  # (x [B T D], one layer's weights) -> (x, kept)
Remat = Callable[[Layer], Layer]


def save_everything(layer: Layer) -> Layer:
  """No rematerialisation: every activation of the forward pass is kept."""
  return layer


def save_nothing(layer: Layer) -> Layer:
  """Only what goes into each layer is kept; the layer is computed again in the backward pass (Chen
  et al. 2016): about a third more work, least memory.
  """
  return jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)


def save_attention(layer: Layer) -> Layer:
  """As `save_nothing`, but attention over blocks, whose scores no device has memory to keep, is not
  computed again: what it mixed is kept, for each layer as much as its queries.
  """
  policy = jax.checkpoint_policies.save_only_these_names(MIXED)
  return jax.checkpoint(layer, policy=policy)


def save_products(layer: Layer) -> Layer:
  """Results of products with weights are kept, norms, attention and activations computed again."""
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return jax.checkpoint(layer, policy=policy)


def over_batch(mesh: Mesh, remat: Remat) -> Remat:
  """`remat`, with what flows from layer to layer spread over the mesh as the batch's rows are.

  Without it XLA spreads hidden states over their width, as the embedding's rows lie, and turns
  every product of a layer into an all-reduce of activations.
  """
  if mesh.size == 1:
    return remat
  sharding = NamedSharding(mesh, PartitionSpec(*BATCH, None))

  def transform(layer: Layer) -> Layer:
    def placed(x: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
      x, kept = layer(jax.lax.with_sharding_constraint(x, sharding), *rest)
      return jax.lax.with_sharding_constraint(x, sharding), kept

    return remat(placed)

  return transform
