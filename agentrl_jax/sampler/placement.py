"""Where the sampler's copy of the weights and its cache lie: as the weights it was given lay."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.models import matmul_fp8, moe, precision
from agentrl_jax.models.model import Cache, Model, Weights, cast, unstack
from agentrl_jax.models.precision import Fp8
from agentrl_jax.models.sharding import BATCH


@dataclasses.dataclass(frozen=True)
class SamplerFp8:
  """What of the sampler is in FP8: `weights` as they are held (see `precision.STORED`), the keys
  and values of the `cache`, and `products`, as a learner computes them.

  Held weights are multiplied in the engine's dtype unless `products` says otherwise. `products`
  holds weights in FP8 in any case, and scales by what there is now.
  """

  weights: bool = False
  cache: bool = False
  products: Fp8 | None = None

  def __post_init__(self):
    if self.products is not None and self.products.history:
      raise ValueError(
        f"products.history is {self.products.history}, expected 0: the sampler keeps no history"
      )

  @property
  def options(self) -> Mapping[str, Any]:
    """Of `Model.decode`."""
    return {} if self.products is None else {"matmul": matmul_fp8.matmul}


NO_FP8 = SamplerFp8()


@functools.partial(jax.jit, static_argnames=("dtype", "fp8"))
def own_copy(weights: Weights, dtype: Any, fp8: SamplerFp8 = NO_FP8) -> Weights:
  """The weights with one tree a layer, in the dtype that is computed in or as `fp8` says, in
  buffers of their own: the given ones may be donated.
  """
  own = cast(unstack(weights), dtype)
  if fp8.weights or fp8.products is not None:
    own = precision.stored(own, fp8.products)
  return jax.tree.map(jnp.copy, own)


def cache_dtype(dtype: Any, fp8: SamplerFp8) -> Any:
  return jnp.dtype(jnp.float8_e4m3fn) if fp8.cache else dtype


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
