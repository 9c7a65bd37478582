"""What training changes, born under its sharding: shapes first, then shardings, then memory."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from agentrl_jax.learner.critic import Critic, MakeCritic
from agentrl_jax.learner.products import AS_MODEL, Beside, Products, specs_of
from agentrl_jax.models import lora, precision
from agentrl_jax.models.hf import load_weights
from agentrl_jax.models.lora import Adapters
from agentrl_jax.models.model import Model, ParamSpec, Weights, cast, initialize, is_spec
from agentrl_jax.models.sharding import partition, replicated


@flax.struct.dataclass
class TrainState:
  """Steps taken, master weights (float32, or as `Lora.base_dtype` says where they are frozen), and
  the optimizer's memory of what it trains.
  """

  step: Int[Array, ""]  # calls of the step function, skipped ones included
  skipped: Int[Array, ""]  # of them, those dropped because a gradient was not finite
  weights: Weights
  opt_state: optax.OptState
  critic: Critic | None = None  # trained by the same optimizer, where a loss needs values
  beside: Beside | None = None  # adapters, which then are what is trained; scales of FP8

  @property
  def policy(self) -> Any:
    """What of the policy is trained: its adapters if it has some, else its weights."""
    adapters = None if self.beside is None else self.beside.adapters
    return self.weights if adapters is None else adapters


def learned(policy: Any, critic: Critic | None) -> Any:
  """What the optimizer sees: what is trained of the policy, and the critic beside it if there is
  one.
  """
  return policy if critic is None else (policy, critic)


def abstract_state(
  model: Model,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  *,
  critic: MakeCritic | None = None,
  products: Products = AS_MODEL,
) -> TrainState:
  """The state as `ShapeDtypeStruct`s that carry their shardings; allocates nothing.

  What the optimizer keeps for each weight is sharded like the weight; the rest is replicated.
  """

  def born(spec: ParamSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, partition(spec, mesh, units=model.units))
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

  specs, adapter_specs = specs_of(model, products)
  weights, values, adapters = jax.tree.map(
    born, (specs, None if critic is None else critic(model), adapter_specs), is_leaf=is_spec
  )
  everywhere = replicated(mesh)
  policy = weights if adapters is None else adapters
  by_path = {
    path: leaf
    for tree in (weights, values, adapters, learned(policy, values))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Moments are trees like the weights, so a weight's path ends the paths of all that is its."""
    tails = (by_path.get(path[start:]) for start in range(len(path)))
    like = next((weight for weight in tails if weight is not None), None)
    if like is None or like.shape != leaf.shape:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)

  fresh = functools.partial(_fresh, optimizer, products)
  shapes = jax.eval_shape(fresh, weights, values, adapters)
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
  products: Products = AS_MODEL,
) -> TrainState:
  """A new state: weights from a Hugging Face `directory`, or drawn from `seed` if None.

  Drawn weights depend on the seed and on their own path in the tree only, not on the mesh. A critic
  starts from the same weights as the policy, with values of 0. Adapters are drawn from `seed`, or
  loaded from where they say.
  """
  abstract = abstract_state(model, optimizer, mesh, critic=critic, products=products)
  placed, how = state_shardings(abstract), products.lora
  held = jnp.dtype(jnp.float32 if how is None else how.base_dtype)

  def trunk(where: Weights, dtype: Any = jnp.float32) -> Weights:
    if directory is not None:
      return load_weights(model, Path(directory), shardings=where, dtype=dtype)
    drawn = jax.jit(lambda key: cast(initialize(model, key), dtype), out_shardings=where)
    return drawn(jax.random.key(seed))

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
  adapters = None
  if how is not None and placed.beside is not None:
    where = placed.beside.adapters
    if how.start is not None:
      adapters = jax.device_put(lora.load(model, how, how.start), where)
    else:
      make = jax.jit(lambda key: lora.initialize(model, how, key), out_shardings=where)
      adapters = make(jax.random.key(seed))
  start = jax.jit(
    functools.partial(_fresh, optimizer, products),
    donate_argnums=(0, 1, 2),
    out_shardings=placed,
  )
  return start(trunk(placed.weights, held), values, adapters)


def _fresh(
  optimizer: optax.GradientTransformation,
  products: Products,
  weights: Weights,
  critic: Critic | None,
  adapters: Adapters | None,
) -> TrainState:
  history = None if products.fp8 is None else precision.fresh_history(weights, products.fp8)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
    weights=weights,
    opt_state=optimizer.init(learned(weights if adapters is None else adapters, critic)),
    critic=critic,
    beside=None if adapters is history is None else Beside(adapters, history),
  )
