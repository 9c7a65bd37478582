"""The ac2 experiment: its decisions and credit by hand, its rules, and a smoke run resumed."""

import dataclasses
import json
import math
import shutil
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from agentrl_jax.envs import ledger
from agentrl_jax.learner.step import make_prepare
from agentrl_jax.losses.readiness import ClipController, RateController, Readiness, decode_cost
from agentrl_jax.losses.replay import Replay, Stored
from agentrl_jax.orchestrate.pack import pack
from agentrl_jax.rollout.environment import Message
from agentrl_jax.rollout.records import Episode, Kind, Outcome, Sample, Segment
from agentrl_jax.rollout.symbols import SymbolRenderer
from experiments.ac2 import config, critic, loop, memory, probe, states, table
from experiments.ac2.memory import Memory, Pair, Spent
from experiments.ac2.starts import Start, prompt_tokens, response
from tests.experiments.commands import command

END = ledger.SYMBOLS.index(ledger.END)
RENDERER = SymbolRenderer(
  ledger.SYMBOLS, end=ledger.END, read=ledger.read_words, write=ledger.write_words
)
TASK = ledger.make_task("train", 0)


def ids(text):
  return tuple(ledger.SYMBOLS.index(word) for word in text.split())


def continuation(name, new, *, prefix="", reward=0.0, truncated=False):
  """An episode that sampled the symbols `new` after a prefix of a response to TASK."""
  prompt = np.array(ids(f"{ledger.question(TASK)} {prefix}"), np.int32)
  action = np.array(ids(new), np.int32)
  logp, version = np.full(len(action), -0.5, np.float32), np.zeros(len(action), np.int32)
  segments = (Segment(Kind.PROMPT, prompt), Segment(Kind.ACTION, action, 0, logp, version))
  return Episode(
    task=ledger.at_prefix(TASK, prefix.split()),
    trajectory_id=name,
    group_id=name.rpartition("/")[0],
    samples=(Sample(segments, RENDERER.vocab_size, name),),
    reward_parts=({"correct": reward},),
    turn_rewards=(reward,),
    outcome=Outcome.SUCCESS if reward else Outcome.FAILURE,
    terminated=not truncated,
    truncated=truncated,
  )


# --- memory and decisions -------------------------------------------------------------------------


def test_what_a_run_remembers_survives_json():
  readiness = Readiness()
  for _ in range(6):
    readiness = readiness.after_step({"a": 0.3}, {"a": 0.25, "b": 0.1}, ["a"])
  one = Memory(
    replay=Replay((Stored("a", (1, 2)), Stored("b", ())), 64),
    clip=ClipController(offset=0.04),
    rate=RateController(rate=5e-5, floor=2.5e-5, strikes=1),
    readiness=readiness,
    bank={"a": (3, 4)},
    pairs=(Pair(Stored("a", (1,)), 0.3),),
    spent=Spent(decode=10**20, critic=3),
    cursor=7,
  )
  assert memory.from_carry(json.loads(json.dumps(memory.to_carry(one)))) == one
  assert one.spent.plus(decode=1, training=2).total == 10**20 + 6


def test_a_quarter_of_the_trusted_is_audited():
  ready = lambda readiness, problem: problem != "x"  # noqa: E731
  rng = lambda: np.random.default_rng(0)  # noqa: E731
  found = memory.chunked(["a", "x", "b", "c", "d", "e"], Readiness(), ready, rng())
  assert not found[1] and sum(found) == 5 - math.ceil(5 / 4)
  assert found == memory.chunked(["a", "x", "b", "c", "d", "e"], Readiness(), ready, rng())
  assert memory.chunked(["a"], Readiness(), ready, rng()) == [False]
  assert memory.chunked(["x", "x"], Readiness(), ready, rng()) == [False, False]


def test_the_first_right_response_stays_and_pairs_are_the_latest():
  bank = memory.with_solved({"a": (1,)}, [Stored("a", (2,)), Stored("b", (3,)), Stored("b", (4,))])
  assert bank == {"a": (1,), "b": (3,)}
  pairs = [Pair(Stored(str(i), ()), 0.1 * i) for i in range(6)]
  assert memory.with_pairs(pairs[:4], pairs[4:], 3) == tuple(pairs[3:])
  drawn = memory.draw(pairs, 4, np.random.default_rng(1))
  assert len({p.state.problem for p in drawn}) == 4
  assert drawn == memory.draw(pairs, 4, np.random.default_rng(1))
  assert len(memory.draw(pairs, 99, np.random.default_rng(1))) == 6


