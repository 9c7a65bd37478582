"""A picture of turn scores: what runs score, and how the value went in those that scored most."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agentrl_jax.analysis.turn_scores import Trace, turn_scores, turn_values

GOOD, BAD, INK = "#0072B2", "#D55E00", "#222222"  # Okabe and Ito's
SHOWN = 8


def plot_turns(
  traces: Sequence[Trace], scale: float, threshold: float, path: Path, *, gamma: float = 1.0
) -> None:
  """Saves a PNG, whole or not at all: largest scores by outcome, and the values of the runs that
  scored most, with a mark at their highest turn.
  """
  scores = [turn_scores(t, scale, gamma) for t in traces]
  largest = np.array([s.max() for s in scores])
  figure = Figure(figsize=(10.4, 4.2), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  left, right = figure.subplots(1, 2)
  bins = np.linspace(0.0, max(float(largest.max()), 1e-9), 24)
  for success, colour, name in ((True, GOOD, "success"), (False, BAD, "failure")):
    mine = largest[[t.success is success for t in traces]]
    if len(mine):
      left.hist(mine, bins=list(bins), color=colour, alpha=0.6, label=f"{name} ({len(mine)})")
  if math.isfinite(threshold):
    left.axvline(threshold, color=INK, linestyle="--", linewidth=1, label="threshold")
  left.set_xlabel("largest turn score of the run")
  left.set_ylabel("runs")
  left.legend(frameon=False)
  for i in np.argsort(-largest, kind="stable")[:SHOWN]:
    values = np.append(turn_values(traces[i]), traces[i].boot)
    colour = GOOD if traces[i].success else BAD
    right.plot(range(len(values)), values, color=colour, linewidth=1.2, alpha=0.8)
    k = int(scores[i].argmax())
    right.plot([k], [values[k]], marker="o", color=colour, markersize=5)
  right.set_xlabel("turn (the last point is after the end)")
  right.set_ylabel("value before the turn")
  right.xaxis.set_major_locator(MaxNLocator(integer=True))
  right.set_title(f"the {min(SHOWN, len(traces))} runs that scored most", fontsize=10)
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
  partial = path.with_name(path.name + ".partial")
  figure.savefig(partial, format="png")
  partial.replace(path)
