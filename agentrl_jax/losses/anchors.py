"""Which turns answered the same observation: hashes of the tokens between two turns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from agentrl_jax.ops.logprobs import has_previous
from agentrl_jax.ops.scales import TURN, Partition, spread, unit_sum
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
    token = batch.tokens.astype(jnp.uint32) + jnp.uint32(1)
    if batch.parent is not None:
      token += jnp.where(has_previous(batch.sample), jnp.uint32(0), _parents(batch, token, powers))
    terms = token * powers[upcoming - column]
    keys.append(jax.lax.bitcast_convert_type(unit_sum(terms, observed), jnp.int32))
  return tuple(keys)


def _parents(
  batch: TrajectoryBatch, token: UInt[Array, "B T"], powers: UInt[Array, "T+1"]
) -> UInt[Array, "B T"]:
  """What the stream that a sample continues adds to the sum at the sample's first token."""
  assert batch.parent is not None
  streams = Partition(batch.sample, batch.tokens.size)
  ids = jnp.where(batch.sample >= 0, batch.sample, streams.size)
  last = jax.ops.segment_max(batch.position.ravel(), ids.ravel(), streams.size + 1)
  before = powers[jnp.maximum(spread(last, streams) - batch.position, 0)]
  whole = unit_sum(token * before, streams)
  inside = (batch.parent >= 0) & (batch.parent != batch.sample)
  return jnp.where(inside, whole[batch.parent], jnp.uint32(0))
