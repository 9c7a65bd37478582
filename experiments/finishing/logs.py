"""Recorded samples: real models before and after training, and logs of other projects.

Paths are the user's: `AGENTRL_EVALUATIONS` holds evaluation logs, `AGENTRL_SHARED_DATA` the public
ones.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.analysis.samples import Samples, join, read, read_game24, read_visits
from experiments.arms import Place
from experiments.finishing.config import Logs
from experiments.finishing.measure import measure
from experiments.study import ROOT


def run(plan: Logs, place: Place) -> Mapping[str, Any]:
  """Every pair of the arm. Raises FileNotFoundError naming the log that is not there."""
  pairs = {
    "smollm2": smollm2,
    "calculator": calculator,
    "game24": game24,
    "visits": visits,
    "workdirs": workdirs,
  }
  splits = []
  for found in pairs[plan.kind]():
    splits.append(measure(resamples=plan.evaluation.resamples, **found))
    place.save({"splits": splits})
  return {"splits": splits}


def evaluations() -> Path:
  return Path(os.environ.get("AGENTRL_EVALUATIONS", "runs"))


def public() -> Path:
  default = ROOT.parent / "shared" / "data"
  return Path(os.environ.get("AGENTRL_SHARED_DATA", default)) / "pass_at_k"


def _before_after(folder: Path) -> tuple[Samples, Samples]:
  """The evaluation logs of a run, on the problems that faults left in both."""
  before, after = (read(folder / "evaluation" / f"{name}.jsonl") for name in ("before", "after"))
  shared = set(before.problems) & set(after.problems)
  return before.only(shared), after.only(shared)


RUNS = ("quickstart", "quickstart-seed1", "quickstart-sglang")
NAMES = ("seed 0", "seed 1", "SGLang, seed 0")


def smollm2() -> Iterator[dict[str, Any]]:
  """The three quickstart runs, each against its own base samples, and against those of all three.

  The runs begin from the same model, so their samples before training are 12 of one base.
  """
  both = [_before_after(evaluations() / run) for run in RUNS]
  shared = set.intersection(*(set(before.problems) for before, _ in both))
  base = join([before.only(shared) for before, _ in both], model="base")
  named = {"problems": "calculator", "budget": "24 a turn"}
  for name, (before, after) in zip(NAMES, both, strict=True):
    yield {**named, "pair": f"SmolLM2-135M, {name}", "base": before, "rl": after}
  for name, (_, after) in zip(NAMES, both, strict=True):
    rl = after.only(shared)
    yield {**named, "pair": f"SmolLM2-135M, {name}, 12 base samples", "base": base, "rl": rl}
  one, two = (before.only(shared) for before, _ in both[:2])
  yield {**named, "pair": "SmolLM2-135M: base against base", "base": one, "rl": two}


def calculator() -> Iterator[dict[str, Any]]:
  """`configs/tiny.py`: a transformer of 0.8M parameters, supervised and then improved by RL."""
  before, after = _before_after(evaluations() / "tiny_rl")
  named = {"pair": "tiny Llama, 0.8M", "problems": "calculator", "budget": "24 a turn"}
  yield {**named, "base": before, "rl": after}


def game24() -> Iterator[dict[str, Any]]:
  """GPT-4 with two prompts: a change that no training made. 100 problems, 100 samples each."""
  plain = read_game24(public() / "game24_standard.json", model="plain")
  thinking = read_game24(public() / "game24_cot.json", model="thinking")
  named = {"problems": "Game of 24", "budget": "as logged"}
  yield {**named, "pair": "GPT-4, plain to step-by-step prompt", "base": plain, "rl": thinking}


def visits() -> Iterator[dict[str, Any]]:
  """A real RL run's own training problems, early and late: 4 visits of 8 samples each.

  No stop reasons were logged, so only reliability and reach can be told apart.
  """
  path = public() / "one_shot_rlvr_accuracy.json"
  named = {"problems": "1,209 training problems", "budget": "as logged"}
  first, second = (read_visits(path, visits=v) for v in (slice(0, 4), slice(4, 8)))
  last = read_visits(path, visits=slice(-4, None))
  yield {**named, "pair": "One-Shot-RLVR run, visits 1-4 to its last 4", "base": first, "rl": last}
  yield {**named, "pair": "One-Shot-RLVR run, visits 1-4 to 5-8", "base": first, "rl": second}


def workdirs() -> Iterator[dict[str, Any]]:
  """Every run below `AGENTRL_EVALUATIONS` that was evaluated before and after, as other experiments
  leave them. Runs with one base sample a problem cannot be split, and are left out.
  """
  found = sorted(path.parents[1] for path in evaluations().glob("**/evaluation/after.jsonl"))
  if not found:
    raise FileNotFoundError(f"no run with evaluation/after.jsonl below {evaluations()}")
  for folder in found:
    before, after = _before_after(folder)
    if before.counts()[0].min() > 1:
      name = str(folder.relative_to(evaluations()))
      kinds = sorted({problem.split("/")[0] for problem in before.problems})
      named = {"pair": name, "problems": ", ".join(kinds)}
      yield {**named, "budget": "the run's", "base": before, "rl": after}
