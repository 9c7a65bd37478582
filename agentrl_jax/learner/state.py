"""What training changes, born under its sharding: shapes first, then shardings, then memory."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from agentrl_jax.learner.critic import Critic, MakeCritic
from agentrl_jax.models.hf import load_weights
from agentrl_jax.models.model import Model, ParamSpec, Weights, initialize, is_spec
from agentrl_jax.models.sharding import partition, replicated


@flax.struct.dataclass
class TrainState:
  """Steps taken, float32 master weights, and the optimizer's memory of them."""

  step: Int[Array, ""]  # calls of the step function, skipped ones included
  skipped: Int[Array, ""]  # of them, those dropped because a gradient was not finite
  weights: Weights
  opt_state: optax.OptState
  critic: Critic | None = None  # trained by the same optimizer, where a loss needs values


def learned(weights: Weights, critic: Critic | None) -> Any:
  """What the optimizer sees: the policy's weights, and the critic's beside them if there is one."""
  return weights if critic is None else (weights, critic)


def abstract_state(
  model: Model,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  *,
  critic: MakeCritic | None = None,
) -> TrainState:
  """The state as `ShapeDtypeStruct`s that carry their shardings; allocates nothing.

  What the optimizer keeps for each weight is sharded like the weight; the rest is replicated.
  """

  def born(spec: ParamSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, partition(spec, mesh, units=model.units))
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

  specs = model.abstract(), None if critic is None else critic(model)
  weights, values = jax.tree.map(born, specs, is_leaf=is_spec)
  everywhere = replicated(mesh)
  by_path = dict(jax.tree_util.tree_leaves_with_path(learned(weights, values)))

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Moments are trees like the weights, so a weight's path ends the paths of all that is its."""
    tails = (by_path.get(path[start:]) for start in range(len(path)))
    like = next((weight for weight in tails if weight is not None), None)
    if like is None or like.shape != leaf.shape:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)

  shapes = jax.eval_shape(lambda *both: _fresh(optimizer, *both), weights, values)
  return jax.tree_util.tree_map_with_path(place, shapes)


def state_shardings(abstract: TrainState) -> TrainState:
  """The shardings of an abstract state, in its structure."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def make_state(
  model: Model,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  *,
  directory: str | Path | None = None,
  seed: int = 0,
  critic: MakeCritic | None = None,
) -> TrainState:
  """A new state: weights from a Hugging Face `directory`, or drawn from `seed` if None.

  Drawn weights depend on the seed and on their own path in the tree only, not on the mesh. A critic
  starts from the same weights as the policy, with values of 0.
  """
  placed = state_shardings(abstract_state(model, optimizer, mesh, critic=critic))

  def trunk(where: Weights) -> Weights:
    if directory is not None:
      return load_weights(model, Path(directory), shardings=where, dtype=jnp.float32)
    return jax.jit(lambda key: initialize(model, key), out_shardings=where)(jax.random.key(seed))

  values = None
  if critic is not None and placed.critic is not None:
    head = jax.tree.map(
      lambda spec: spec.init(jax.random.key(seed), spec.shape, spec.dtype),
      critic(model).head,
      is_leaf=is_spec,
    )
    own = placed.critic.trunk
    values = dataclasses.replace(
      placed.critic,
      head=jax.device_put(head, placed.critic.head),
      trunk=None if own is None else trunk(own),
    )
  start = jax.jit(
    lambda *both: _fresh(optimizer, *both), donate_argnums=(0, 1), out_shardings=placed
  )
  return start(trunk(placed.weights), values)


def _fresh(
  optimizer: optax.GradientTransformation, weights: Weights, critic: Critic | None
) -> TrainState:
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
    weights=weights,
    opt_state=optimizer.init(learned(weights, critic)),
    critic=critic,
  )
