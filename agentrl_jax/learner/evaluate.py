"""What the model says about a batch: inside the step with gradient, here without it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from agentrl_jax.learner.critic import Critic, hidden_states, values
from agentrl_jax.learner.rows import split, take
from agentrl_jax.models.model import Model, Weights
from agentrl_jax.models.remat import Remat, over_batch, save_everything
from agentrl_jax.models.sharding import batch_sharding
from agentrl_jax.ops.logprobs import token_logprobs
from agentrl_jax.types import PolicyEval, TrajectoryBatch

EvaluateFn = Callable[..., PolicyEval]  # (weights, TrajectoryBatch, critic=None)


def policy_eval(
  model: Model,
  weights: Weights,
  traj: TrajectoryBatch,
  critic: Critic | None = None,
  *,
  temperature: float,
  dtype: DTypeLike,
  remat: Remat = save_everything,
) -> PolicyEval:
  """Log-prob and entropy (nats, at `temperature`) of every action token; zero elsewhere.

  With a critic also the value of the state before every token of a trajectory.
  """
  hidden = hidden_states(model, weights, traj, dtype=dtype, remat=remat)
  logp, entropy = token_logprobs(
    hidden,
    model.unembedding(weights),
    traj.tokens,
    traj.sample,
    traj.action,
    temperature=temperature,
  )
  value, logits = (
    (None, None) if critic is None else values(model, critic, hidden, traj, dtype, remat)
  )
  return PolicyEval(logp=logp, entropy=entropy, value=value, value_logits=logits)


def cast(weights: Weights, dtype: DTypeLike) -> Weights:
  """The weights in the dtype that the model computes in."""
  return jax.tree.map(lambda w: w.astype(dtype), weights)


def make_evaluate(
  model: Model, mesh: Mesh, *, temperature: float = 1.0, rows: int, dtype: DTypeLike = jnp.float32
) -> EvaluateFn:
  """A jitted pass without gradient over the whole packed batch.

  Args:
    model: the model.
    mesh: where the weights live.
    temperature: the sampling temperature.
    rows: rows that each data shard handles at a time; B must be a multiple of rows x data shards.
    dtype: what the model computes in; log-probs are float32.

  Returns:
    evaluate(weights, batch, critic=None) -> PolicyEval [B T]. Blocks of rows without an action
    token are not computed.
  """

  placed = over_batch(mesh, save_everything)

  def evaluate(
    weights: Weights, batch: TrajectoryBatch, critic: Critic | None = None
  ) -> PolicyEval:
    compute = cast(weights, dtype)
    blocks, count = split(batch, rows, mesh)

    def asked(block: TrajectoryBatch) -> PolicyEval:
      found = policy_eval(
        model, compute, block, critic, temperature=temperature, dtype=dtype, remat=placed
      )
      return dataclasses.replace(found, value_logits=None)  # only a loss asks for them

    def silent(block: TrajectoryBatch) -> PolicyEval:
      shapes = jax.eval_shape(asked, block)
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def one(index: jax.Array) -> PolicyEval:
      block = take(blocks, index)
      return jax.lax.cond(block.action.any(), asked, silent, block)

    out = jax.lax.map(one, jnp.arange(count))
    return jax.tree.map(lambda x: x.reshape(batch.tokens.shape), out)

  return jax.jit(evaluate, out_shardings=batch_sharding(mesh))