# --- values and credit ----------------------------------------------------------------------------


def run_of(plan=None, bank=()):
  """What the functions of a run read of it."""
  play = SimpleNamespace(renderer=RENDERER)
  words = lambda x: RENDERER.text(np.asarray(x, np.int32)).split()  # noqa: E731
  held = SimpleNamespace(bank=dict(bank), spent=Spent())
  cost = decode_cost(
    layers=1, embed=2, heads=1, kv_heads=1, head_dim=2, ffw=3, vocab_size=47
  )  # fmt: skip
  return cast(
    Any,
    SimpleNamespace(
      plan=plan or SimpleNamespace(critic=SimpleNamespace(chunk=4, min_valid=2), minibatches=2),
      play=play,
      words=words,
      memory=held,
      problems={"0": TASK},
      cost=cost,
    ),
  )


def start(prefix="", chunked=True):
  words = prefix.split()
  return Start(Stored("0", ids(prefix)), ledger.at_prefix(TASK, words), chunked)


@pytest.mark.parametrize(
  ("prefix", "new", "chunked", "by_critic"),
  [
    ("", "1 2 3 4", True, True),
    ("1 2 3 4", "1 2 3 4", True, True),
    ("1 2 3 4", "1 = 3 4", True, False),  # holds an answer
    ("1 2 3 4", f"1 2 3 {ledger.END}", True, False),  # ended as the chunk did
    ("1 2 3 4", f"1 {ledger.END}", True, False),
    ("1 2 3 4 " * 4, "1 2 3 4", True, False),  # the budget is used up
    ("", "1 " * 20, False, False),  # an audit
  ],
)
def test_who_scores_where_a_continuation_stopped(prefix, new, chunked, by_critic):
  episode = continuation("g/0", new, prefix=prefix, truncated=True)
  assert critic.is_open(run_of(), start(prefix, chunked), episode) == by_critic
  with pytest.raises(ValueError, match="stopped before its chunk"):
    critic.is_open(run_of(), start(), continuation("g/0", "1 2 3"))


def test_credit_of_a_group_by_hand():
  """Worths .9 (reward 1 less nothing), .3 of the critic, 0 of a used budget, and no value at all:
  the mean of the three valid ones, (1 + .3 + 0) / 3, stands in for the last.
  """
  group = [
    continuation("g/0", f"1 = 5 {ledger.END}", reward=1.0),
    continuation("g/1", "1 2 3 4", truncated=True),
    continuation("g/2", "1 2 3 4", truncated=True),
    continuation("g/3", "1 2 3 4", truncated=True),
  ]
  packed = pack([group], row_length=loop.ROW, micro_rows=1, share_prompts=True)
  batch = packed.batch
  stated = {"g/1": 0.3, "g/3": math.nan}
  old = np.where(batch.action, np.float32(-0.5), np.float32(0.0))
  aux = loop.aux_of(packed, old, stated, ClipController())
  assert float(aux.clip_high) == pytest.approx(0.34)
  with jax.debug_nans(False):
    made = jax.device_get(make_prepare(config.endpoints(min_valid=2))(batch, aux))
  mean = 1.3 / 3
  expected = {"g/0": 1 - mean, "g/1": 0.3 - mean, "g/2": -mean, "g/3": 0.0}
  for r, episode in enumerate(packed.episodes):
    mine = batch.action & (batch.traj == r)
    np.testing.assert_allclose(
      made.credit.advantage[mine], expected[episode.trajectory_id], atol=1e-6
    )
    share = 0.0 if episode.trajectory_id == "g/3" else 1 / 16  # of all sampled tokens
    np.testing.assert_allclose(made.weight[mine], share, rtol=1e-6)
  assert (made.weight[~batch.action] == 0).all()


def test_an_engine_that_is_another_policy_is_refused():
  group = [continuation(f"g/{m}", "1 2 3 4", truncated=True) for m in range(2)]
  packed = pack([group], row_length=loop.ROW, micro_rows=1, share_prompts=True)
  same = np.where(packed.batch.action, np.float32(-0.5), np.float32(9.0))  # 9 where nobody looks
  assert loop.mismatch_of(packed, same) == 0.0
  for bad in (-0.4995, math.nan):
    other = same.copy()
    other[tuple(np.argwhere(packed.batch.action)[3])] = bad
    with pytest.raises(loop.Mismatch, match="engine and trainer differ by"):
      loop.mismatch_of(packed, other)


