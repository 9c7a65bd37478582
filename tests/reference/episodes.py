"""Random and hand-made episodes for tests: ragged, truncated, faulted, forked."""

import numpy as np

from agentrl_jax.rollout.records import Episode, Fault, Kind, Outcome, Sample, Segment, Task

VOCAB = 50


def segment(rng: np.random.Generator, kind: Kind, size: int, turn: int = -1) -> Segment:
  ids = rng.integers(1, VOCAB, size).astype(np.int32)
  if kind is not Kind.ACTION:
    return Segment(kind, ids)
  logp = -rng.exponential(1.0, size).astype(np.float32)
  return Segment(kind, ids, turn, logp, rng.integers(0, 3, size).astype(np.int32))


def episode(
  rng: np.random.Generator,
  name: str,
  turns_per_sample: list[int],
  *,
  prompt: int = 4,
  truncated: bool = False,
  fault: bool = False,
) -> Episode:
  """An episode with one sample per entry; each turn is 1-5 tokens followed by 0-3 observation
  tokens.
  """
  samples, turn = [], 0
  for index, turns in enumerate(turns_per_sample):
    parts = [segment(rng, Kind.PROMPT, prompt)]
    for _ in range(turns):
      parts.append(segment(rng, Kind.ACTION, int(rng.integers(1, 6)), turn))
      parts.append(segment(rng, Kind.OBSERVATION, int(rng.integers(0, 4))))
      turn += 1
    samples.append(Sample(tuple(parts), VOCAB, name, index, "edit" if index else None))
  rewards = tuple(float(x) for x in rng.normal(size=turn).round(3))
  return Episode(
    task=Task("toy", "train", 0, {}),
    trajectory_id=name,
    group_id=name.split("/")[0],
    samples=tuple(samples),
    reward_parts=tuple({"part": r} for r in rewards),
    turn_rewards=rewards,
    outcome=Outcome.FAULT if fault else Outcome.SUCCESS,
    terminated=not truncated,
    truncated=truncated,
    fault=Fault("env", "broke") if fault else None,
  )


def groups(rng: np.random.Generator, count: int = 3, members: int = 4) -> list[list[Episode]]:
  """Groups with forks, truncations and faults sprinkled in."""
  made = []
  for g in range(count):
    made.append(
      [
        episode(
          rng,
          f"{g}/{m}",
          [int(rng.integers(1, 4)) for _ in range(int(rng.choice([1, 1, 2])))],
          truncated=bool(rng.random() < 0.3),
          fault=bool(rng.random() < 0.15),
        )
        for m in range(members)
      ]
    )
  return made
