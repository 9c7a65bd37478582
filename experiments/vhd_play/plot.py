"""Scores by form, and rewards while training: `python -m experiments.vhd_play.plot`."""

from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import report
from experiments.report import Results
from experiments.study import files_of
from experiments.vhd_play.table import FORMS, NAMES, UNSEEN, means
from launch import command

RESULTS = flags.DEFINE_string("results", None, "Default: experiments/vhd_play/results.")
# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLOURS = ("#999999", "#D55E00", "#0072B2", "#E69F00")


def draw(results: Results, path: Path) -> None:
  """Bars: held-out score of each arm in each form, dots its seeds. Lines: the reward of each
  training step, which is each arm's own.
  """
  figure = Figure(figsize=(11.0, 3.8), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  bars, lines = figure.subplots(1, 2)
  columns = (*FORMS, UNSEEN)
  for i, (arm, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
    values = [means(results, arm, column) for column in columns]
    if not values[0]:
      continue
    places = np.arange(len(columns)) + 0.2 * (i - 1.5)
    label = f"{NAMES[arm]} ({len(values[0])})"
    bars.bar(places, [np.mean(v) for v in values], 0.18, color=colour, label=label)
    for place, found in zip(places, values, strict=True):
      bars.plot([place] * len(found), found, "k.", markersize=3)
    curves = [r["steps"]["reward"] for r in report.by_seed(results, arm).values() if "steps" in r]
    if curves:
      lines.plot(np.mean(curves, axis=0), color=colour, linewidth=1.6)
  bars.set_xticks(range(len(columns)), ["F: answer", "I: act, told", "A: act", "A, unseen family"])
  bars.set_ylabel("held-out score, 0 naive to 1 best")
  bars.legend(frameon=False, fontsize=7)
  lines.set_xlabel("step")
  lines.set_ylabel("own reward of the step's episodes")
  for axes in (bars, lines):
    axes.spines[["top", "right"]].set_visible(False)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  figure.savefig(partial, format="png")
  partial.replace(path)


def main(arguments: object) -> int:
  del arguments
  folder = Path(RESULTS.value) if RESULTS.value else files_of("vhd_play", "cpu").results
  results = report.read("vhd_play", folder)
  if not results:
    raise ValueError(f"no complete results in {folder}; first: python -m experiments.vhd_play.run")
  draw(results, folder / "scores.png")
  print(folder / "scores.png")
  return 0


if __name__ == "__main__":
  command.run(main)
