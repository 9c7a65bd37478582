"""The study's pictures: `python -m experiments.finishing.plot` writes them beside the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl_jax.analysis.plots import FAINT, INK, PARTS
from experiments import report
from experiments.finishing.measure import BUDGET, CONTROLLED, RECIPES, RECORDED, interval
from experiments.finishing.table import splits
from experiments.study import files_of
from launch import command

CURVES = {"base": ("#666666", "base or before"), "rl": ("#0072B2", "trained or after")}


def plot_truth(results: report.Results, path: Path) -> None:
  """Measured parts along each controlled run (points) on their closed forms (lines)."""
  figure, axes = _panels(len(CONTROLLED), 1)
  for place, arm in enumerate(CONTROLLED):
    seeds = [one["result"]["curve"] for (name, _), one in results.items() if name == arm]
    for part, color in PARTS.items():
      for curve in seeds:
        steps = [point["step"] for point in curve]
        axes[place].plot(steps, [100 * point["truth"][part] for point in curve], color=color)
        measured = [100 * point["measured"][part] for point in curve]
        axes[place].plot(steps, measured, "o", color=color, markersize=4)
      axes[place].plot([], [], "o-", color=color, label=part)
    _dress(axes[place], f"only {arm} is trained", "step", "points of pass@1")
  axes[0].legend(frameon=False, fontsize=8)
  _save(figure, path)


def plot_pairs(pairs: Sequence[Mapping[str, Any]], path: Path) -> None:
  """Every pair as a stacked bar of its three parts, with the change as a mark."""
  figure, axes = _panels(1, 1, height=0.6 + 0.24 * len(pairs), width=8.5)
  for row, one in enumerate(reversed(pairs)):
    left = {1: 0.0, -1: 0.0}
    for part, color in PARTS.items():
      value = 100 * interval(one, part).estimate
      side = 1 if value >= 0 else -1
      axes[0].barh(row, value, left=left[side], color=color, height=0.7, zorder=2)
      left[side] += value
    change = interval(one, "change")
    error = [[100 * (change.estimate - change.low)], [100 * (change.high - change.estimate)]]
    axes[0].errorbar(
      100 * change.estimate, row, xerr=error, fmt="|", color=INK, markersize=9, zorder=3
    )
  names = [f"{one['pair']} ({one['set']})" for one in reversed(pairs)]
  axes[0].set_yticks(range(len(pairs)), names, fontsize=7)
  axes[0].axvline(0, color=INK, linewidth=0.8)
  for part, color in PARTS.items():
    axes[0].barh([0], [0], color=color, label=part)
  axes[0].legend(frameon=False, fontsize=8, loc="lower right")
  _dress(axes[0], "What changed", "points of pass@1; mark: the change with its interval", "")
  _save(figure, path)


def plot_curves(pairs: Sequence[Mapping[str, Any]], path: Path) -> None:
  """pass@k (solid) and pass^k (dashed) of both models, a panel a pair."""
  columns = min(3, len(pairs))
  figure, axes = _panels(columns, -(-len(pairs) // columns))
  for place, one in enumerate(pairs):
    for who, (color, label) in CURVES.items():
      for curve, style in (("pass@k", "-"), ("pass^k", "--")):
        table = one["curves"][who][curve]
        ks = sorted(map(int, table))
        middle, low, high = np.array([table[str(k)] for k in ks]).T
        name = f"{label}, {curve}" if place == 0 else None
        axes[place].plot(ks, middle, style, color=color, label=name)
        axes[place].fill_between(ks, low, high, color=color, alpha=0.12, linewidth=0)
    axes[place].set_xscale("log", base=2)
    axes[place].set_ylim(0, 1)
    _dress(axes[place], f"{one['pair']}\n{one['set']}", "k", "")
  for spare in axes[len(pairs) :]:
    spare.set_visible(False)
  axes[0].legend(frameon=False, fontsize=7)
  _save(figure, path)


def _panels(columns: int, rows: int, *, width: float = 4.2, height: float = 3.4):
  figure = Figure(figsize=(width * columns, height * rows), dpi=110, layout="constrained")
  FigureCanvasAgg(figure)
  return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
  axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color=INK)
  axes.set_xlabel(x, fontsize=8)
  axes.set_ylabel(y, fontsize=8)
  axes.tick_params(color=FAINT, labelsize=8)
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#EEEEEE", zorder=0)
  axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> None:
  figure.savefig(path, format="png")
  print(path)


def main(folder: Path) -> None:
  """All three pictures of the results in `folder`, as far as there are results."""
  results = report.read("finishing", folder)
  if any(arm in CONTROLLED for arm, _ in results):
    plot_truth(results, folder / "truth.png")
  pairs = splits(results, RECIPES, BUDGET) + splits(results, RECORDED)
  if pairs:
    plot_pairs(pairs, folder / "pairs.png")
  shown = splits(results, RECORDED) or pairs[:1]
  if shown:
    plot_curves(shown, folder / "pass_at_k.png")


if __name__ == "__main__":
  RESULTS = flags.DEFINE_string("results", None, "Default: experiments/finishing/results.")
  command.run(lambda _: main(Path(RESULTS.value or files_of("finishing", "cpu").results)))
