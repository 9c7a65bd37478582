"""Where the sampler's copy of the weights and its cache lie: as the weights it was given lay."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.models import moe
from agentrl_jax.models.model import Cache, Model, Weights, cast, unstack
from agentrl_jax.models.sharding import BATCH


@functools.partial(jax.jit, static_argnames="dtype")
def own_copy(weights: Weights, dtype: Any) -> Weights:
  """The weights with one tree a layer, in the dtype that is computed in, in buffers of their own:
  the given ones may be donated.
  """
  return jax.tree.map(jnp.copy, cast(unstack(weights), dtype))


def expert_options(model: Model, sharding: Any, rows: int) -> Mapping[str, Any]:
  """Options of `Model.decode` that compute a mixture's experts where they lie; none where the rows
  of a call cannot be spread over the cache's mesh as `moe.sharded_experts` spreads them.
  """
  mesh = getattr(sharding, "mesh", None)
  if model.functions.forward_routed is None or not isinstance(mesh, Mesh):
    return {}
  parts = math.prod(mesh.shape[axis] for axis in BATCH[0])
  if mesh.size == 1 or rows % parts or mesh.shape[BATCH[1]] > 1:
    return {}
  return {"experts": moe.sharded_experts(mesh)}


def cache_sharding(weights: Weights, cache: Cache) -> Any:
  """For cache arrays [rows, K, ...]: heads (or channels) over `tensor`, rows as those of a batch,
  where all of them divide.
  """
  sharding = jax.tree.leaves(weights)[0].sharding
  if not isinstance(sharding, NamedSharding):
    return sharding
  arrays = jax.tree.leaves(cache)
  rows, heads = arrays[0].shape[0], {array.shape[1] for array in arrays}
  sizes = sharding.mesh.shape
  spread = tuple(axis for axis in BATCH[0] if axis in sizes)
  data = spread if rows % math.prod(sizes[axis] for axis in spread) == 0 else None
  parts = sizes.get("tensor", 0)
  tensor = "tensor" if parts and not any(size % parts for size in heads) else None
  return NamedSharding(sharding.mesh, PartitionSpec(data, tensor))
