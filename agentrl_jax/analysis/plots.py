"""One picture of a run: how it learned, and what it learned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentrl_jax.analysis.finishing import Summary
from agentrl_jax.analysis.intervals import Interval

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
CURVES = {"success": "#0072B2", "finished": "#E69F00", "reward": "#999999"}
PARTS = {"finishing": "#E69F00", "reliability": "#0072B2", "reach": "#009E73"}
INK, FAINT = "#222222", "#BBBBBB"

HeldOut = Mapping[str, Sequence[tuple[int, Interval]]]  # curve -> (step, value with interval)


def plot_run(
  metrics: Path, summary: Summary | None, path: Path, *, held_out: HeldOut | None = None
) -> None:
  """Saves the training curve and, given a summary, the split of the held-out change, as a PNG.

  Args:
    metrics: a run's `metrics.jsonl` with `step` and any of success, finished, reward a line.
    summary: of base and trained model on held-out problems; None leaves its panel out.
    path: the PNG; written whole or not at all.
    held_out: evaluations to mark on the training curve, by the number of steps taken before them.

  Raises ValueError, naming the file and line, where a line other than the last is not JSON.
  """
  rows = read_curve(metrics)
  panels = 1 if summary is None else 2
  figure = Figure(figsize=(6.2 * panels, 4.4), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  figure.get_layout_engine().set(w_pad=0.15)  # pyright: ignore
  axes = figure.subplots(1, panels, squeeze=False)[0]
  draw_curve(axes[0], rows, held_out or {})
  if summary is not None:
    draw_split(axes[1], summary)
  partial = path.with_name(path.name + ".partial")
  figure.savefig(partial, format="png")
  partial.replace(path)


def read_curve(path: Path) -> list[dict[str, Any]]:
  """The rows of a metrics file; a last line that is still being written is left out."""
  lines = path.read_text().split("\n")
  rows = []
  for number, line in enumerate(lines[:-1], 1):
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}: line {number} is not JSON ({error})") from error
  return rows


def draw_curve(axes: Axes, rows: Sequence[Mapping[str, Any]], held_out: HeldOut) -> None:
  """Training means (thin: each step, thick: smoothed) and held-out points with intervals."""
  for name, color in CURVES.items():
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    label = f"{name}, training"
    if points:
      steps, values = np.array(points, float).T
      axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
      axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
    if held_out.get(name):
      steps = [step for step, _ in held_out[name]]
      middle, low, high = np.array([value for _, value in held_out[name]]).T
      axes.errorbar(
        steps, middle, yerr=[middle - low, high - middle], label=f"{name}, held out",
        color=color, marker="o", markersize=6, markeredgecolor="white", capsize=3, linestyle="none",
        zorder=3, clip_on=False,
      )  # fmt: skip
  axes.set_title("How it learned", loc="left", fontweight="bold", color=INK)
  axes.set_xlabel("step")
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=max(1.0, axes.get_ylim()[1]))
  axes.margins(x=0.02)
  _quiet(axes)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def draw_split(axes: Axes, summary: Summary) -> None:
  """A waterfall from the base model's pass@1 over the three parts to the trained model's."""
  base, trained = summary["pass@1 base"], summary["pass@1 rl"]
  labels = ["base", *PARTS, "trained"]
  level, tops = base.estimate, []
  for place, name in enumerate(PARTS, 1):
    part = summary[name]
    axes.bar(place, part.estimate, bottom=level, color=PARTS[name], width=0.62, zorder=2)
    axes.plot([place - 1 + 0.31, place + 0.31], [level, level], color=FAINT, linewidth=1, zorder=1)
    end = level + part.estimate
    _error_bar(axes, place, end, part)
    tops.append(max(level, level + part.high))
    level = end
  axes.plot([3.31, 4.31], [level, level], color=FAINT, linewidth=1, zorder=1)
  for place, value in ((0, base), (4, trained)):
    axes.bar(place, value.estimate, color="#666666", width=0.62, zorder=2)
    _error_bar(axes, place, value.estimate, value)
  tops = [base.high, *tops, trained.high]
  texts = [
    f"{base.estimate:.1%}",
    *(_points(summary[name]) for name in PARTS),
    f"{trained.estimate:.1%}",
  ]
  head = max(tops)
  for place, (top, text) in enumerate(zip(tops, texts, strict=True)):
    axes.text(
      place, top + 0.02 * head, text, ha="center", va="bottom", fontsize=8.5, color=INK, zorder=4
    )
  axes.set_ylim(min(0.0, axes.get_ylim()[0]), head * 1.18 + 1e-3)
  axes.set_xticks(range(5), labels)
  axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  axes.set_ylabel("pass@1, held out")
  null = summary["null reach, split half"].estimate
  axes.set_xlabel(f"of reach, the base shows {100 * null:.1f} points over itself", color="#777777")
  title = "What it learned"
  if summary.share is not None:
    share = summary.share
    title += f": {share.estimate:.0%} [{share.low:.0%}, {share.high:.0%}] by finishing"
  axes.set_title(title, loc="left", fontweight="bold", color=INK)
  _quiet(axes)


def smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
  """Centred mean over `width` neighbours, fewer at the ends."""
  half = width // 2
  return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _points(part: Interval) -> str:
  return f"{100 * part.estimate:+.1f}\n[{100 * part.low:+.1f}, {100 * part.high:+.1f}]"


def _error_bar(axes: Axes, place: float, end: float, value: Interval) -> None:
  error = [[value.estimate - value.low], [value.high - value.estimate]]
  axes.errorbar(place, end, yerr=error, color=INK, capsize=4, linewidth=1.2, zorder=3)


def _quiet(axes: Axes) -> None:
  axes.spines[["top", "right"]].set_visible(False)
  axes.spines[["left", "bottom"]].set_color(FAINT)
  axes.tick_params(color=FAINT, labelcolor=INK)
  axes.grid(axis="y", color="#EEEEEE", zorder=0)
  axes.set_axisbelow(True)
