"""When does a noisy critic beat whole responses? Without training: the base's own rule, whose
values are known exactly.

Groups of 8 chunks of 4 steps from states that the rule reaches. Advantages from noisy endpoint
values (lambda 0), and from the outcomes of whole responses (lambda 1), are correlated with those
from exact values.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from agentrl_jax.envs import ledger
from agentrl_jax.rollout.environment import Message
from agentrl_jax.rollout.records import Task
from experiments.ac2 import config
from experiments.study import Place

MEMBERS, CHUNK = 8, 4
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def probe(place: Place) -> Mapping[str, Any]:
  """Correlations by the noise of the critic over the spread of exact endpoint values."""
  count = int(config.settings(config.PROBE, place.scale)["states"])
  values = endpoint_values(count, place.seed)
  return curves(values, np.random.default_rng((place.seed, 1)))


def endpoint_values(count: int, seed: int) -> Float[np.ndarray, "G N"]:
  """Exact values after each chunk of each group."""
  rows = []
  for i in range(count):
    task = ledger.make_task("train", 200_000 + seed * count + i)
    draw = random.Random(f"probe/{seed}/{i}")
    start = go_on(task, [], draw.choice((0, 4, 8)), draw)
    ends = [go_on(task, start, CHUNK, draw) for _ in range(MEMBERS)]
    rows.append([ledger.chance_of_misled(task, end) for end in ends])
  return np.array(rows)


def go_on(task: Task, words: Sequence[str], steps: int, draw: random.Random) -> list[str]:
  """`steps` more sums by the wrong rule."""
  made = ledger.misled_response(ledger.at_prefix(task, words), draw)
  assert isinstance(made, Message)
  return [*words, *made.content.split()[:steps]]


def curves(values: Float[np.ndarray, "G N"], rng: np.random.Generator) -> dict[str, Any]:
  """Pooled correlations of centred numbers with centred exact values, and where they cross."""
  exact = centred(values)
  spread = float(np.sqrt((exact**2).mean()))
  outcome = (rng.random(values.shape) < values).astype(float)
  whole = correlation(centred(outcome), exact)
  noisy = [
    correlation(centred(values + rng.normal(0.0, ratio * spread, values.shape)), exact)
    for ratio in RATIOS
  ]
  return {
    "spread": round(spread, 6),
    "outcome_noise": round(float(np.sqrt((values * (1 - values)).mean())) / spread, 6),
    "ratios": list(RATIOS),
    "critic": [round(x, 6) for x in noisy],
    "whole": round(whole, 6),
    "crossing": crossing(RATIOS, noisy, whole),
  }


def centred(x: Float[np.ndarray, "G N"]) -> Float[np.ndarray, "G N"]:
  return x - x.mean(axis=1, keepdims=True)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
  return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def crossing(ratios: Sequence[float], falling: Sequence[float], level: float) -> float | None:
  """Where a falling curve meets a level, linearly between points; None where it does not."""
  for i in range(1, len(ratios)):
    above, below = falling[i - 1], falling[i]
    if above >= level > below:
      share = (above - level) / (above - below)
      return round(ratios[i - 1] + share * (ratios[i] - ratios[i - 1]), 6)
  return None
