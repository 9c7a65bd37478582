"""Curves of the arms and the probe: `python -m experiments.ac2.plot`, into results/curves.png."""

from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import report
from experiments.ac2.config import ARMS, PROBE
from experiments.ac2.table import NAMES, curve, spent
from experiments.report import Results
from experiments.study import files_of
from launch import command

RESULTS = flags.DEFINE_string("results", None, "Default: experiments/ac2/results.")
# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")


def draw(results: Results, path: Path) -> None:
  """Held-out score against decoding and all FLOPs and steps, one line a seed; and the probe."""
  figure = Figure(figsize=(14.0, 3.8), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  panels = figure.subplots(1, 4)
  for axes, what in zip(panels, ("decode", "total", "steps"), strict=False):
    _curves(axes, results, what)
  panels[0].set_ylabel("held-out score")
  panels[0].legend(frameon=False, fontsize=7)
  _probe(panels[3], results)
  for axes in panels:
    axes.spines[["top", "right"]].set_visible(False)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  figure.savefig(partial, format="png")
  partial.replace(path)


def _curves(axes: Axes, results: Results, what: str) -> None:
  for arm, colour in zip(ARMS, COLOURS, strict=True):
    runs = [one["result"] for (a, _), one in sorted(results.items()) if a == arm]
    for i, run in enumerate(runs):
      scores = curve(run)
      steps = sorted(scores)
      across = steps if what == "steps" else [spent(run, s, what) for s in steps]
      label = f"{NAMES[arm]} ({len(runs)})" if not i else None
      axes.plot(across, [scores[s] for s in steps], color=colour, label=label, linewidth=1.2)
  axes.set_xlabel("steps" if what == "steps" else f"{what} FLOPs")


def _probe(axes: Axes, results: Results) -> None:
  found = [one["result"] for (a, _), one in sorted(results.items()) if a == PROBE]
  if not found:
    axes.set_visible(False)
    return
  ratios = found[0]["ratios"]
  axes.plot(ratios, np.mean([one["critic"] for one in found], axis=0), color=COLOURS[2])
  axes.axhline(float(np.mean([one["whole"] for one in found])), color=COLOURS[0])
  axes.set_title("critic (falling) and whole responses", fontsize=9)
  axes.set_xlabel("noise of the critic / spread of values")
  axes.set_ylabel("correlation with exact advantages")


def main(arguments: object) -> int:
  del arguments
  folder = Path(RESULTS.value) if RESULTS.value else files_of("ac2", "cpu").results
  results = report.read("ac2", folder)
  if not any(arm in (*ARMS, PROBE) for arm, _ in results):
    raise ValueError(f"no complete results in {folder}; first: python -m experiments.ac2.run")
  draw(results, folder / "curves.png")
  print(folder / "curves.png")
  return 0


if __name__ == "__main__":
  command.run(main)
