"""What a run has to say at its end: the split of its held-out change, in words and a picture.

Reads a work directory (`metrics.jsonl`, `evaluation/{before,step_N,after}.jsonl`) and writes
`report.json` and `report.png` into it.
"""

import json
import re
from pathlib import Path

import numpy as np

from agentrl_jax.analysis.finishing import Summary, decompose, summarize
from agentrl_jax.analysis.intervals import Interval, bootstrap_means, percentile
from agentrl_jax.analysis.plots import PARTS, HeldOut, plot_run, read_curve
from agentrl_jax.analysis.samples import Samples, read


def report_run(workdir: Path, *, width: int = 100) -> str:
  """Writes the report of a run and returns its lines for a person, at most `width` columns wide.

  Without evaluations of at least 2 samples a problem before and after training, only the curve is
  drawn. Raises ValueError, naming
  file and row, for a broken evaluation log, and FileNotFoundError without `metrics.jsonl`.
  """
  steps = max((row["step"] + 1 for row in read_curve(workdir / "metrics.jsonl")), default=0)
  evaluations = _evaluations(workdir / "evaluation", steps)
  before, after = evaluations.get("before"), evaluations.get("after")
  summary, lines = None, ["no evaluations before and after training: nothing to split"]
  if before and after:
    summary = _split(before[1], after[1])
    lines = ["fewer than 2 samples a problem before training: nothing to split"]
  if summary is not None:
    lines = describe(summary, width)
    _write_summary(workdir / "report.json", summary)
  curves = _held_out(list(evaluations.values()))
  plot_run(workdir / "metrics.jsonl", summary, workdir / "report.png", held_out=curves)
  return "\n".join([*lines, f"plot: {workdir / 'report.png'}"])


def describe(summary: Summary, width: int = 100) -> list[str]:
  """The split in a few lines, with bars to scale."""
  base, trained = summary["pass@1 base"], summary["pass@1 rl"]
  lines = [
    f"held-out pass@1 {base.estimate:.1%} -> {trained.estimate:.1%}, "
    f"change {_points(summary['change'])} points ({summary.problems} problems, 95% intervals)"
  ]
  room = max(0, width - 42)
  scale = max(abs(summary[name].estimate) for name in PARTS) or 1.0
  for name in PARTS:
    bar = "#" * round(room * min(1.0, abs(summary[name].estimate) / scale))
    lines.append(f"  {name:<12} {_points(summary[name]):<24} {bar}".rstrip())
  null = summary["null reach, split half"]
  of_base = f"{100 * null.estimate:.1f} points of reach"
  lines.append(f"  (a second draw of the base would show {of_base} over the first)")
  if summary.share is None:
    lines.append(f"  share of finishing not quoted: {summary.share_reason}")
  else:
    share = summary.share
    lines.append(f"  share of finishing {share.estimate:.0%} [{share.low:.0%}, {share.high:.0%}]")
  return lines


def _evaluations(directory: Path, steps: int) -> dict[str, tuple[int, Samples]]:
  """Name -> (steps taken before it, its samples), in the order of steps."""
  found = {}
  for path in sorted(directory.glob("*.jsonl")):
    middle = re.fullmatch(r"step_(\d+)", path.stem)
    if path.stem in ("before", "after") or middle:
      step = int(middle[1]) if middle else {"before": 0, "after": steps}[path.stem]
      found[path.stem] = (step, read(path))
  return dict(sorted(found.items(), key=lambda item: item[1][0]))


def _split(base: Samples, trained: Samples) -> Summary | None:
  """The split on the problems that have samples in both; faults may have emptied one."""
  shared = set(base.problems) & set(trained.problems)
  if not shared:
    raise ValueError("the evaluations before and after training share no problem")
  base, trained = base.only(shared), trained.only(shared)
  return summarize(decompose(base, trained)) if base.counts()[0].min() > 1 else None


def _held_out(evaluations: list[tuple[int, Samples]]) -> HeldOut:
  """Success and finishing rates of each evaluation, with bootstrap intervals over problems."""
  curves: dict[str, list[tuple[int, Interval]]] = {"success": [], "finished": []}
  for step, samples in evaluations:
    count, finished, success = samples.counts()
    rates = np.stack([success / count, finished / count], axis=1)
    drawn = bootstrap_means([rates], resamples=1000, seed=0)
    for column, name in enumerate(curves):
      value = percentile(rates[:, column].mean(), drawn[:, column])
      curves[name].append((step, value))
  return curves


def _write_summary(path: Path, summary: Summary) -> None:
  rows = {name: value._asdict() for name, value in summary.rows.items()}
  share = summary.share._asdict() if summary.share else {"withheld": summary.share_reason}
  text = json.dumps({"problems": summary.problems, **rows, "share of finishing": share}, indent=2)
  partial = path.with_suffix(".partial")
  partial.write_text(text + "\n")
  partial.replace(path)


def _points(value: Interval) -> str:
  return f"{100 * value.estimate:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
