"""Learning curves of the arms: `python -m experiments.mpo.plot`, into results/curves.png."""

from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl_jax.envs.turn_chain import FAMILIES
from experiments import report
from experiments.mpo.config import ARMS
from experiments.mpo.table import NAMES
from experiments.report import Results
from experiments.study import files_of
from launch import command

RESULTS = flags.DEFINE_string("results", None, "Default: experiments/mpo/results.")
# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLOURS = ("#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#0072B2", "#E69F00", "#999999")


def draw(results: Results, path: Path) -> None:
  """Held-out success of each family and of their mean, averaged over the seeds that there are."""
  figure = Figure(figsize=(13.0, 3.8), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  panels = figure.subplots(1, len(FAMILIES) + 1, sharey=True)
  for axes, column in zip(panels, (*FAMILIES, "mean"), strict=True):
    for arm, colour in zip(ARMS, COLOURS, strict=True):
      runs = [one["result"]["held_out"] for (a, _), one in results.items() if a == arm]
      if not runs:
        continue
      steps = sorted(map(int, runs[0]))
      values = [[_value(run[str(s)], column) for s in steps] for run in runs]
      label = f"{NAMES[arm]} ({len(runs)})"
      axes.plot(steps, np.mean(values, axis=0), color=colour, label=label, linewidth=1.6)
    axes.set_title(column, fontsize=10)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
  panels[0].set_ylabel("held-out success")
  panels[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  figure.savefig(partial, format="png")
  partial.replace(path)


def _value(row: dict[str, float], column: str) -> float:
  return float(np.mean([row[f] for f in FAMILIES])) if column == "mean" else row[column]


def main(arguments: object) -> int:
  del arguments
  folder = Path(RESULTS.value) if RESULTS.value else files_of("mpo", "cpu").results
  results = report.read("mpo", folder)
  if not any(arm in ARMS for arm, _ in results):
    raise ValueError(f"no complete results in {folder}; first: python -m experiments.mpo.run")
  draw(results, folder / "curves.png")
  print(folder / "curves.png")
  return 0


if __name__ == "__main__":
  command.run(main)
