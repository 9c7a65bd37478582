"""Several updates a step: the whole batch each time, with weight only where an update looks.

Credit and denominators are those of the whole batch, shapes stay the same, and micro-batches
without weight are not computed.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from agentrl_jax.orchestrate import hosts
from agentrl_jax.types import LossBatch


def minibatches(
  batch: LossBatch, count: int, micro_rows: int, seed: Sequence[int]
) -> Iterator[LossBatch]:
  """`count` batches that share out the micro-batches of `batch` at random, each in one of them.

  Weights are multiplied by `count`, and sums over the batch's routers divided by it, so that each
  update sees means over about its own part; with one, the batch itself. Fewer come where fewer
  micro-batches hold a token with weight.

  Args:
    batch: what `prepare` returned.
    count: updates a step.
    micro_rows: rows of a micro-batch; a trajectory lies within one.
    seed: of the order.
  """
  if count == 1:
    yield batch
    return
  critic = batch.credit.value_weight
  weights = [hosts.whole(w) for w in (batch.weight, critic) if w is not None]
  busy = np.flatnonzero(
    np.any([(w != 0).any(1).reshape(-1, micro_rows).any(1) for w in weights], axis=0)
  )
  aux = dataclasses.replace(
    batch.aux, routers=jax.tree.map(lambda total: total / count, batch.aux.routers)
  )
  order = np.random.default_rng(seed).permutation(busy)
  for part in (order[i::count] for i in range(min(count, len(busy)))):
    rows = np.isin(np.arange(len(weights[0])) // micro_rows, part)[:, None]
    policy, *values = (np.where(rows, count * w, 0.0).astype(np.float32) for w in weights)
    credit = dataclasses.replace(batch.credit, value_weight=values[0] if values else None)
    yield dataclasses.replace(batch, aux=aux, weight=policy, credit=credit)
