"""Means, paired differences and lines of a report, on numbers worked out by hand."""

import json
import math

import pytest

from agentrl_jax.analysis.intervals import Interval
from experiments import report


def stored(arm: str, seed: int, score: float) -> dict:
  about = {"date": f"2026-01-0{seed + 1}", "commit": f"c{seed}", "command": "x"}
  head = {"paper": "p", "arm": arm, "seed": seed, "complete": True}
  return {**head, "result": {"final": {"score": score}}, "about": about}


def test_results_are_read_by_arm_and_seed_and_incomplete_ones_left_out(tmp_path):
  for one in (stored("a", 0, 0.5), stored("a", 1, 0.7), {"complete": False}):
    name = f"{one['arm']}_{one['seed']}" if "arm" in one else "b_0"
    (tmp_path / f"{name}.json").write_text(json.dumps(one))
  found = report.read("p", tmp_path)
  assert list(found) == [("a", 0), ("a", 1)]
  assert report.by_seed(found, "a", "final", "score") == {0: 0.5, 1: 0.7}
  with pytest.raises(KeyError, match=r"a_0: no final\.other"):
    report.by_seed(found, "a", "final", "other")
  assert report.provenance(found) == {
    "command": "python -m experiments.p.run", "date": "2026-01-02", "commit": "c0 c1"
  }  # fmt: skip
  (tmp_path / "a_1.json").write_text("{")
  with pytest.raises(ValueError, match=r"a_1\.json is not JSON"):
    report.read("p", tmp_path)


def test_mean_and_standard_error():
  # Mean of 1, 2, 6 is 3; variance (4 + 1 + 9)/2 = 7; standard error sqrt(7/3) = 1.5275.
  mean, error = report.mean_error([1, 2, 6])
  assert (mean, error) == (3, pytest.approx(math.sqrt(7 / 3)))
  assert report.plus_minus([1, 2, 6]) == "3.000 ± 1.528"
  assert report.plus_minus([0.01, 0.02, 0.06], unit=0.01, digits=1) == "3.0 ± 1.5"
  assert report.plus_minus([0.5]) == "0.500 (one seed)"
  assert report.plus_minus([]) == "-"


def test_paired_difference_is_students_over_shared_seeds():
  # Differences 1, 2, 6; the .95 quantile of t with 2 degrees of freedom is 2.919986 (any table).
  found = report.paired({0: 3, 1: 5, 2: 9, 7: 100}, {0: 2, 1: 3, 2: 3})
  half = 2.919986 * math.sqrt(7 / 3)
  assert found == pytest.approx((3, 3 - half, 3 + half), abs=1e-5)
  with pytest.raises(ValueError, match="there are 1"):
    report.paired({0: 1, 1: 2}, {0: 1})


def test_paired_tasks_pairs_before_it_resamples():
  """A constant difference has no spread, however much the tasks differ."""
  one, other = [1.0, 5.0, 9.0], [0.5, 4.5, 8.5]
  assert report.paired_tasks(one, other) == (0.5, 0.5, 0.5)
  found = report.paired_tasks([1.0, 0.0], [0.0, 0.0])  # draws give 0, 1/2 or 1
  assert found == (0.5, 0.0, 1.0)


def test_a_line_and_a_table():
  verdict = report.Verdict("p", "It works.", "refuted", "points", Interval(0.1, -0.2, 0.3))
  expected = "p | It works. | refuted | points +0.100 [-0.200, +0.300] | - | - | -"
  assert report.line(verdict) == expected
  assert report.markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
  assert str(report.Published("82 %", "abstract")) == "82 % (abstract)"


def test_put_replaces_what_is_between_the_marks(tmp_path):
  readme = tmp_path / "README.md"
  readme.write_text(f"head\n{report.BEGIN}\nold\n{report.END}\ntail\n")
  report.put(readme, "new\n")
  report.put(readme, "newer\n")
  assert readme.read_text() == f"head\n{report.BEGIN}\nnewer\n{report.END}\ntail\n"
  readme.write_text("no marks")
  with pytest.raises(ValueError, match="has no lines"):
    report.put(readme, "new\n")