def test_with_an_exact_critic_the_expected_gradient_is_exact():
  """One-token chunks with known values, every pair of them laid out as a group of two."""
  value = {"1": 0.1, "2": 0.6, "3": 0.9, "4": 0.4}
  logits = np.array([0.3, -0.2, 0.5, 0.0])
  chance = np.exp(logits) / np.exp(logits).sum()
  names = list(value)
  pairs = [(a, b) for a in names for b in names]
  groups = [
    [continuation(f"g{i}/{m}", word, truncated=True) for m, word in enumerate(pair)]
    for i, pair in enumerate(pairs)
  ]
  packed = pack(groups, row_length=loop.ROW, micro_rows=1)
  stated = {f"g{i}/{m}": value[w] for i, pair in enumerate(pairs) for m, w in enumerate(pair)}
  old = np.zeros(packed.batch.tokens.shape, np.float32)
  aux = loop.aux_of(packed, old, stated, ClipController())
  credit = jax.device_get(make_prepare(config.endpoints())(packed.batch, aux)).credit
  gradient = np.zeros(4)
  for r, episode in enumerate(packed.episodes):
    i, m = map(int, episode.trajectory_id[1:].split("/"))
    (advantage,) = credit.advantage[packed.batch.action & (packed.batch.traj == r)]
    score = (np.arange(4) == names.index(pairs[i][m])) - chance
    weight = chance[names.index(pairs[i][0])] * chance[names.index(pairs[i][1])]
    gradient += weight * advantage * score
  values = np.array(list(value.values()))
  exact = chance * (values - chance @ values)
  # The group's own mean takes 1 / g of the signal: two members, one half, summed over two.
  np.testing.assert_allclose(gradient, exact, atol=1e-6)


def test_entropy_is_of_responses_to_bare_problems():
  groups = [
    [continuation(f"a/{m}", "1 2 3 4", truncated=True) for m in range(2)],
    [continuation(f"b/{m}", "1 2", prefix="1 2 3 4", truncated=True) for m in range(2)],
  ]
  starts = [start(), start("1 2 3 4")]
  shares = loop.packed_shares(
    cast(Any, SimpleNamespace(plan=SimpleNamespace(minibatches=2, members=2))), groups
  )
  assert [len(one.episodes) for one in shares] == [2, 2]
  entropies = [
    np.full(one.batch.tokens.shape, x) for one, x in zip(shares, (0.2, 9.0), strict=True)
  ]
  found = loop.entropy_at_start(starts, groups, shares, entropies)
  assert found == pytest.approx(0.2)
  assert loop.entropy_at_start(starts[1:], groups[1:], shares[1:], entropies[1:]) is None


def test_readiness_uses_what_was_said_before_and_lessons_the_new_references():
  """The problem is solved in this step: its lesson shows the reference, its question did not."""
  plan = SimpleNamespace(critic=SimpleNamespace(min_valid=2, stored=256, drawn=128), minibatches=2)
  run = run_of(plan)
  valued = critic.Valued({}, [[0.5, 1.0]], [0.4], [None], 0)
  right = tuple(RENDERER.write(ledger.oracle(TASK)([])).tolist())
  before = Memory(Replay(), ClipController(), RateController())
  now = dataclasses.replace(before, bank={"0": right})
  after, taught = loop.after_values(run, now, [start()], valued, np.random.default_rng(0))
  assert after.pairs == (Pair(Stored("0", ()), 0.7),)  # .75, ties down
  evidence = after.readiness.problems["0"]
  assert evidence.error == pytest.approx(0.3) and evidence.solved and evidence.spoke
  (group,) = taught
  asked = [RENDERER.text(e.samples[0].segments[0].ids) for e in group]
  sums = list(map(str, ledger.sums(TASK)))
  assert asked == [
    ledger.value_question(TASK, [], sums),
    ledger.value_question(TASK, []),
  ]
  answers = {RENDERER.text(e.samples[0].segments[1].ids) for e in group}
  assert answers == {"v7"}
  passes = sum(run.cost.forward(len(e.samples[0])) for e in group)
  assert after.spent.training == 3 * passes
  none, nothing = loop.after_values(
    run_of(SimpleNamespace(critic=None)), now, [start()], valued, np.random.default_rng(0)
  )
  assert none == now and nothing == []


