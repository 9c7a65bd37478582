"""What keeps the routers of a mixture of experts balanced, beside any algorithm's loss."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.losses.arguments import not_negative
from agentrl_jax.losses.compose import add
from agentrl_jax.ops.routing import load_balance_loss, router_z_loss
from agentrl_jax.types import Algorithm, LossBatch, LossFn, Metric, Metrics, PolicyEval


@dataclasses.dataclass(frozen=True)
class Routers:
  """How a run treats its model's routers.

  Attributes:
    load_balance: coefficient of the load-balance loss; None: what the model's `config.json` says
      (`router_aux_loss_coef`), 0 where it says nothing.
    z: coefficient of the z loss.
    correction_rate: step of the corrections of routers that have them, towards equal load.
  """

  load_balance: float | None = None
  z: float = 0.0
  correction_rate: float = 0.0

  def __post_init__(self):
    not_negative(
      load_balance=self.load_balance or 0.0, z=self.z, correction_rate=self.correction_rate
    )


AS_CHECKPOINT = Routers()  # all is as the model's configuration has it


def router_loss(*, load_balance: float, z: float) -> LossFn:
  """load_balance E sum_e f_e P_e + z mean(log total)^2, means over tokens and layers.

  How often each expert is chosen, f, is of the whole batch and counted before the step
  (`Aux.routers`), so losses of micro-batches add up to that of the batch. It raises ValueError of
  models without routers.
  """
  not_negative(load_balance=load_balance, z=z)

  def loss(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    sums, whole = policy.routers, batch.aux.routers
    if sums is None or whole is None:
      raise ValueError("router losses need a mixture of experts, and Aux.routers of its batch")
    balance, square = load_balance_loss(sums, whole), router_z_loss(sums, whole)
    share = sums.tokens[0] / jnp.maximum(whole.tokens[0], 1.0)
    found = {"router_load_balance": Metric(balance, share), "router_z": Metric(square, share)}
    return load_balance * balance + z * square, found

  return loss


def with_router_loss(algorithm: Algorithm, *, load_balance: float, z: float) -> Algorithm:
  """The algorithm with `router_loss` added; unchanged where both coefficients are 0."""
  if not load_balance and not z:
    return algorithm
  more = router_loss(load_balance=load_balance, z=z)
  return algorithm._replace(loss=add(algorithm.loss, more), needs=algorithm.needs | {"routers"})
