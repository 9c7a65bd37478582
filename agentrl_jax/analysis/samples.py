"""The table that every analysis reads: one row a sample, as sampler and verifier saw it.

Only a sample that ended with a stop token and a parseable answer is finished, and only a finished
one can succeed. A fault of the machinery is no sample: it is counted, and enters no rate.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

FIELDS = ("problem", "sample", "finished", "correct", "tokens", "model")


@dataclasses.dataclass(frozen=True)
class Samples:
  """Samples of one model, S rows on P problems. Rows of the same problem are pooled.

  Raises:
    ValueError: naming the problem, when columns differ in length or a problem has no sample.
  """

  problems: tuple[str, ...]  # P names, sorted and unique
  problem: Int[np.ndarray, " S"]  # index into `problems`
  finished: Bool[np.ndarray, " S"]  # stop token and parseable answer within the budget
  correct: Bool[np.ndarray, " S"]  # the verifier's word, also on unfinished samples
  tokens: Int[np.ndarray, " S"]  # sampled by the policy
  model: str = ""
  faults: int = 0

  def __post_init__(self):
    columns = (self.problem, self.finished, self.correct, self.tokens)
    if len({len(column) for column in columns}) != 1:
      raise ValueError(
        f"columns have lengths {[len(column) for column in columns]}, expected equal"
      )
    if list(self.problems) != sorted(set(self.problems)):
      raise ValueError("problems must be sorted and unique")
    empty = np.flatnonzero(self.per_problem(np.ones(len(self.problem), bool)) == 0)
    if empty.size:
      raise ValueError(f"problem {self.problems[empty[0]]!r} has no sample of {self.model!r}")

  @property
  def success(self) -> Bool[np.ndarray, " S"]:
    """Finished and correct."""
    return self.finished & self.correct

  def per_problem(self, rows: Bool[np.ndarray, " S"]) -> Int[np.ndarray, " P"]:
    """How many of the rows marked True each problem has."""
    return np.bincount(self.problem[rows], minlength=len(self.problems))

  def counts(self) -> tuple[Int[np.ndarray, " P"], ...]:
    """Samples, finished and successful samples of each problem."""
    everything = np.ones(len(self.problem), bool)
    return tuple(self.per_problem(rows) for rows in (everything, self.finished, self.success))

  def only(self, problems: Iterable[str]) -> "Samples":
    """The samples of these problems. Raises KeyError for one that is not there."""
    wanted = tuple(sorted(set(problems)))
    where = {name: index for index, name in enumerate(self.problems)}
    place = np.full(len(self.problems), -1)
    place[[where[name] for name in wanted]] = np.arange(len(wanted))
    rows = place[self.problem] >= 0
    return dataclasses.replace(
      self,
      problems=wanted,
      problem=place[self.problem[rows]],
      finished=self.finished[rows],
      correct=self.correct[rows],
      tokens=self.tokens[rows],
    )


def table(rows: Iterable[Mapping[str, Any]], *, source: str = "samples") -> Samples:
  """Makes the table from rows of {problem, sample, finished, correct, tokens, model}.

  A row with a true `fault` is counted and left out. Other keys are ignored.

  Raises:
    ValueError: naming `source` and the row (from 1), for a missing field, a wrong type, a second
    model, or
      the same sample of the same problem twice.
  """
  kept, seen, faults = [], {}, 0
  for number, row in enumerate(rows, 1):
    where = f"{source}: row {number}"
    missing = [name for name in FIELDS if name not in row]
    if missing:
      raise ValueError(f"{where} lacks {', '.join(missing)}")
    if row.get("fault"):
      faults += 1
      continue
    for name, kind in (("finished", bool), ("correct", bool), ("tokens", int), ("sample", int)):
      if type(row[name]) is not kind:
        raise ValueError(f"{where}: {name} is {row[name]!r}, expected {kind.__name__}")
    key = (str(row["problem"]), row["sample"])
    if key in seen:
      raise ValueError(f"{where} repeats problem {key[0]!r} sample {key[1]} of row {seen[key]}")
    seen[key] = number
    if kept and row["model"] != kept[0]["model"]:
      raise ValueError(
        f"{where} is of model {row['model']!r}, the first is of {kept[0]['model']!r}"
      )
    kept.append(row)
  if not kept:
    raise ValueError(f"{source}: no samples ({faults} faults)")
  problems, problem = np.unique([str(row["problem"]) for row in kept], return_inverse=True)
  return Samples(
    problems=tuple(problems.tolist()),
    problem=problem,
    finished=np.array([row["finished"] for row in kept], bool),
    correct=np.array([row["correct"] for row in kept], bool),
    tokens=np.array([row["tokens"] for row in kept], np.int64),
    model=str(kept[0]["model"]),
    faults=faults,
  )


def read(path: Path | str) -> Samples:
  """The table of a jsonl file, as evaluations write it. Raises ValueError naming file and line."""
  path = Path(path)

  def rows():
    with path.open() as lines:
      for number, line in enumerate(lines, 1):
        try:
          row = json.loads(line)
        except json.JSONDecodeError as error:
          raise ValueError(f"{path}: row {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
          raise ValueError(f"{path}: row {number} is {type(row).__name__}, expected an object")
        yield row

  return table(rows(), source=str(path))


_EQUATION = re.compile(r"^(Answer:)?[\d+\-*/(). ]+= *\d+\s*\Z", re.MULTILINE)


def read_game24(path: Path | str, *, model: str) -> Samples:
  """Logged Game-of-24 samples of tree-of-thought-llm: finished means it ends with an equation.

  The logs hold no token counts; whitespace-separated words stand in for them.
  """
  rows = []
  for problem in json.loads(Path(path).read_text()):
    verdicts = problem["accs"] if "accs" in problem else [info["r"] for info in problem["infos"]]
    for sample, (text, verdict) in enumerate(zip(problem["ys"], verdicts, strict=True)):
      rows.append(
        {
          "problem": f"{problem['idx']:04d}",
          "sample": sample,
          "finished": _EQUATION.search(text) is not None,
          "correct": bool(verdict),
          "tokens": len(text.split()),
          "model": model,
        }
      )
  return table(rows, source=str(path))


def read_visits(path: Path | str, *, visits: slice, members: int = 8, model: str = "") -> Samples:
  """Some visits of one RL run to its training problems: {problem: [accuracy of `members`, ...]}.

  The form of One-Shot-RLVR's log (arXiv:2504.20571). It holds neither lengths nor stop reasons:
  every sample counts as finished, so nothing can be said of finishing, and tokens are 0.

  Raises:
    ValueError: naming the problem, where an accuracy is not a multiple of 1 / members.
  """
  counts = {}
  for problem, accuracies in json.loads(Path(path).read_text()).items():
    chosen = np.asarray(accuracies[visits]) * members
    if chosen.size == 0 or not np.array_equal(chosen, np.round(chosen)):
      raise ValueError(
        f"{path}: problem {problem!r} has accuracies {accuracies[visits]}, expected "
        f"one or more multiples of 1/{members}"
      )
    counts[f"{int(problem):05d}"] = (members * len(chosen),) * 2 + (int(chosen.sum()),)
  return from_counts(counts, model=model)


def from_counts(counts: Mapping[str, tuple[int, int, int]], *, model: str = "") -> Samples:
  """The table of problem -> (samples, finished, successful); tokens, which are not known, are 0.

  Raises ValueError, naming the problem, unless samples >= finished >= successful >= 0.
  """
  problems = sorted(counts)
  for name in problems:
    total, finished, success = counts[name]
    if not total >= finished >= success >= 0:
      raise ValueError(f"problem {name!r}: {success} of {finished} of {total} samples")
  place = [np.arange(counts[name][0]) for name in problems]
  rows = list(zip(problems, place, strict=True))
  size = sum(map(len, place))
  return Samples(
    problems=tuple(problems),
    problem=np.repeat(np.arange(len(problems)), [len(index) for index in place]),
    finished=np.concatenate([index < counts[name][1] for name, index in rows]),
    correct=np.concatenate([index < counts[name][2] for name, index in rows]),
    tokens=np.zeros(size, np.int64),
    model=model,
  )


def join(tables: Sequence[Samples], *, model: str) -> Samples:
  """Independent samples of one model as one table. Raises ValueError unless problems are equal."""
  first = tables[0]
  for other in tables[1:]:
    if other.problems != first.problems:
      odd = sorted(set(other.problems) ^ set(first.problems))[0]
      raise ValueError(f"problem {odd!r} is not in every table")

  def column(name: str) -> np.ndarray:
    return np.concatenate([getattr(table, name) for table in tables])

  return Samples(
    problems=first.problems,
    **{name: column(name) for name in ("problem", "finished", "correct", "tokens")},
    model=model,
    faults=sum(table.faults for table in tables),
  )


def cut(samples: Samples, budget: int) -> Samples:
  """The same samples had they been stopped at `budget` tokens: longer ones were not finished."""
  return dataclasses.replace(
    samples,
    finished=samples.finished & (samples.tokens <= budget),
    tokens=np.minimum(samples.tokens, budget),
  )


def lengths(
  samples: Samples, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)
) -> dict[str, list[float]]:
  """Quantiles of tokens for finished and unfinished samples; an empty list where there is none."""
  groups = {"finished": samples.finished, "unfinished": ~samples.finished}
  return {
    name: np.quantile(samples.tokens[rows], quantiles).tolist() if rows.any() else []
    for name, rows in groups.items()
  }
