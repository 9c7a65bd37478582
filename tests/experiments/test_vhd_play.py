"""The vhd_play experiment: a smoke run through the real command, its labels and decision rule."""

import asyncio
import json

import numpy as np
import pytest

from agentrl_jax.envs.mechanisms import draw, scripted, words
from agentrl_jax.envs.mechanisms.environment import Problem, problem_of
from agentrl_jax.envs.mechanisms.families import FAMILIES
from experiments.vhd_play import checklist, config, table
from experiments.vhd_play.failures import Played
from experiments.vhd_play.run import held_out, scripts
from tests.experiments.commands import command
from tests.reference import batches


@pytest.mark.slow  # as those of the other papers but one
def test_an_arm_runs_end_to_end(tmp_path):
  """Base and the arm mechanism at smoke scale, each in its own process as a study runs them."""
  for job in ("base_0", "mechanism_0"):
    (tmp_path / job).mkdir()
    command("experiments.vhd_play.run", f"--job={job}", "--scale=smoke", f"--runs={tmp_path}")
  results = tmp_path / "results"
  for arm in ("base", "mechanism"):
    found = json.loads((results / f"{arm}_0.json").read_text())
    assert found["complete"] and found["settings"] == config.settings(arm, "smoke")
    measured = found["result"]["measured"]
    assert list(measured) == ["F", "I", "A", "unseen"]
    assert all(len(one["score"]) == 8 for one in measured.values())
  assert len(found["result"]["steps"]["reward"]) == 2
  text = command("experiments.vhd_play.table", f"--results={results}")
  assert "Not run: answers_0" in text and "inconclusive" in text
  command("experiments.vhd_play.plot", f"--results={results}")
  assert (results / "scores.png").read_bytes()[:4] == b"\x89PNG"


# --- demonstrations and rewards -------------------------------------------------------------------


def test_demonstrators():
  """Answers are optimal; one acting script in ten probes, and then is the oracle's."""
  probing = 0
  for seed in range(400):
    task = draw.make_task("knapsack", "A", "train", seed)
    policy, problem = config.demonstrator(task), problem_of(task)
    (first,) = policy([])
    probing += first.name == "PROBE"
    kinds = [scripted.naive_calls, scripted.oracle_calls]
    assert first in [words.by_verb(problem, kind(problem)[0]) for kind in kinds]
  assert 0.05 < probing / 400 < 0.16
  answer = draw.make_task("knapsack", "F", "train", 0)
  (call,) = config.demonstrator(answer)([])
  assert call.name == "ANSWER" and len(call.arguments["numbers"]) == 12


def test_practice_and_demonstrations_share_no_seed():
  base, arm = config.base("cpu"), config.experiment("mechanism", "cpu")
  assert base.episodes.tasks.first_seed >= arm.tasks.train_tasks


def test_the_checklist_by_hand():
  def info(probes, invalid, finished):
    return {"probes": probes, "invalid": invalid, "finished": finished}

  assert checklist.share(info(3.0, 0.0, 1.0)) == 1.0
  assert checklist.share(info(0.0, 2.0, 1.0)) == pytest.approx(1 / 3)

  async def play(calls):
    tasks = checklist.checklist(config.fdl.build(config.experiment("mechanism", "smoke").tasks))
    task = draw.make_task("inventory", "A", "train", 0)
    opening = await tasks.build(task)
    for call in calls(problem_of(task)):
      step = await opening.env.step((words.by_verb(problem_of(task), call),))
    return tasks.combine(step.reward), step.reward["task/utility"]

  assert asyncio.run(play(scripted.naive_calls)) == (pytest.approx(2 / 3), 0.0)
  listed, earned = asyncio.run(play(scripted.oracle_calls))
  assert listed == 1.0 and earned > 0


@pytest.mark.parametrize("rewards", [(0.2, 0.5, 0.8), (0.3, 0.3, 0.3)])
def test_the_credit_is_centred_linear_and_nothing_among_equals(rewards):
  """V11, by hand: reward minus (.2 + .5 + .8) / 3; half the rewards give half of it."""

  def credit(rewards):
    group = [batches.by_hand([-1, 0, 0], [reward]) for reward in rewards]
    made = batches.lay_out(group)
    algorithm = config.centred()
    return np.asarray(algorithm.advantage(made.batch, made.aux).advantage)[:3, 1]

  mean = sum(rewards) / 3
  found = credit(rewards)
  np.testing.assert_allclose(found, np.subtract(rewards, mean), atol=1e-6)
  np.testing.assert_allclose(credit(np.divide(rewards, 2)), found / 2, atol=1e-6)
  assert abs(found.sum()) < 1e-6
  if len(set(rewards)) == 1:
    assert not found.any()