def test_flops_count_refills_and_each_prompt_once_a_group():
  run = run_of()
  fresh = [continuation("r/0", "1 2 3")]
  groups = [[continuation(f"g/{m}", "1 2", prefix="4") for m in range(3)]]
  assert prompt_tokens(groups[0][0]) == 15 and response(groups[0][0]).ids == ids("4 1 2")
  found = loop.rollout_cost(run, fresh, groups)
  cost = run.cost
  assert found.decode == cost(14, 3) + 3 * cost(15, 2)
  assert found.prefill == cost.forward(14) + cost.forward(15)
  assert found.training == 4 * 3 * cost.forward(17) and found.critic == 0


# --- probe ----------------------------------------------------------------------------------------


def test_the_probe_crosses_where_the_noise_is_that_of_outcomes():
  """Values of 1/2 +- e: outcomes have noise .5, so the curves cross at .5 over their spread."""
  rng = np.random.default_rng(0)
  values = 0.5 + rng.choice([-0.2, 0.2], (20_000, 8))
  found = probe.curves(values, rng)
  assert found["spread"] == pytest.approx(0.2 * math.sqrt(7 / 8), rel=0.02)
  noise = math.sqrt(0.25 - 0.04)
  assert found["outcome_noise"] == pytest.approx(noise / found["spread"], rel=1e-3)
  assert found["crossing"] == pytest.approx(noise / found["spread"], rel=0.1)
  assert found["critic"][0] == pytest.approx(1.0)
  assert sorted(found["critic"], reverse=True) == found["critic"]


def test_what_the_critic_says_by_state():
  said = np.array([0.0, 0.4, math.nan, 0.0])
  found = states.by_state(said, np.array([True, True, True, False]), np.array([4, 4, 4, 8]))
  assert found == {
    "right at 4": {"count": 2, "mean": 0.2, "zero": 0.5},
    "wrong at 8": {"count": 1, "mean": 0.0, "zero": 1.0},
  }


# --- decision rules -------------------------------------------------------------------------------


def result(scores, decode, total=None):
  """An arm's result: held-out scores after 0, 10, 20, ... steps, FLOPs a step."""
  count = 10 * (len(scores) - 1)
  steps = {
    "flops/decode": [decode * (i + 1) for i in range(count)],
    "flops/total": [(total or decode) * (i + 1) for i in range(count)],
  }
  held_out = {str(10 * i): {"score": s, "finished": 1.0} for i, s in enumerate(scores)}
  return {"held_out": held_out, "steps": steps}


def results(**changes):
  """All arms, of which AC2 reaches .4 after 20 steps at half the cost, GRPO after 30."""
  arms = {
    "grpo": result([0.1, 0.2, 0.3, 0.4], 2.0),
    "prefix_grpo": result([0.1, 0.2, 0.3, 0.3], 2.0),
    "ac2": result([0.1, 0.3, 0.4, 0.5], 1.0),
    "no_readiness": result([0.1, 0.1, 0.1, 0.1], 1.0),
    "short_chunks": result([0.1, 0.1, 0.1, 0.1], 0.5),
  } | changes
  about = {"date": "2026-01-01", "commit": "abc"}
  return {
    (arm, seed): {"paper": "ac2", "result": one, "about": about}
    for arm, one in arms.items()
    for seed in table.SEEDS
  }


def test_cost_to_the_peak_of_another():
  arms = {arm: one["result"] for (arm, seed), one in results().items() if seed == 0}
  assert table.peak(arms["grpo"]) == (30, 0.4)
  assert table.ratio(arms["ac2"], arms["grpo"], "decode") == pytest.approx(60 / 20)
  assert table.ratio(arms["ac2"], arms["grpo"], "steps") == pytest.approx(1.5)
  assert table.ratio(arms["no_readiness"], arms["grpo"], "decode") == 0.0
  assert table.score_at(arms["ac2"], 15.0) == pytest.approx(0.35)
  assert table.score_at(arms["ac2"], 99.0) == pytest.approx(0.5)
  one, two = table.mean_at_equal_cost(arms["ac2"], arms["grpo"])
  # AC2 spends 30 in all; GRPO then stands between 10 and 20 steps: .25
  assert one == pytest.approx(np.mean([0.25, 0.35, 0.425, 0.5]))
  assert two == pytest.approx(np.mean([0.1375, 0.175, 0.2125, 0.25]))


