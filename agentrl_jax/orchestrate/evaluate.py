"""Evaluation: the same environments, scorer and engine as training, on held-out tasks.

Each record is one sample of one problem, in the form that `analysis` reads.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.rollout.collect import Collection, Recover, collect_groups
from agentrl_jax.rollout.episode import Play
from agentrl_jax.rollout.records import Episode, Outcome, Task


@dataclasses.dataclass(frozen=True)
class Record:
  """One sample: `finished` means that the policy ended the episode itself with an answer."""

  problem: str
  sample: int
  finished: bool
  correct: bool
  tokens: int
  model: str


async def evaluate(
  play: Play,
  tasks: Sequence[Task],
  samples: int,
  *,
  label: str,
  seed: int,
  concurrency: int = 64,
  progress: Callable[[int, int], None] | None = None,
  recover: Recover | None = None,
) -> list[Record]:
  """`samples` episodes of each task. A faulted episode is no sample: it is left out, never scored
  0.

  Raises what `collect_groups` raises.
  """
  collection = Collection(members=samples, concurrency=concurrency)
  groups = await collect_groups(
    play, tasks, collection, label=label, seed=seed, progress=progress, recover=recover
  )
  return [
    record(episode, sample, label)
    for group in groups
    for sample, episode in enumerate(group)
    if episode.outcome is not Outcome.FAULT
  ]


def record(episode: Episode, sample: int, model: str) -> Record:
  """The evaluation record of a scored episode."""
  task = episode.task
  return Record(
    problem=f"{task.family}/{task.split}/{task.seed}",
    sample=sample,
    finished=bool(episode.info["finished"]),
    correct=episode.outcome is Outcome.SUCCESS,
    tokens=episode.action_tokens,
    model=model,
  )


def summary(records: Sequence[Record]) -> dict[str, float]:
  """Means over problems of each problem's mean; the standard error is over problems."""
  if not records:
    raise ValueError("no evaluation records: every episode faulted")
  names = sorted({r.problem for r in records})
  by_problem = [[r for r in records if r.problem == name] for name in names]
  success = np.array([np.mean([r.correct for r in rows]) for rows in by_problem])
  finished = np.array([np.mean([r.finished for r in rows]) for rows in by_problem])
  error = success.std(ddof=1) / np.sqrt(len(success)) if len(success) > 1 else float("nan")
  return {
    "success": float(success.mean()),
    "success_standard_error": float(error),
    "finished": float(finished.mean()),
    "tokens": float(np.mean([r.tokens for r in records])),
    "samples": float(len(records)),
  }


def described(score: Mapping[str, float]) -> str:
  """A summary for a person to read; without a standard error where one problem gives none."""
  error = score["success_standard_error"]
  spread = f" ± {error:.3f}" if math.isfinite(error) else ""
  return (
    f"success {score['success']:.3f}{spread}, finished {score['finished']:.3f}, "
    f"{score['tokens']:.1f} tokens an episode"
  )


def check_writable(path: Path) -> None:
  """Raises the OSError that `write_records` would end with, before there is anything to lose."""
  if path.is_dir():
    raise IsADirectoryError(f"{path} is a directory, expected a file for the records")
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix(".partial")
  partial.touch()
  partial.unlink()


def write_records(
  records: Sequence[Record], path: Path, settings: Mapping[str, Any] | None = None
) -> None:
  """One JSON line a record, complete or not there; beside it `settings`, what was evaluated."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix(".partial")
  partial.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))
  path.with_suffix(".json").unlink(missing_ok=True)
  partial.replace(path)
  if settings is not None:
    path.with_suffix(".json").write_text(json.dumps(settings) + "\n")


def read_settings(path: Path) -> Mapping[str, Any] | None:
  """What `write_records` was told; None where nothing whole was written."""
  try:
    return json.loads(path.with_suffix(".json").read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return None


def read_records(path: Path) -> list[Record]:
  """What `write_records` wrote."""
  return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
