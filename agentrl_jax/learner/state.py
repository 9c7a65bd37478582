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

  step: Int[Array, ""] | jax.ShapeDtypeStruct  # calls of the step function, skipped ones included
  skipped: (
    Int[Array, ""] | jax.ShapeDtypeStruct
  )  # of them, those dropped because a gradient was not finite
  weights: Weights
  opt_state: optax.OptState


def abstract_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """The state as `ShapeDtypeStruct`s that carry their shardings; allocates nothing.

  What the optimizer keeps for each weight is sharded like the weight; the rest is replicated.
  """
  everywhere = replicated(mesh)
  weights = jax.tree.map(
    lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),
    model.abstract(),
    shardings(model, mesh),
    is_leaf=is_spec,
  )
  opt_state = optax.tree.map_params(
    optimizer,
    lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
    jax.eval_shape(optimizer.init, weights),
    weights,
    transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=everywhere
    ),
  )
  scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
  return TrainState(step=scalar, skipped=scalar, weights=weights, opt_state=opt_state)


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

  def rest(weights: Weights) -> tuple[Array, Array, optax.OptState]:
    return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), optimizer.init(weights)

  rest = jax.jit(rest, out_shardings=(placed.step, placed.skipped, placed.opt_state))
  step, skipped, opt_state = rest(weights)
  return TrainState(step=step, skipped=skipped, weights=weights, opt_state=opt_state)
