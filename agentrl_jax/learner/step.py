"""`prepare` sees the whole batch once; `step` sums gradients over micro-batches and updates.

The loss is a plain weighted sum, so gradients of micro-batches add with no rescaling.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from agentrl_jax.learner.critic import Critic, MakeCritic
from agentrl_jax.learner.evaluate import policy_eval
from agentrl_jax.learner.forward import make_forward
from agentrl_jax.learner.products import AS_MODEL, Beside, Products, ready
from agentrl_jax.learner.rows import split, take
from agentrl_jax.learner.state import TrainState, abstract_state, learned, state_shardings
from agentrl_jax.models import moe
from agentrl_jax.models.kernels import PROVEN, Kernels
from agentrl_jax.models.model import Model, Weights, cast
from agentrl_jax.models.precision import History, remembered
from agentrl_jax.models.remat import Remat, save_everything
from agentrl_jax.types import Algorithm, Aux, LossBatch, Metric, Metrics, TrajectoryBatch

PrepareFn = Callable[[TrajectoryBatch, Aux], LossBatch]
StepFn = Callable[[TrainState, LossBatch], tuple[TrainState, Metrics]]
Both = tuple[Any, Critic | None]  # what is trained of the policy, and the critic


def make_prepare(algorithm: Algorithm) -> PrepareFn:
  """A jitted function that turns a batch and frozen model outputs into what the loss reads.

  It raises ValueError where `Aux` lacks what the algorithm needs.
  """

  def prepare(batch: TrajectoryBatch, aux: Aux) -> LossBatch:
    missing = sorted(name for name in algorithm.needs if getattr(aux, name) is None)
    if missing:
      raise ValueError(f"the algorithm needs {', '.join(missing)}, which Aux does not hold")
    credit = algorithm.advantage(batch, aux)
    return LossBatch(batch, aux, credit, algorithm.weight(batch, aux, credit))

  unknown = sorted(algorithm.needs - set(Aux.__dataclass_fields__))
  if unknown:
    raise ValueError(
      f"the algorithm needs {', '.join(unknown)}; Aux has {', '.join(Aux.__dataclass_fields__)}"
    )
  return jax.jit(prepare)


def make_step(
  model: Model,
  optimizer: optax.GradientTransformation,
  algorithm: Algorithm,
  mesh: Mesh,
  *,
  micro_rows: int,
  temperature: float = 1.0,
  dtype: DTypeLike = jnp.float32,
  critic: MakeCritic | None = None,
  remat: Remat = save_everything,
  correction_rate: float = 0.0,
  products: Products = AS_MODEL,
  kernels: Kernels = PROVEN,
) -> StepFn:
  """One jitted optimizer step; the state that goes in is donated.

  Args:
    model: the model.
    optimizer: an optax transformation of float32 gradients.
    algorithm: whose loss is differentiated.
    mesh: where the state lives.
    micro_rows: rows each data shard handles at a time; B must be a multiple of micro_rows x data
      shards, and a trajectory must lie within one such block.
    temperature: the sampling temperature.
    dtype: what the model computes in, cast once a step from the master weights; gradients add up
      in float32.
    critic: what the state's critic was made by, None where it has none.
    remat: what of each layer is kept for the backward pass, see `models.remat`.
    correction_rate: by how much each step moves the corrections of routers that have them, towards
      equal load (`moe.rebalanced`); 0 leaves them as they are.
    products: how products are computed, and whether adapters are trained in place of the weights.
    kernels: those that attention may use, by platform.

  Returns:
    step(state, batch) -> (state, metrics): the loss's own metrics summed over micro-batches, and
    `loss`, `gradient_norm` (before clipping), `update_norm`, `skipped`. A step whose loss,
    gradient or update is not finite leaves weights and optimizer state as they were and counts in
    `skipped`. Micro-batches in which no token has weight are not computed.
  """
  placed = state_shardings(abstract_state(model, optimizer, mesh, critic=critic, products=products))
  forward = make_forward(model, mesh, dtype=dtype, remat=remat, products=products, kernels=kernels)
  paths, _ = jax.tree_util.tree_flatten_with_path(placed.weights)
  if correction_rate and not any(moe.is_correction(path) for path, _ in paths):
    raise ValueError(
      f"correction_rate is {correction_rate}, but no router of {model.family} has a correction"
    )

  if correction_rate and products.lora is not None:
    raise ValueError(f"correction_rate is {correction_rate}, but routers are frozen with adapters")

  def loss(
    both: Both, history: History | None, frozen: Weights, batch: LossBatch
  ) -> tuple[Float[Array, ""], tuple[Metrics, Any]]:
    trained, values = both
    if products.lora is None:
      weights = ready(products, trained, Beside(None, history))
    else:
      weights = ready(products, frozen, Beside(trained, history))
    policy = policy_eval(
      model, forward, weights, batch.traj, values, mesh=mesh, temperature=temperature, dtype=dtype
    )
    value, metrics = algorithm.loss(policy, batch)
    if not correction_rate:
      return value, (metrics, None)
    assert policy.routers is not None
    return value, (metrics, policy.routers.assigned)

  def gradients_of(
    state: TrainState, batch: LossBatch
  ) -> tuple[Both, History | None, Float[Array, ""], tuple[Metrics, Any]]:
    both = state.policy, state.critic
    compute = cast(both[0], dtype), both[1]
    history = None if state.beside is None else state.beside.history
    frozen = None if products.lora is None else cast(state.weights, dtype)
    blocks, _ = split(batch, micro_rows, mesh)
    busy = (blocks.weight != 0).any(axis=(1, 2))
    if blocks.credit.value_weight is not None:
      busy |= (blocks.credit.value_weight != 0).any(axis=(1, 2))
    order = jnp.argsort(jnp.logical_not(busy), stable=True)  # those with work come first
    differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def add_block(index: Array, total: tuple) -> tuple:
      gradients, seen, value, found = total
      block = take(blocks, order[index])
      (more, more_found), (slope, now) = differentiate(compute, history, frozen, block)
      gradients = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, slope)
      gradients = jax.lax.with_sharding_constraint(gradients, (placed.policy, placed.critic))
      seen = jax.tree.map(jnp.maximum, seen, now)
      return gradients, seen, value + more, jax.tree.map(jnp.add, found, more_found)

    value, found = jax.eval_shape(loss, compute, history, frozen, take(blocks, order[0]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (both, history, value, found))
    with jax.named_scope(f"at_most_{len(busy)}_iterations"):  # read by `jaxpr_cost`
      return jax.lax.fori_loop(0, busy.sum(dtype=jnp.int32), add_block, zeros)

  def step(state: TrainState, batch: LossBatch) -> tuple[TrainState, Metrics]:
    gradients, seen, value, (metrics, assigned) = gradients_of(state, batch)
    gradients, old = learned(*gradients), learned(state.policy, state.critic)
    norm = optax.tree.norm(gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer counts
      updates, opt_state = optimizer.update(gradients, state.opt_state, old)
    update_norm = optax.tree.norm(updates)
    good = jnp.isfinite(norm) & jnp.isfinite(value) & jnp.isfinite(update_norm)
    new = _choose(good, optax.apply_updates(old, updates), old)
    policy, values = (new, None) if state.critic is None else new
    if correction_rate:
      policy = _choose(good, moe.rebalanced(policy, assigned, correction_rate), policy)
    beside = state.beside
    if beside is not None:
      history = beside.history
      if history is not None and seen is not None:
        history = _choose(good, remembered(history, seen), history)
      beside = Beside(None if beside.adapters is None else policy, history)
    metrics = {
      **_choose(good, metrics, jax.tree.map(jnp.zeros_like, metrics)),
      "loss": _scalar(value, good),
      "gradient_norm": _scalar(norm, good),
      "update_norm": _scalar(update_norm, good),
      "skipped": Metric(1.0 - good.astype(jnp.float32), jnp.ones((), jnp.float32)),
    }
    after = TrainState(
      step=state.step + 1,
      skipped=state.skipped + jnp.where(good, 0, 1),
      weights=policy if products.lora is None else state.weights,
      opt_state=_choose(good, opt_state, state.opt_state),
      critic=values,
      beside=beside,
    )
    return after, metrics

  return jax.jit(step, donate_argnums=0, out_shardings=(placed, placed.step))


def _choose(good: Bool[Array, ""], new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def _scalar(x: Float[Array, ""], good: Bool[Array, ""]) -> Metric:
  return Metric(jnp.where(good, x, 0.0), good.astype(jnp.float32))
