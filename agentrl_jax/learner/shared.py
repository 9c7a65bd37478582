"""Several optimizers that take turns at one set of weights, each with a memory of its own.

The train state is the usual one with a tuple of optimizer states; `turn_of` makes a step of one of
them a step of the whole.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from agentrl_jax.learner.state import TrainState, abstract_state, make_state, state_shardings
from agentrl_jax.learner.step import StepFn
from agentrl_jax.models.model import Model
from agentrl_jax.types import LossBatch, Metrics


def abstract_shared(
  model: Model, optimizers: Sequence[optax.GradientTransformation], mesh: Mesh
) -> TrainState:
  """The state as `ShapeDtypeStruct`s with shardings, as `abstract_state`'s of one optimizer."""
  each = [abstract_state(model, optimizer, mesh) for optimizer in optimizers]
  return dataclasses.replace(each[0], opt_state=tuple(one.opt_state for one in each))


def make_shared(
  model: Model,
  optimizers: Sequence[optax.GradientTransformation],
  mesh: Mesh,
  *,
  directory: str | Path | None = None,
  seed: int = 0,
) -> TrainState:
  """A new state, as `make_state`'s of one optimizer."""
  placed = memories_of(state_shardings(abstract_shared(model, optimizers, mesh)))
  first, *others = optimizers
  state = make_state(model, first, mesh, directory=directory, seed=seed)
  more = [
    jax.jit(optimizer.init, out_shardings=placed[1 + i])(state.weights)
    for i, optimizer in enumerate(others)
  ]
  return dataclasses.replace(state, opt_state=(state.opt_state, *more))


def memories_of(state: TrainState) -> list[Any]:
  """The optimizers' states of a shared one. Raises ValueError for one optimizer's."""
  if type(state.opt_state) is not tuple:
    raise ValueError(f"opt_state is a {type(state.opt_state).__name__}, expected a tuple of states")
  return list(state.opt_state)


def turn_of(step: StepFn, index: int) -> StepFn:
  """A step made with optimizer `index`, on shared states; `step` and `skipped` count all turns."""

  def update(state: TrainState, batch: LossBatch) -> tuple[TrainState, Metrics]:
    memories = memories_of(state)
    after, metrics = step(dataclasses.replace(state, opt_state=memories[index]), batch)
    memories[index] = after.opt_state
    return dataclasses.replace(after, opt_state=tuple(memories)), metrics

  return update
