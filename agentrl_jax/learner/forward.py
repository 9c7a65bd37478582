"""The model over packed rows as the learner runs it: on its mesh, in its dtype, with the experts
that the batch tells it to take.
"""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from agentrl_jax.learner.products import AS_MODEL, Products
from agentrl_jax.models import context, moe
from agentrl_jax.models.kernels import PROVEN, Kernels
from agentrl_jax.models.model import Model, Weights
from agentrl_jax.models.remat import Remat, over_batch, save_everything
from agentrl_jax.types import RouterSums, TrajectoryBatch

# (weights, batch) -> ([B T D] hidden states before the head, what the routers did if there are any)
Forward = Callable[[Weights, TrajectoryBatch], tuple[Float[Array, "B T D"], RouterSums | None]]


def make_forward(
  model: Model,
  mesh: Mesh,
  *,
  dtype: DTypeLike,
  remat: Remat = save_everything,
  products: Products = AS_MODEL,
  kernels: Kernels = PROVEN,
) -> Forward:
  """The forward pass of weights that `products.ready` made; `remat` as in `models.remat`,
  `kernels` those that attention may use.

  Raises ValueError for a family with a recurrent state on a mesh that cuts rows.
  """
  if mesh.shape["context"] > 1 and model.functions.whole_prefixes:
    raise ValueError(
      f"mesh.context is {mesh.shape['context']}, expected 1: {model.family} carries a state along "
      "each row, which is not computed in parts"
    )
  layered = over_batch(mesh, remat)
  routed = model.functions.forward_routed is not None
  # Not every family has layers to transform.
  options: dict[str, Any] = {} if layered is save_everything else {"remat": layered}
  if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
    options["attend_rows"] = context.attend_on(mesh, kernels)
  options |= products.options
  if routed and mesh.size > 1:
    options["experts"] = moe.sharded_experts(mesh)

  def forward(
    weights: Weights, traj: TrajectoryBatch
  ) -> tuple[Float[Array, "B T D"], RouterSums | None]:
    if traj.experts is not None and not routed:
      raise ValueError(f"the batch tells which experts to take, {model.family} has none")
    told = {} if traj.experts is None else {"replay": traj.experts}
    hidden, routing = model.forward_routed(
      weights,
      traj.tokens,
      traj.sample,
      traj.position,
      parent=traj.parent,
      dtype=dtype,
      **options,
      **told,
    )
    return hidden, None if routing is None else routing.sums

  return forward
