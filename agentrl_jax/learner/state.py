"""What training changes, born under its sharding: shapes first, then shardings, then memory."""

from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from agentrl_jax.models.hf import load_weights
from agentrl_jax.models.model import Model, Weights, initialize, is_spec
from agentrl_jax.models.sharding import replicated, shardings


@flax.struct.dataclass
class TrainState:
  """Steps taken, float32 master weights, and the optimizer's memory of them."""

  step: Int[Array, ""]  # calls of the step function, skipped ones included
  skipped: Int[Array, ""]  # of them, those dropped because a gradient was not finite
  weights: Weights
  opt_state: optax.OptState


def abstract_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """The state as `ShapeDtypeStruct`s that carry their shardings; allocates nothing.

  What the optimizer keeps for each weight is sharded like the weight; the rest is replicated.
  """
  weights = jax.tree.map(
    lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),
    model.abstract(),
    shardings(model, mesh),
    is_leaf=is_spec,
  )
  everywhere = replicated(mesh)
  by_path = dict(jax.tree_util.tree_leaves_with_path(weights))

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Moments are trees like the weights, so a weight's path ends the paths of all that is its."""
    tails = (by_path.get(path[start:]) for start in range(len(path)))
    like = next((weight for weight in tails if weight is not None), None)
    if like is None or like.shape != leaf.shape:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)

  shapes = jax.eval_shape(lambda weights: _fresh(optimizer, weights), weights)
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
) -> TrainState:
  """A new state: weights from a Hugging Face `directory`, or drawn from `seed` if None.

  Drawn weights depend on the seed and on their own path in the tree only, not on the mesh.
  """
  placed = state_shardings(abstract_state(model, optimizer, mesh))
  if directory is None:
    draw = jax.jit(lambda key: initialize(model, key), out_shardings=placed.weights)
    weights = draw(jax.random.key(seed))
  else:
    weights = load_weights(model, Path(directory), shardings=placed.weights, dtype=jnp.float32)

  start = jax.jit(lambda w: _fresh(optimizer, w), donate_argnums=0, out_shardings=placed)
  return start(weights)


def _fresh(optimizer: optax.GradientTransformation, weights: Weights) -> TrainState:
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
    weights=weights,
    opt_state=optimizer.init(weights),
  )
