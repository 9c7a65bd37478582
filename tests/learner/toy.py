"""A model small enough to differentiate by hand, and random packed batches for it."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.model import Family, Model, ParamSpec
from agentrl_jax.types import TrajectoryBatch

VOCABULARY, WIDTH = 16, 8


@flax.struct.dataclass
class ToyWeights:
  embedding: jax.Array
  norm: jax.Array
  head: jax.Array


def normal(key, shape, dtype):
  """From numpy, whatever the key: XLA takes seconds to compile a random draw."""
  return jnp.asarray(np.random.default_rng(shape[0]).normal(0.0, 0.5, shape), dtype)


def abstract(config):
  return ToyWeights(
    ParamSpec((VOCABULARY, WIDTH), jnp.float32, ("vocab", "embed"), normal),
    ParamSpec((WIDTH,), jnp.float32, (None,), jax.nn.initializers.ones),
    ParamSpec((WIDTH, VOCABULARY), jnp.float32, ("embed", "vocab"), normal),
  )


def forward(
  config, weights, tokens, sample, position, *, parent=None, dtype=jnp.float32, **options
):
  return (weights.embedding[tokens] * weights.norm[None, None, :]).astype(dtype)


def toy_model(forward=forward) -> Model:
  """hidden = embedding[token] * norm; logits = hidden @ head."""
  functions = Family(
    name="toy",
    abstract=abstract,
    forward=forward,
    unembedding=lambda config, weights: weights.head,
    init_cache=None,
    decode=None,
    rules=lambda config: (),
    to_hf=lambda config: {},
    units=lambda config: {},
  )
  return Model(functions, None)


def random_batch(seed: int, rows: int = 8, length: int = 12, vocabulary: int = VOCABULARY):
  """One trajectory of one turn a row, ragged, in groups of two; the last row is empty."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(3, length + 1, rows)
  lengths[-1] = 0
  inside = np.arange(length)[None] < lengths[:, None]
  row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], (rows, length))
  action = inside & (rng.random((rows, length)) < 0.6)
  action[:, 0] = False
  action[:-1, 1] = True
  label = np.where(inside, row, -1).astype(np.int32)
  logp = -rng.uniform(0.5, 4.0, (rows, length)).astype(np.float32)
  return TrajectoryBatch(
    tokens=rng.integers(0, vocabulary, (rows, length), dtype=np.int32),
    position=np.where(inside, np.arange(length)[None], 0).astype(np.int32),
    sample=label,
    traj=label,
    turn=np.where(action, row, -1).astype(np.int32),
    action=action,
    behavior_logp=np.where(action, logp, 0.0).astype(np.float32),
    behavior_version=np.zeros((rows, length), np.int32),
    turn_reward=rng.integers(0, 2, rows).astype(np.float32),
    turn_traj=np.where(lengths > 0, np.arange(rows), -1).astype(np.int32),
    traj_group=np.where(lengths > 0, np.arange(rows) // 2, -1).astype(np.int32),
    traj_truncated=np.zeros(rows, bool),
  )