def test_supported_only_where_cheaper_and_readiness_is_needed():
  found = table.verdict(results())
  assert found.verdict == "supported" and found.interval.estimate == pytest.approx(3.0)
  assert "decode-only" not in found.effect
  dear = table.verdict(results(ac2=result([0.1, 0.3, 0.4, 0.5], 1.0, 4.0)))
  assert dear.verdict == "supported" and dear.effect.startswith("decode-only gain")
  slow = table.verdict(results(ac2=result([0.1, 0.2, 0.3, 0.4], 3.0)))
  assert slow.verdict == "refuted" and "not above 1" in slow.effect
  free = table.verdict(results(no_readiness=result([0.1, 0.4, 0.5, 0.6], 1.0)))
  assert free.verdict == "refuted" and "not needed" in free.effect


def test_one_seed_that_never_arrives_widens_the_interval_to_refuted():
  made = results()
  made["ac2", 2]["result"] = result([0.1, 0.2, 0.2, 0.2], 1.0)
  found = table.verdict(made)
  assert found.verdict == "refuted" and found.interval.low < 1


def test_missing_runs_are_named_and_decide_nothing():
  made = results()
  del made["grpo", 1]
  assert table.verdict(made).verdict == "inconclusive"
  text = table.table(made)
  assert "Not run: grpo_1 (1 of 15)" in text and "1.99e20" in text and "no number" in text


def test_settings_are_plain_and_of_every_arm():
  for arm in (*config.ARMS, config.BASE, config.CRITIC, config.PROBE):
    found = config.settings(arm, "cpu")
    assert found and json.loads(json.dumps(found)) == found
    assert not any(" at 0x" in value for value in found.values()), found
  assert config.settings("ac2", "cpu")["critic.trust"] == "Readiness.ready"


# --- smoke ----------------------------------------------------------------------------------------


def rows(folder):
  """The metrics, without what depends on the clock."""
  lines = (folder / "ac2_0" / "run" / "metrics.jsonl").read_text().splitlines()
  made = [json.loads(line) for line in lines]
  return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in made]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_arm_runs_end_to_end_and_resumes_bit_for_bit(tmp_path):
  for job in ("base_0", "ac2_0", "critic_0"):
    (tmp_path / job).mkdir()
  for job in ("base_0", "ac2_0"):
    command("experiments.ac2.run", f"--job={job}", "--scale=smoke", f"--runs={tmp_path}")
  base = json.loads((tmp_path / "results" / "base_0.json").read_text())["result"]
  assert list(base["success_at_temperature"]) == ["1", "0.8", "0"]
  path = tmp_path / "results" / "ac2_0.json"
  found = json.loads(path.read_text())
  assert found["complete"] and found["settings"] == config.settings("ac2", "smoke")
  assert list(found["result"]["held_out"]) == ["0", "2"]
  assert found["result"]["steps"]["chunked"] == [0.75, 0.75]  # four groups, one of them audited
  spent = found["result"]["steps"]["flops/decode"]
  assert 0 < spent[0] < spent[1] < found["result"]["steps"]["flops/total"][1]

  command("experiments.ac2.run", "--job=critic_0", "--scale=smoke", f"--runs={tmp_path}")
  said = json.loads((tmp_path / "results" / "critic_0.json").read_text())["result"]
  assert set(said) == {"aided", "unaided"}

  again = tmp_path / "again"
  for job in ("base_0", "ac2_0"):
    shutil.copytree(tmp_path / job, again / job)
  checkpoints = sorted((again / "ac2_0" / "run" / "checkpoints").glob("step_*"))
  shutil.rmtree(checkpoints[-1])
  (again / "ac2_0" / "run" / "evaluation" / "step_000002.jsonl").unlink()
  (again / "ac2_0" / "run" / "evaluation" / "step_000002.json").unlink()
  command("experiments.ac2.run", "--job=ac2_0", "--scale=smoke", f"--runs={again}")
  assert rows(again) == rows(tmp_path)
  assert json.loads((again / "results" / "ac2_0.json").read_text())["result"] == found["result"]


def test_the_renderer_and_the_questions_agree():
  asked = RENDERER.opening(
    [Message("user", ledger.value_question(TASK, ["1"] * 19, ["2"] * 18))], ()
  )
  assert len(asked) + 2 < critic.LONGEST <= loop.CONTEXT
