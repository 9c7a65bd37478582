"""The critic: a value head on the policy's hidden states, or on those of a model of its own.

V[t] is of the state before token t, so it is read from the hidden state of the position before.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from agentrl_jax.models.heads import ValueHead, abstract_value_head, value
from agentrl_jax.models.model import Model, Weights
from agentrl_jax.ops.logprobs import previous
from agentrl_jax.types import TrajectoryBatch


@flax.struct.dataclass
class Critic:
  """What a critic trains beside the policy; `trunk` is None where it reads the policy's states."""

  head: ValueHead
  trunk: Weights = None


MakeCritic = Callable[[Model], Critic]  # with `ParamSpec` leaves


def on_policy(model: Model) -> Critic:
  """A head on the policy: cheap, and its loss shapes the policy's features too."""
  return Critic(abstract_value_head(model.config.embed))


def of_its_own(model: Model) -> Critic:
  """A second model that starts as the policy does: twice the memory, nothing shared."""
  return Critic(abstract_value_head(model.config.embed), model.abstract())


def values(
  model: Model,
  critic: Critic,
  hidden: Float[Array, "B T D"],
  traj: TrajectoryBatch,
  dtype: DTypeLike,
) -> Float[Array, "B T"]:
  """V of the state before each token of a trajectory, 0 elsewhere; float32."""
  if critic.trunk is not None:
    trunk = jax.tree.map(lambda w: w.astype(dtype), critic.trunk)
    hidden = model.forward(
      trunk, traj.tokens, traj.sample, traj.position, parent=traj.parent, dtype=dtype
    )
  return jnp.where(traj.traj >= 0, previous(value(critic.head, hidden), traj.sample), 0.0)
