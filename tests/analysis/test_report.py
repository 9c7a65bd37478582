"""The report of a run: numbers on disk, lines for a person, a picture that holds what it should."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from agentrl_jax.analysis import plots
from agentrl_jax.analysis.finishing import Summary
from agentrl_jax.analysis.intervals import Interval
from agentrl_jax.analysis.report import report_run


def write_rows(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(path, counts, samples=4):
  """counts: (finished, successful) of `samples`, a problem each."""
  write_rows(
    path,
    (
      {
        "problem": f"p{p}",
        "sample": i,
        "finished": i < finished,
        "correct": i < success,
        "tokens": 5,
        "model": path.stem,
      }
      for p, (finished, success) in enumerate(counts)
      for i in range(samples)
    ),
  )


@pytest.fixture
def workdir(tmp_path):
  rows = [{"step": s, "success": s / 10, "finished": 0.5, "reward": None} for s in range(6)]
  write_rows(tmp_path / "metrics.jsonl", rows)
  return tmp_path


def test_split_of_a_run_in_numbers_words_and_picture(workdir):
  evaluation(workdir / "evaluation" / "before.jsonl", [(2, 1), (4, 0)])
  evaluation(workdir / "evaluation" / "step_000003.jsonl", [(4, 2), (4, 0)])
  evaluation(workdir / "evaluation" / "after.jsonl", [(4, 3), (4, 2)])
  text = report_run(workdir, width=80)
  # p0: finishing 5/16, reliability 3/16; p1: reach 1/2 (see test_finishing for the arithmetic).
  saved = json.loads((workdir / "report.json").read_text())
  assert saved["finishing"]["estimate"] == 5 / 32
  assert saved["reliability"]["estimate"] == 3 / 32
  assert saved["reach"]["estimate"] == 1 / 4
  assert saved["share of finishing"]["estimate"] == pytest.approx(5 / 16)
  assert "held-out pass@1 12.5% -> 62.5%, change +50.0 [+50.0, +50.0] points (2 problems" in text
  assert "reach        +25.0 [+0.0, +50.0]" in text
  assert max(map(len, text.splitlines()[1:5])) <= 80
  assert (workdir / "report.png").read_bytes()[:4] == b"\x89PNG"
  assert not list(workdir.glob("*.partial"))


def test_without_evaluations_there_is_a_curve_only(workdir):
  assert report_run(workdir).startswith("no evaluations before and after training")
  assert (workdir / "report.png").exists()
  assert not (workdir / "report.json").exists()


def test_one_sample_a_problem_cannot_be_split(workdir):
  evaluation(workdir / "evaluation" / "before.jsonl", [(1, 1)], samples=1)
  evaluation(workdir / "evaluation" / "after.jsonl", [(1, 1)], samples=1)
  assert report_run(workdir).startswith("fewer than 2 samples")


def test_problems_lost_to_faults_are_left_out(workdir):
  evaluation(workdir / "evaluation" / "before.jsonl", [(2, 1), (4, 0)])
  evaluation(workdir / "evaluation" / "after.jsonl", [(4, 3)])
  assert "(1 problems" in report_run(workdir)


def test_curve_reads_up_to_a_cut_line_and_names_a_bad_one(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\n{"step"')
  assert plots.read_curve(path) == [{"step": 0}]
  path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is not JSON"):
    plots.read_curve(path)


def test_waterfall_ends_at_the_trained_level():
  values = {"pass@1 base": 0.25, "finishing": 0.3, "reliability": -0.1, "reach": 0.05}
  values |= {"pass@1 rl": 0.5, "null reach, split half": 0.01}
  rows = {k: Interval(v, v - 0.02, v + 0.02) for k, v in values.items()}
  axes = Figure().subplots()
  plots.draw_split(axes, Summary(rows, None, "no reason", 3))
  bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in axes.patches}
  edges = [(bars[i].get_y(), bars[i].get_y() + bars[i].get_height()) for i in range(5)]
  np.testing.assert_allclose(edges, [(0, 0.25), (0.25, 0.55), (0.55, 0.45), (0.45, 0.5), (0, 0.5)])
  assert [label.get_text() for label in axes.get_xticklabels()] == [
    "base", "finishing", "reliability", "reach", "trained"
  ]  # fmt: skip
  assert axes.get_title(loc="left") == "What it learned"


def test_curves_hold_training_and_held_out_points():
  axes = Figure().subplots()
  rows = [{"step": s, "success": v} for s, v in enumerate([0.0, 0.5, 1.0])]
  plots.draw_curve(axes, rows, {"success": [(0, Interval(0.1, 0.0, 0.3))]})
  raw, smoothed = axes.lines[0], axes.lines[1]
  np.testing.assert_allclose(raw.get_ydata(), [0, 0.5, 1])
  np.testing.assert_allclose(smoothed.get_ydata(), [0.5, 0.5, 0.5])
  assert axes.get_legend_handles_labels()[1] == ["success, training", "success, held out"]
