"""Where the sampler's copy of the weights and its cache lie: as the weights it was given lay."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.models.model import Cache, Weights, unstack


@jax.jit
def own_copy(weights: Weights) -> Weights:
  """The weights with one tree a layer, in buffers of their own: the given ones may be donated."""
  return jax.tree.map(jnp.copy, unstack(weights))


def cache_sharding(weights: Weights, cache: Cache) -> Any:
  """For cache arrays [rows, K, ...]: heads over `tensor`, rows over `data` and `fsdp`, where
  they divide.
  """
  sharding = jax.tree.leaves(weights)[0].sharding
  if not isinstance(sharding, NamedSharding):
    return sharding
  rows, heads = jax.tree.leaves(cache)[0].shape[:2]
  sizes = sharding.mesh.shape
  spread = tuple(axis for axis in ("data", "fsdp") if axis in sizes)
  data = spread if rows % math.prod(sizes[axis] for axis in spread) == 0 else None
  tensor = "tensor" if heads % sizes.get("tensor", heads + 1) == 0 else None
  return NamedSharding(sharding.mesh, PartitionSpec(data, tensor))
