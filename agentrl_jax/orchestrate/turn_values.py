"""A critic's values of recorded episodes, for what reads turns (`analysis.turn_scores`)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from agentrl_jax.learner.critic import Critic
from agentrl_jax.learner.evaluate import EvaluateFn
from agentrl_jax.models.model import Weights
from agentrl_jax.orchestrate.pack import pack, unpack
from agentrl_jax.rollout.records import Episode
from agentrl_jax.types import TrajectoryBatch


class EpisodeValues(NamedTuple):
  """V before each action token, the token's turn, and V after the end (0 where it terminated)."""

  value: Float[np.ndarray, "N"]
  turn: Int[np.ndarray, "N"]
  boot: float


def episode_values(
  evaluate: EvaluateFn,
  weights: Weights,
  critic: Critic,
  episodes: Sequence[Episode],
  *,
  row_length: int,
  micro_rows: int,
) -> list[EpisodeValues]:
  """Of scored episodes with at least one turn, in their order.

  Args:
    evaluate: of `make_evaluate` with as many rows as `micro_rows`.
    weights: the policy's, which a critic without a trunk reads.
    critic: the critic.
    episodes: what was recorded.
    row_length: positions a row; an episode must fit.
    micro_rows: rows at a time, over all data shards.
  """
  groups = [[episode] for episode in episodes]
  packed = pack(groups, row_length=row_length, micro_rows=micro_rows, min_members=1)
  if len(packed.episodes) != len(episodes):
    raise ValueError(f"{len(packed.episodes)} of {len(episodes)} episodes have a scored turn")
  batch = packed.batch
  found = np.asarray(evaluate(weights, batch, critic).value)
  values, turns = unpack(found, packed), unpack(np.asarray(batch.turn), packed)
  boot = [_last(found, batch, i) if e.truncated else 0.0 for i, e in enumerate(episodes)]
  return [
    EpisodeValues(v, (t - t[0]).astype(int), b) for v, t, b in zip(values, turns, boot, strict=True)
  ]


def _last(values: Float[np.ndarray, "B T"], batch: TrajectoryBatch, index: int) -> float:
  """At the last position of a trajectory: a truncated one's sentinel."""
  mine = np.asarray(batch.traj == index)
  order = np.lexsort((np.asarray(batch.position)[mine], np.asarray(batch.sample)[mine]))
  return float(values[mine][order[-1]])
