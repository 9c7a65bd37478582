"""All papers: `python -m experiments.all --table` prints one line each; without it, runs them.

A paper is a folder here with `run.py` and `table.py`.
"""

import importlib
import subprocess
import sys
from pathlib import Path

from absl import flags

from experiments import arms, report, study
from launch import command

TABLE = flags.DEFINE_bool("table", False, "Print the lines of the committed results; run nothing.")
PAPERS = flags.DEFINE_list("papers", None, "Which folders; default: all.")
SCALE = flags.DEFINE_enum("scale", "cpu", arms.SCALES, "As of each run.")


def papers() -> list[str]:
  """The experiments that there are, by folder."""
  return sorted(path.parent.name for path in Path(__file__).parent.glob("*/table.py"))


def line(paper: str) -> str:
  """The paper's line, from its committed results."""
  module = importlib.import_module(f"experiments.{paper}.table")
  results = report.read(paper)
  if not results:
    run = f"python -m experiments.{paper}.run"
    return report.line(report.Verdict(paper, module.CLAIM, "not run", command=run))
  return report.line(module.verdict(results))


def main(arguments: object) -> int:
  del arguments
  chosen = PAPERS.value or papers()
  unknown = sorted(set(chosen) - set(papers()))
  if unknown:
    raise ValueError(f"unknown paper {unknown[0]!r}; there are {', '.join(papers())}")
  failures = 0
  for paper in chosen:
    if TABLE.value:
      print(line(paper))
    else:
      run = [sys.executable, "-m", f"experiments.{paper}.run", f"--scale={SCALE.value}"]
      failures += subprocess.run(run, cwd=study.ROOT, check=False).returncode != 0
  return failures


if __name__ == "__main__":
  command.run(main)
