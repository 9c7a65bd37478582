"""What the model says about a batch: inside the step with gradient, here without it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from agentrl_jax.learner.critic import Critic, span, values
from agentrl_jax.learner.forward import Forward, make_forward
from agentrl_jax.learner.products import AS_MODEL, Beside, Products, ready
from agentrl_jax.learner.rows import split, take
from agentrl_jax.models.kernels import PROVEN, Kernels
from agentrl_jax.models.model import Model, Weights, cast
from agentrl_jax.models.sharding import batch_sharding, replicated
from agentrl_jax.ops.logprobs import token_logprobs
from agentrl_jax.types import PolicyEval, TrajectoryBatch

EvaluateFn = Callable[..., PolicyEval]  # (weights, TrajectoryBatch, critic=None, beside=None)


def policy_eval(
  model: Model,
  forward: Forward,
  weights: Weights,
  traj: TrajectoryBatch,
  critic: Critic | None = None,
  *,
  mesh: Mesh,
  temperature: float,
  dtype: DTypeLike,
) -> PolicyEval:
  """Log-prob and entropy (nats, at `temperature`) of every action token, zero elsewhere; with a
  critic the value of the state before every token of a trajectory; and what routers did.

  `forward` is the model's on `mesh`, `weights` as `products.ready` made them.
  """
  hidden, routers = forward(weights, traj)
  logp, entropy = token_logprobs(
    hidden,
    model.unembedding(weights),
    traj.tokens,
    traj.sample,
    traj.action,
    temperature=temperature,
    spread=batch_sharding(mesh),
  )
  found = PolicyEval(logp, entropy, routers=routers)
  if critic is None:
    return found
  value, logits = values(forward, critic, hidden, traj, dtype)
  return dataclasses.replace(found, value=value, value_logits=logits, value_span=span(critic))


def make_evaluate(
  model: Model,
  mesh: Mesh,
  *,
  temperature: float = 1.0,
  rows: int,
  dtype: DTypeLike = jnp.float32,
  products: Products = AS_MODEL,
  kernels: Kernels = PROVEN,
) -> EvaluateFn:
  """A jitted pass without gradient over the whole packed batch.

  Args:
    model: the model.
    mesh: where the weights live.
    temperature: the sampling temperature.
    rows: rows that each data shard handles at a time; B must be a multiple of rows x data shards.
    dtype: what the model computes in; log-probs are float32.
    products: how its products are computed.
    kernels: those that attention may use, by platform.

  Returns:
    evaluate(weights, batch, critic=None, beside=None) -> PolicyEval [B T], of the weights with
    their adapters where `beside` holds them, with the sums of routers over the
    batch. Blocks of rows without an action token are not computed.
  """
  forward = make_forward(model, mesh, dtype=dtype, products=products, kernels=kernels)

  def evaluate(
    weights: Weights,
    batch: TrajectoryBatch,
    critic: Critic | None = None,
    beside: Beside | None = None,
  ) -> PolicyEval:
    compute = ready(products, cast(weights, dtype), beside)
    blocks, count = split(batch, rows, mesh)

    def asked(block: TrajectoryBatch) -> PolicyEval:
      found = policy_eval(
        model, forward, compute, block, critic, mesh=mesh, temperature=temperature, dtype=dtype
      )
      return dataclasses.replace(found, value_logits=None)  # only a loss asks for them

    def silent(block: TrajectoryBatch) -> PolicyEval:
      shapes = jax.eval_shape(asked, block)
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def one(index: jax.Array) -> PolicyEval:
      block = take(blocks, index)
      return jax.lax.cond(block.action.any(), asked, silent, block)

    out = jax.lax.map(one, jnp.arange(count))
    routers = jax.tree.map(lambda x: x.sum(0), out.routers)
    tokens = jax.tree.map(
      lambda x: x.reshape(batch.tokens.shape), dataclasses.replace(out, routers=None)
    )
    tokens = jax.lax.with_sharding_constraint(tokens, batch_sharding(mesh))
    routers = jax.lax.with_sharding_constraint(routers, replicated(mesh))
    return dataclasses.replace(tokens, routers=routers)

  return jax.jit(evaluate)
