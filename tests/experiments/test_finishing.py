"""The finishing study: its closed forms against simulation, its small world, its verdicts."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import nbinom

from agentrl_jax.analysis.finishing import decompose
from agentrl_jax.analysis.samples import from_counts
from agentrl_jax.learner.step import make_prepare
from agentrl_jax.types import Aux
from experiments import report, study
from experiments.finishing import config, controlled, logs, plot, run, table, tiny
from experiments.finishing.measure import (
  BUDGET,
  CONTROLLED,
  RECIPES,
  measure,
  split_again,
)

ROOT = pathlib.Path(__file__).parents[2]


# --- Controlled runs.


def test_rates_are_those_of_what_is_drawn():
  plan = fdl.build(config.controlled("finishing"))
  world, policy = controlled.make_world(plan, 3), controlled.Policy(0.405, -0.5, -1.0)
  finished, correct = controlled.rates(world, policy, 30)
  room = 30 - 3 * world.steps - 2
  expected = nbinom.cdf(room, world.steps, 1 - 1 / (1 + np.exp(-0.405)))
  np.testing.assert_allclose(finished, expected, atol=1e-12)
  drawn = controlled.draw(world, policy, 400, 30, np.random.default_rng(0))
  total, done, right = drawn.counts()
  error = 3 * np.sqrt(0.25 / 400 / len(world.steps))
  assert abs((done / total - finished).mean()) < error
  assert abs((right / total - finished * correct).mean()) < error


@pytest.mark.parametrize("arm", CONTROLLED)
def test_only_the_trained_part_moves(arm):
  plan = fdl.build(config.controlled(arm))
  world = controlled.make_world(plan, 0)
  base = now = controlled.Policy(plan.filler, plan.skill, plan.new)
  for _ in range(plan.steps):
    now = controlled.ascend(world, now, plan)
  truth = controlled.true_parts(world, base, now, BUDGET)
  assert truth.pop(arm) > 0.03
  assert max(map(abs, truth.values())) < 1e-12
  rates = [controlled.rates(world, policy, BUDGET) for policy in (base, now)]
  change = (rates[1][0] * rates[1][1] - rates[0][0] * rates[0][1]).mean()
  assert sum(controlled.true_parts(world, base, now, BUDGET).values()) == (pytest.approx(change))


# --- The small world.


def teacher(problems: tiny.Problems) -> list[list[int]]:
  """The right response of each problem without check tokens, by a plain loop."""
  found = []
  for kind, value, operands, count in zip(*problems, strict=True):
    tokens = []
    for place in range(count):
      digit = int(operands[place])
      value = int(value + digit if kind == 0 else value * digit) % 10
      tokens += [digit, value, tiny.STOP if place + 1 == count else tiny.NEXT]
    found.append(tokens)
  return found


def follower() -> dict:
  """A policy supervised without wrong rules and without check tokens."""
  plan = fdl.build(config.base())
  plan = dataclasses.replace(plan, wrong=(), filler=(0.0, 0.0), steps=1200, tokens_per_step=512)
  return tiny.supervise(plan, 128, 0)


def test_rollouts_of_a_good_policy_are_the_teachers_responses():
  rng = np.random.default_rng(1)
  sets = [tiny.make_problems(which, 20, 0.2, rng) for which in tiny.SETS]
  problems = tiny.Problems(*(np.concatenate(columns) for columns in zip(*sets, strict=True)))
  with_all = teacher(problems)
  assert tiny.answers(problems).tolist() == [tokens[-2] for tokens in with_all]
  drawn = tiny.rollout(follower(), problems, np.full((40, 40), 0.5, np.float32))
  found = [
    row[live].tolist()
    for row, live in zip(*map(np.asarray, (drawn.tokens, drawn.alive)), strict=True)
  ]
  same = [one == other for one, other in zip(found, with_all, strict=True)]
  assert np.mean(same) > 0.9
  np.testing.assert_array_equal(np.asarray(drawn.correct)[same], True)


def test_a_batch_of_rollouts_holds_what_was_sampled():
  rng = np.random.default_rng(2)
  problems = tiny.make_problems("maths", 4, 0.0, rng).take(np.repeat(np.arange(4), 4))
  weights = tiny.init(8, 0)
  weights["head_bias"] = weights["head_bias"].at[tiny.CHECK].set(1.0)
  episodes = tiny.rollout(weights, problems, rng.random((12, 16), np.float32))
  batch = tiny.make_batch(episodes, 4)
  size = np.asarray(episodes.alive).sum(1)
  assert size.min() < 12 and np.asarray(episodes.finished).sum() < 16
  logps = tiny.log_probs(weights, episodes.states)
  chosen = jnp.take_along_axis(logps, episodes.tokens[..., None], axis=-1)[..., 0]
  for row in range(16):
    assert batch.action[row].sum() == size[row]
    np.testing.assert_allclose(
      batch.behavior_logp[row, : size[row]], chosen[row, : size[row]], atol=1e-5
    )
    cut_off = size[row] == 12 and not bool(episodes.finished[row])
    assert batch.traj_truncated[row] == cut_off
    assert (batch.traj[row] >= 0).sum() == size[row] + cut_off
  for name in RECIPES:
    algorithm = fdl.build(config.reinforced(name)).algorithm
    for check in algorithm.checks:
      check(batch)
    prepared = make_prepare(algorithm)(batch, Aux(old_logp=batch.behavior_logp))
    assert np.isfinite(np.asarray(prepared.weight)).all()


# --- What a result keeps, and what it says.


def test_a_split_comes_back_from_its_counts():
  base = from_counts({"a": (8, 6, 2), "b": (8, 3, 0)})
  rl = from_counts({"a": (8, 8, 5), "b": (8, 8, 4)})
  more = from_counts({"a": (8, 8, 2), "b": (8, 8, 1)})
  found = measure("p", "s", "30", base, rl, extended=more, fresh=(base, rl), resamples=50)
  json.dumps(found, allow_nan=False)
  again, expected = split_again(found), decompose(base, rl, more)
  for one, other in zip(again.parts, expected.parts, strict=True):
    np.testing.assert_array_equal(one, other)
  np.testing.assert_array_equal(again.null_posterior, expected.null_posterior)
  assert found["survival"]["credited"] == 0
  assert found["curves"]["rl"]["pass@k"]["1"][0] == pytest.approx((5 / 8 + 4 / 8) / 2)


def pair(base: tuple, rl: tuple, problems: int = 40, survival=None) -> dict:
  """A measured pair whose problems are all alike."""
  names = [f"{i:03d}" for i in range(problems)]
  both = (from_counts(dict.fromkeys(names, counts)) for counts in (base, rl))
  found = measure("p", "maths", str(BUDGET), *both, resamples=50)
  return found | {"survival": survival}


def results(*pairs: dict) -> report.Results:
  about = {"date": "2026-01-01", "commit": "c", "command": "x"}
  return {("grpo", 0): {"paper": "finishing", "result": {"splits": list(pairs)}, "about": about}}


FINISHING = pair((8, 4, 2), (8, 8, 4))  # f 1/2 -> 1, c stays 1/2: all of the change
RELIABILITY = pair((8, 4, 2), (8, 5, 5))  # f 1/2 -> 5/8, c 1/2 -> 1
HALF = pair((8, 4, 0), (8, 8, 4))  # c 0 -> 1/2: finishing 1/8, reach 3/8
REACH = pair((8, 4, 0), (8, 4, 4))  # c 0 -> 1 where the base solved nothing


@pytest.mark.parametrize(
  ("pairs", "expected"),
  [
    ((FINISHING,), "supported"),
    ((RELIABILITY,), "refuted"),  # a share below one half
    ((FINISHING, REACH), "inconclusive"),  # one reaches, one does not
    ((HALF,), "refuted"),  # net reach above 2.1 points
    ((FINISHING | {"survival": {"credited": 4, "survived": 1, "share": None}},), "supported"),
    ((FINISHING | {"survival": {"credited": 4, "survived": 2, "share": None}},), "refuted"),
  ],
)
def test_the_verdict_follows_the_rule(pairs, expected):
  assert table.verdict(results(*pairs)).verdict == expected


def test_the_table_names_its_source_and_pools():
  text = table.table(results(FINISHING, FINISHING, RELIABILITY))
  assert "**2 different pairs pooled**" in text  # a repeated pair is shown, and pooled once
  assert "82 % (summary of the study; its text was not available)" in text
  assert text.count("100% [100%, 100%]") == 2


# --- Recorded samples.


def test_logs_of_other_projects():
  if not logs.public().exists():
    pytest.skip(f"no public logs at {logs.public()}")
  (found,) = logs.game24()
  base, rl = found["base"], found["rl"]
  # Yao et al. (arXiv:2305.10601, table 2): 7.3 % and 4.0 % by 100 samples a problem.
  assert base.success.mean() == pytest.approx(0.073, abs=0.001)
  assert rl.success.mean() == pytest.approx(0.040, abs=0.001)


def test_every_evaluated_run_below_a_folder_is_a_pair(tmp_path, monkeypatch):
  monkeypatch.setenv("AGENTRL_EVALUATIONS", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="no run with"):
    next(logs.workdirs())
  right = {"mpo_0": (1, 3), "grpo_1": (0, 2)}  # successes of 4 before and after
  for name_of_run, successes in right.items():
    folder = tmp_path / name_of_run / "run" / "evaluation"
    folder.mkdir(parents=True)
    for name, count in zip(("before", "after"), successes, strict=True):
      rows = [
        {"problem": "chain/test/0", "sample": i, "finished": True, "correct": i < count,
         "tokens": 5, "model": name}
        for i in range(4)
      ]  # fmt: skip
      (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = list(logs.workdirs())
  assert [one["pair"] for one in found] == ["grpo_1/run", "mpo_0/run"]
  assert [one["rl"].success.sum() for one in found] == [2, 3]
  assert found[0]["problems"] == "chain"


# --- The command.


def test_smoke(tmp_path, capsys):
  """An algorithm on its base through the command, and a controlled run; then table and pictures."""
  results, cores = tmp_path / "results", tmp_path / "tmp"
  cores.mkdir()
  done = subprocess.run(
    [sys.executable, "-m", "experiments.finishing.run", "--scale=smoke", "--arms=grpo",
     "--seeds=0", f"--runs={tmp_path}", f"--results={results}"],
    cwd=ROOT, capture_output=True, text=True, timeout=280,
    env={**os.environ, "TMPDIR": str(cores)},
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  saved = {}
  place = study.Place("reach", 0, "smoke", tmp_path, saved.update, lambda done, total: None)
  result = run.job(place)
  assert saved["curve"] == result["curve"]
  about = {"date": "2026-01-01", "commit": "c", "command": "x"}
  head = {"paper": "finishing", "arm": "reach", "seed": 0, "complete": True}
  study.write_json(results / "reach_0.json", {**head, "result": result, "about": about})
  found = report.read("finishing", results)
  assert set(found) == {("base", 0), ("grpo", 0), ("reach", 0)}
  for one in found.values():
    for at in one["result"].get("splits", []):
      parts = [at["summary"][part][0] for part in ("finishing", "reliability", "reach")]
      assert sum(parts) == pytest.approx(at["summary"]["change"][0])
  assert "only reach" in table.table(found)
  plot.main(results)
  assert {path.name for path in results.glob("*.png")} == {
    "truth.png", "pairs.png", "pass_at_k.png"
  }  # fmt: skip


def test_the_readme_shows_the_committed_results():
  readme = (ROOT / "experiments" / "finishing" / "README.md").read_text()
  shown = readme.partition(report.BEGIN)[2].partition(report.END)[0].strip()
  found = report.read("finishing")
  assert shown.startswith(table.table(found).strip())
