"""The mpo experiment: a smoke run through the real commands, and its decision rules by hand."""

import json

import pytest

from experiments import report
from experiments.mpo import table
from experiments.mpo.config import ARMS, settings
from tests.experiments.commands import command

FAMILIES = ("search", "tool_use", "automation")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
  """Base and the arm mpo at smoke scale, each in its own process as a study runs them."""
  runs = tmp_path_factory.mktemp("mpo")
  for job in ("base_0", "mpo_0"):
    (runs / job).mkdir()
    command("experiments.mpo.run", f"--job={job}", "--scale=smoke", f"--runs={runs}")
  return runs


@pytest.mark.slow  # as those of the other papers but one
def test_an_arm_runs_end_to_end(smoke):
  base = json.loads((smoke / "results" / "base_0.json").read_text())
  assert base["complete"] and list(base["result"]["success_at_temperature"]) == ["1", "0.5", "0"]
  found = json.loads((smoke / "results" / "mpo_0.json").read_text())
  assert found["complete"] and found["scale"] == "smoke"
  assert found["settings"] == settings("mpo", "smoke")
  result = found["result"]
  assert list(result["held_out"]) == ["0", "2"]
  assert all(set(FAMILIES) < set(row) for row in result["held_out"].values())
  assert len(result["steps"]["success"]) == 2
  # The critic starts at 0 and explains nothing, so the first step leaves the policy alone.
  assert result["steps"]["clip_fraction"][0] is None
  assert result["steps"]["explained"][0] == pytest.approx(0.0, abs=0.5)
  for path in (smoke / "mpo_0" / "run" / "trajectories").glob("step_*[0-9].jsonl"):
    assert len(path.read_text().splitlines()) == 16


@pytest.mark.slow
def test_turns_of_a_run_are_scored(smoke, tmp_path):
  run = smoke / "mpo_0" / "run"
  files = ",".join(str(run / "trajectories" / f"step_00000{i}.jsonl") for i in (0, 1))
  output = command(
    "launch.score_turns",
    f"--checkpoint={run}",
    f"--trajectories={files}",
    f"--output={tmp_path / 'turns.png'}",
    "--top=3",
  )
  assert "threshold" in output and "AUROC" in output
  rows = [line for line in output.splitlines() if "step-" in line]
  assert len(rows) == 3
  scores = [float(line.split()[0]) for line in rows]
  assert scores == sorted(scores, reverse=True)
  assert (tmp_path / "turns.png").read_bytes()[:4] == b"\x89PNG"


# --- decision rules -------------------------------------------------------------------------------


def results(score):
  """Complete results; `score(arm, seed)` is the held-out success of every family at the end."""
  made = {}
  for arm in ARMS:
    for seed in (0, 1, 2):
      curve = {"0": 0.2, "30": 0.2, "50": score(arm, seed), "60": score(arm, seed)}
      rows = {step: dict.fromkeys(FAMILIES, x) for step, x in curve.items()}
      steps = {n: [1.0] * 60 for n in ("turns", "sampled_tokens", "clip_fraction")}
      made[arm, seed] = {
        "paper": "mpo",
        "result": {"held_out": rows, "steps": steps},
        "about": {"date": "2026-01-01", "commit": "abc"},
      }
  return made


def test_late_success_and_area():
  one = results(lambda arm, seed: 0.8)["mpo", 0]["result"]
  one["held_out"]["60"]["search"] = 0.2
  late = table.late(one)
  assert late["search"] == pytest.approx(0.5)  # of .8 at 50 and .2 at 60
  assert late["mean"] == pytest.approx((0.5 + 0.8 + 0.8) / 3)
  # .2 for 30 steps, to .8 within 20, then to (.2 + .8 + .8) / 3 = .6 within 10
  assert table.area(one) == pytest.approx((0.2 * 30 + 0.5 * 20 + 0.7 * 10) / 60)


def test_supported_only_with_an_interval_above_zero_in_every_family():
  better = results(lambda arm, seed: 0.8 + 0.01 * seed if arm == "mpo" else 0.6 + 0.01 * seed)
  found = table.verdict(better)
  assert found.verdict == "supported" and found.interval.estimate == pytest.approx(0.2)
  for seed in (0, 1, 2):
    for step in ("50", "60"):
      better["mpo", seed]["result"]["held_out"][step]["search"] = 0.59
  assert table.verdict(better).verdict == "refuted"  # on the mean still above


def test_refuted_where_the_interval_holds_zero():
  noisy = results(lambda arm, seed: 0.7 + (0.1 * (-1) ** seed if arm == "mpo" else 0.0))
  found = table.verdict(noisy)
  assert found.verdict == "refuted" and found.interval.low < 0 < found.interval.estimate
  assert "not reproduced at this scale" in found.effect


def test_the_best_baseline_is_the_one_to_beat():
  made = results(lambda arm, seed: {"mpo": 0.7, "gspo": 0.75}.get(arm, 0.5))
  found = table.verdict(made)
  assert "GSPO" in found.effect and found.interval.estimate == pytest.approx(-0.05)


def test_missing_runs_are_named_and_decide_nothing():
  made = results(lambda arm, seed: 0.5)
  del made["gspo", 2], made["mpo", 1]
  assert table.verdict(made).verdict == "inconclusive"
  text = table.table(made)
  assert "Not run: mpo_1, gspo_2 (2 of 21)" in text and "unknown" in text


def test_constancy_needs_the_margin_over_every_control():
  def result(permuted):
    eta2 = {"critic": 0.9, "permuted": permuted, "token_targets": 0.7, "untrained": 0.3}
    return {"constancy": {name: {"eta2": x} for name, x in eta2.items()}}

  assert table.constant(result(0.75)) and not table.constant(result(0.85))


def test_the_anomaly_claim_needs_both_halves():
  def found(auroc, flagged, random):
    rows = {"flagged": flagged, "random": random, "episodes": len(flagged)}
    return [{"alarms": {"auroc": auroc}, "retries": rows}]

  assert table.alarming(found(0.8, [0.5] * 20, [0.25] * 20))
  assert not table.alarming(found(0.7, [0.5] * 20, [0.25] * 20))
  assert not table.alarming(found(0.8, [0.5, 0.0] * 10, [0.0, 0.5] * 10))
  assert not table.alarming(found(None, [0.5] * 20, [0.25] * 20))
  assert isinstance(table.retry_difference(found(0.8, [0.5] * 4, [0.25] * 4)), report.Interval)
