"""From results to a verdict: means with standard errors, paired differences, tables of Markdown.

An experiment's `table.py` has `table(results) -> str` and `verdict(results) -> Verdict`, which
follows the decision rule of its own specification. Published numbers carry their source; one that
is not known is printed as unknown.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import flags
from scipy.special import stdtrit

from agentrl_jax.analysis.intervals import Interval, bootstrap_means, percentile
from experiments.study import files_of, read_result
from launch import command

flags.disclaim_key_flags()  # `--help` of a paper's command shows them

Results = Mapping[tuple[str, int], Mapping[str, Any]]  # (arm, seed) -> its file, complete ones only
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclasses.dataclass(frozen=True)
class Verdict:
  """One paper in one line. `effect` says what `interval` is of, with its unit."""

  paper: str
  claim: str
  verdict: Literal["supported", "refuted", "inconclusive", "not run"]
  effect: str = "-"
  interval: Interval | None = None
  command: str = "-"
  date: str = "-"
  commit: str = "-"


@dataclasses.dataclass(frozen=True)
class Published:
  """A number as its source states it."""

  value: str
  source: str

  def __str__(self) -> str:
    return f"{self.value} ({self.source})"


UNKNOWN = Published("unknown", "not in any source we read")


def read(paper: str, folder: Path | None = None) -> Results:
  """The complete results of an experiment, in order of arm and seed; none is an empty mapping."""
  folder = folder or files_of(paper, "cpu").results
  found = [read_result(path) for path in sorted(folder.glob("*_*.json"))]
  return {(one["arm"], one["seed"]): one for one in found if one and one.get("complete")}


def by_seed(results: Results, arm: str, *path: str) -> dict[int, Any]:
  """`result[path[0]][path[1]]...` of an arm, by seed. Raises KeyError naming what is not there."""
  found = {}
  for (name, seed), one in results.items():
    if name == arm:
      value = one["result"]
      for key in path:
        if key not in value:
          raise KeyError(f"{arm}_{seed}: no {'.'.join(path)} in its result")
        value = value[key]
      found[seed] = value
  return found


def mean_error(values: Sequence[float]) -> tuple[float, float]:
  """Mean and its standard error over seeds; the error of fewer than two is NaN."""
  error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
  return float(np.mean(values)), float(error)


def plus_minus(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
  """Mean ± standard error, in multiples of `unit`; "-" where there is no value."""
  if not len(values):
    return "-"
  mean, error = mean_error([value / unit for value in values])
  known = f" ± {error:.{digits}f}" if math.isfinite(error) else " (one seed)"
  return f"{mean:.{digits}f}{known}"


def paired(
  one: Mapping[int, float], other: Mapping[int, float], *, confidence: float = 0.9
) -> Interval:
  """Mean of one - other over the seeds that both have, with Student's t interval.

  Raises ValueError with fewer than two such seeds.
  """
  seeds = sorted(set(one) & set(other))
  if len(seeds) < 2:
    raise ValueError(f"paired differences need two seeds of both arms, there are {len(seeds)}")
  mean, error = mean_error([one[seed] - other[seed] for seed in seeds])
  half = float(stdtrit(len(seeds) - 1, 0.5 + confidence / 2)) * error
  return Interval(mean, mean - half, mean + half)


def paired_tasks(
  one: Sequence[float], other: Sequence[float], *, confidence: float = 0.9, resamples: int = 4000
) -> Interval:
  """Mean of one - other over tasks, with the bootstrap's interval; seeds pooled by the caller."""
  difference = np.asarray(one, float) - np.asarray(other, float)
  drawn = bootstrap_means([difference[:, None]], resamples=resamples, seed=0)[:, 0]
  return percentile(float(difference.mean()), drawn, confidence)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table of Markdown."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def provenance(results: Results) -> dict[str, Any]:
  """`command`, `date` and `commit` of a `Verdict`: the newest date, every commit."""
  about = [one["about"] for one in results.values()]
  paper = next(iter(results.values()))["paper"]
  return {
    "command": f"python -m experiments.{paper}.run",
    "date": max(one["date"] for one in about),
    "commit": " ".join(sorted({one["commit"] for one in about})),
  }


def line(verdict: Verdict) -> str:
  """The one line of a paper."""
  interval = "" if verdict.interval is None else f" {verdict.interval}"
  parts = (verdict.paper, verdict.claim, verdict.verdict, verdict.effect + interval)
  return " | ".join([*parts, verdict.command, verdict.date, verdict.commit])


def put(readme: Path, text: str) -> None:
  """Puts the table between the marks of a README. Raises ValueError where they are not there."""
  before, begin, rest = readme.read_text().partition(BEGIN)
  _, end, after = rest.partition(END)
  if not (begin and end):
    raise ValueError(f"{readme} has no lines {BEGIN} and {END}")
  readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def main(
  paper: str, table: Callable[[Results], str], verdict: Callable[[Results], Verdict]
) -> None:
  """The command of `table.py`: prints; with `--write`, also into the experiment's README."""
  results = flags.DEFINE_string("results", None, f"Default: experiments/{paper}/results.")
  write = flags.DEFINE_bool("write", False, "Also put the table into the experiment's README.")

  def body(arguments: object) -> int:
    del arguments
    found = read(paper, Path(results.value) if results.value else None)
    if not found:
      raise ValueError(f"no complete results; first: python -m experiments.{paper}.run")
    one = verdict(found)
    text = f"{table(found)}\n**{one.verdict}**: {one.effect} {one.interval or ''}\n"
    print(text)
    if write.value:
      put(files_of(paper, "cpu").results.parent / "README.md", text)
    return 0

  command.run(body)
