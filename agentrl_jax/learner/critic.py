"""The critic: a value head on the policy's hidden states, or on those of a model of its own.

V[t] is of the state before token t, so it is read from the hidden state of the position before.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from agentrl_jax.learner.forward import Forward
from agentrl_jax.losses.values import expected_value
from agentrl_jax.models.heads import (
  CategoricalHead,
  ValueHead,
  abstract_categorical_head,
  abstract_value_head,
  value,
  value_logits,
)
from agentrl_jax.models.model import Model, Weights, cast
from agentrl_jax.ops.logprobs import previous
from agentrl_jax.types import TrajectoryBatch


@flax.struct.dataclass
class Critic:
  """What a critic trains beside the policy; `trunk` is None where it reads the policy's states."""

  head: ValueHead | CategoricalHead
  trunk: Weights = None
  detached: bool = flax.struct.field(pytree_node=False, default=False)  # its loss moves no policy


MakeCritic = Callable[[Model], Critic]  # with `ParamSpec` leaves


def on_policy(model: Model) -> Critic:
  """A head on the policy: cheap, and its loss shapes the policy's features too."""
  return Critic(abstract_value_head(model.config.embed))


def detached(model: Model) -> Critic:
  """A head on the policy that only reads it: value pre-training leaves the policy where it is."""
  return Critic(abstract_value_head(model.config.embed), detached=True)


def of_its_own(model: Model) -> Critic:
  """A second model that starts as the policy does: twice the memory, nothing shared."""
  return Critic(abstract_value_head(model.config.embed), model.abstract())


def categorical(*, low: float, high: float, bins: int = 51, own: bool = False) -> MakeCritic:
  """Values as distributions, for `categorical_value_loss` with the same `low` and `high`.

  `own` gives it a model of its own, else it reads the policy's hidden states.
  """

  def make(model: Model) -> Critic:
    head = abstract_categorical_head(model.config.embed, bins, low, high)
    return Critic(head, model.abstract() if own else None)

  return make


def span(critic: Critic) -> tuple[float, float] | None:
  """Where the bins of a categorical critic begin and end; None of one that gives numbers."""
  return None if isinstance(critic.head, ValueHead) else (critic.head.low, critic.head.high)


def values(
  forward: Forward,
  critic: Critic,
  hidden: Float[Array, "B T D"],
  traj: TrajectoryBatch,
  dtype: DTypeLike,
) -> tuple[Float[Array, "B T"], Float[Array, "B T K"] | None]:
  """V of the state before each token of a trajectory, 0 elsewhere, and a categorical head's logits;
  float32.
  """
  if critic.trunk is not None:
    own = dataclasses.replace(traj, experts=None)  # what is told is of the policy's routers
    hidden, _ = forward(cast(critic.trunk, dtype), own)
  if critic.detached:
    hidden = jax.lax.stop_gradient(hidden)
  if isinstance(critic.head, ValueHead):
    found, logits = previous(value(critic.head, hidden), traj.sample), None
  else:
    logits = previous(value_logits(critic.head, hidden), traj.sample)
    found = expected_value(logits, critic.head.low, critic.head.high)
  return jnp.where(traj.traj >= 0, found, 0.0), logits