def test_scripts_of_the_tasks_that_are_measured():
  tasks = held_out("smoke")
  assert {len(one) for one in tasks.values()} == {config.MEASURED["smoke"].tasks}
  assert [t.params["theta"] for t in tasks["F"]] == [t.params["theta"] for t in tasks["A"]]
  assert {t.family for t in tasks["unseen"]} == {"routing"}
  assert scripts(tasks["I"]) == {"oracle": 1.0, "naive": 0.0, "idle": pytest.approx(0.0, abs=0.5)}
  assert scripts(tasks["A"])["oracle"] < 1.0


def test_failures_are_named():
  def labels(presentation="A", family="knapsack", **changes):
    good = dict(score=0.2, gained=1.0, fees=0.0, probes=0, hidden=4, invalid=0, ended=True)
    problem = Problem(FAMILIES[family], {}, best=10.0, naive=0.0, presentation=presentation)
    return Played(**{**good, "spent_early": False, **changes}).labels(problem)

  assert labels(score=0.5) == []
  assert labels() == ["NEVER_PROBED"]
  assert labels(probes=4, fees=4.0) == ["OVER_PROBED", "WRONG_PLAN_GOOD_INFO"]
  assert labels(probes=4, fees=4.0, gained=6.0) == []
  assert labels("I", spent_early=True) == ["MYOPIC_BUDGET", "WRONG_PLAN_GOOD_INFO"]
  assert labels("I", invalid=3, ended=False) == ["INVALID_ACTIONS", "TURN_LIMIT"]
  assert labels("I", family="facility", ended=False) == ["NO_COMMIT"]


# --- decision -------------------------------------------------------------------------------------


def results(score):
  """Complete results; `score(arm, seed, form)` is that of each of 20 tasks."""
  made = {}
  for arm in table.NAMES:
    for seed in table.SEEDS:
      measured = {}
      for form in ("F", "I", "A", "unseen"):
        row = {"score": [score(arm, seed, form) + 0.001 * i for i in range(20)]}
        row |= {"probes": 1.0, "calls": 8.0, "ended": 1.0}
        measured[form] = row | {"failures": dict.fromkeys(table.LABELS, 0.1)}
      one = {"measured": measured, "steps": {"reward": [0.1, 0.2]}}
      if arm == table.BASE:
        one = {
          "measured": measured,
          "scripts": {f: {"oracle": 1.0, "naive": 0.0} for f in measured},
        }
      made[arm, seed] = {
        "paper": "vhd_play", "result": one, "about": {"date": "2026-01-01", "commit": "abc"}
      }  # fmt: skip
  return made


def test_the_verdict_needs_one_sign_in_all_seeds():
  better = results(lambda arm, seed, form: 0.6 if arm == "mechanism" and form != "F" else 0.1)
  found = table.verdict(better)
  assert found.verdict == "supported" and found.interval.estimate == pytest.approx(0.5)
  text = table.table(better)
  assert "| on A by at least 0.3 | +0.500 | yes |" in text and "| no |" not in text
  torn = results(lambda arm, seed, form: 0.0 if (arm, seed) == ("mechanism", 1) else
                 0.6 if arm == "mechanism" else 0.1)  # fmt: skip
  assert table.verdict(torn).verdict == "inconclusive"


def test_the_control_that_acts_better_refutes():
  found = table.verdict(
    results(lambda arm, seed, form: {"mechanism": 0.5, "answers": 0.7}.get(arm, 0.1))
  )
  assert found.verdict == "refuted" and table.NAMES["answers"] in found.effect
  assert found.interval.estimate == pytest.approx(-0.2)


def test_missing_runs_are_named_and_decide_nothing():
  made = results(lambda arm, seed, form: 0.5)
  del made["checklist", 2]
  assert table.verdict(made).verdict == "inconclusive"
  assert "Not run: checklist_2 (1 of 12)" in table.table(made)
