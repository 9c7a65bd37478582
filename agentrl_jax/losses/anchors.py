"""Which turns answered the same observation: hashes of the tokens between two turns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from agentrl_jax.ops.scales import TURN, Partition, unit_sum
from agentrl_jax.types import TrajectoryBatch

BASES = (
  0x01000193,
  0x9E3779B1,
)  # odd multipliers; two hashes of 32 bits make collisions negligible


def observation_before(batch: TrajectoryBatch) -> tuple[Int[Array, "U"], ...]:
  """Keys of the non-action tokens between each turn and the one before it in its stream.

  The first turn of a stream answers the prompt. Equal observations have equal keys everywhere.
  """
  length = batch.tokens.shape[1]
  column = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], batch.tokens.shape)
  upcoming = jax.lax.cummin(jnp.where(batch.action, column, length), axis=1, reverse=True)
  at = jnp.minimum(upcoming, length - 1)
  pick = lambda x: jnp.take_along_axis(x, at, axis=1)  # noqa: E731
  belongs = (batch.sample >= 0) & (upcoming < length) & (pick(batch.sample) == batch.sample)
  belongs &= jnp.logical_not(batch.action)
  observed = Partition(jnp.where(belongs, pick(TURN(batch).ids), -1), batch.turn_traj.shape[0])
  keys = []
  for base in BASES:
    powers = jnp.cumprod(jnp.full(length + 1, base, jnp.uint32), dtype=jnp.uint32)
    terms = (batch.tokens.astype(jnp.uint32) + jnp.uint32(1)) * powers[upcoming - column]
    keys.append(jax.lax.bitcast_convert_type(unit_sum(terms, observed), jnp.int32))
  return tuple(keys)
