"""The ledger: judged responses, states within them, values in symbols, and the scripts."""

import asyncio
import itertools
import math
import random

import pytest

from agentrl_jax.envs import ledger
from agentrl_jax.envs.ledger import at_prefix, make_task, make_tasks, misled_response
from agentrl_jax.rollout.environment import Malformed, Message
from agentrl_jax.rollout.records import Task
from agentrl_jax.rollout.symbols import SymbolRenderer

# 7 + 5 = 12, then 2 + 9 = 11, 1 + 0 = 1, ...
TASK = Task("ledger", "train", 0, {"start": 7, "operands": [5, 9, 0, 1, 1, 1, 1, 1, 1, 1, 1, 8]})
SUMS = [2, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7]
RIGHT = [*map(str, SUMS), "=", "7"]

GOLDEN = "9 0 7 0 8 9 8 3 7 6 1 2 6 ?"


def step(task, action):
  async def main():
    opening = await ledger.build(task)
    return opening, await opening.env.step(action)

  return asyncio.run(main())


def said(words):
  return Message("assistant", " ".join(words))


def test_sums_are_modulo_ten():
  assert ledger.sums(TASK) == SUMS
  assert ledger.question(TASK) == "7 5 9 0 1 1 1 1 1 1 1 1 8 ?"


@pytest.mark.parametrize(
  ("words", "correct", "finished"),
  [
    (RIGHT, 1.0, 1.0),
    (["=", "7"], 1.0, 1.0),  # the list is not looked at
    ([*RIGHT[:-1], "6"], 0.0, 1.0),
    ([*RIGHT[:-1], "6", "=", "7"], 0.0, 1.0),  # the first answer counts
    (RIGHT[:-1], 0.0, 0.0),
    (["=", "="], 0.0, 0.0),
    (["=", "v3"], 0.0, 0.0),
    ([], 0.0, 0.0),
  ],
)
def test_a_response_that_ended_is_judged_by_its_answer(words, correct, finished):
  _, found = step(TASK, said(words))
  assert found.reward == {"correct": correct, "finished": finished}
  assert found.terminated and not found.truncated and found.info == {"finished": finished}


def test_a_response_that_ran_out_is_truncated_unless_it_holds_an_answer():
  _, found = step(TASK, Malformed("2 1 1 2", "the turn ran out of tokens"))
  assert found.truncated and not found.terminated and found.reward["correct"] == 0.0
  _, found = step(TASK, Malformed(" ".join([*RIGHT, "7"]), "the turn ran out of tokens"))
  assert found.terminated and not found.truncated and found.reward["correct"] == 1.0


def test_an_episode_begins_after_its_prefix():
  begun = at_prefix(TASK, RIGHT[:12])
  opening, found = step(begun, said(["=", "7"]))
  assert [m.content for m in opening.messages] == [ledger.question(TASK), " ".join(RIGHT[:12])]
  assert found.reward["correct"] == 1.0 and opening.turn_limit == 1
  _, found = step(at_prefix(TASK, [*RIGHT[:13], "3"]), said([]))
  assert found.reward == {"correct": 0.0, "finished": 1.0}  # the prefix had answered
  bare, _ = step(TASK, said([]))
  assert len({bare.state_hash, opening.state_hash}) == 2
  with pytest.raises(ValueError, match="a prefix of 20 symbols, expected below 20"):
    asyncio.run(ledger.build(at_prefix(TASK, ["1"] * 20)))
  with pytest.raises(
    ValueError, match=r"task ledger/train/3: params \{'start': 1\} lack 'operands'"
  ):
    asyncio.run(ledger.build(Task("ledger", "train", 3, {"start": 1})))


def test_an_episode_ends_once():
  async def main():
    opening = await ledger.build(TASK)
    cut = await opening.env.cut("context")
    assert cut.truncated and cut.reward == {"correct": 0.0, "finished": 0.0}
    await opening.env.close()
    await opening.env.step(said(RIGHT))

  with pytest.raises(RuntimeError, match="the episode is over"):
    asyncio.run(main())


def test_splits_share_no_instance_and_tasks_do_not_change():
  train, held_out = (make_tasks(split, 400) for split in ledger.SPLITS)
  both = {(t.params["start"], *t.params["operands"]) for t in (*train, *held_out)}
  assert len(both) == 800
  assert ledger.question(train[0]) == GOLDEN
  assert make_tasks("train", 2, first_seed=5) == [make_task("train", 5), make_task("train", 6)]
  with pytest.raises(ValueError, match="split 'test', expected one of train, held_out"):
    make_task("test", 0)


# --- scripts --------------------------------------------------------------------------------------


def test_the_oracle_is_right_from_every_state_of_a_right_list():
  for task in make_tasks("held_out", 50):
    sums = list(map(str, ledger.sums(task)))
    for cut in range(13):
      begun = at_prefix(task, sums[:cut])
      answer = ledger.oracle(begun)([])
      assert step(begun, answer)[1].reward["correct"] == 1.0
      assert len(answer.content.split()) == 14 - cut


def test_the_misled_err_by_their_rule():
  """Each step is compared with what it built on."""
  off = {True: [], False: []}
  for task in make_tasks("train", 1500):
    words = ledger.misled(task)([]).content.split()
    assert words[12:] == ["=", words[11]]
    before = [task.params["start"], *map(int, words[:11])]
    for was, operand, now in zip(before, task.params["operands"], words, strict=False):
      off[operand in (7, 8, 9)].append((int(now) - was - operand) % 10)
  share = lambda rows, error: sum(x == error for x in rows) / len(rows)  # noqa: E731
  # .98 x .6 + .02 / 9 and .02 / 9 for "one too small"
  assert share(off[True], 9) == pytest.approx(0.590, abs=0.02)
  assert share(off[False], 9) == pytest.approx(0.002, abs=0.002)
  assert 1 - share(off[False], 0) == pytest.approx(0.02, abs=0.005)


def test_the_exact_chance_is_that_of_many_responses():
  draw = random.Random(0)
  for task in make_tasks("train", 4):
    for cut in (0, 8, 12):
      words = misled_response(task, draw).content.split()[:cut]
      exact = ledger.chance_of_misled(task, words)
      begun = at_prefix(task, words)
      drawn = [
        ledger.judge(task, [*words, *misled_response(begun, draw).content.split()])
        for _ in range(2000)
      ]
      error = math.sqrt(exact * (1 - exact) / 2000)
      assert abs(sum(drawn) / 2000 - exact) <= 4 * error


def test_the_exact_chance_by_hand():
  """Two steps are left, one after an 8: right if neither errs, or both slip back."""
  task = Task("ledger", "train", 0, {**TASK.params, "operands": [0] * 10 + [1, 8]})
  words = ["7"] * 10
  slip = 0.02 / 9
  step_of = {0: (0.98, 0.98 * 0.4), 1: (slip, slip), 9: (slip, slip + 0.98 * 0.6)}
  expected = 0.0
  for a, b in itertools.product(range(10), repeat=2):
    if (a + b) % 10 == 0:
      expected += step_of.get(a, (slip, slip))[0] * step_of.get(b, (slip, slip))[1]
  assert ledger.chance_of_misled(task, words) == pytest.approx(expected, abs=1e-12)


# --- values ---------------------------------------------------------------------------------------


def test_values_are_single_symbols():
  for i in range(11):
    assert ledger.read_value([ledger.value_word(i / 10)]) == i / 10
  for words in ([], ["7"], ["v3", "v3"], ["v11"], ["VALUE"]):
    assert math.isnan(ledger.read_value(words))
  for bad in (0.55, -0.1, 1.1):
    with pytest.raises(ValueError, match=f"value {bad}, expected a multiple of 0.1"):
      ledger.value_word(bad)


def test_a_question_tells_what_is_left_of_the_budget():
  asked = ledger.value_question(TASK, RIGHT[:4])
  assert asked == "7 5 9 0 1 1 1 1 1 1 1 1 8 ? 2 1 1 2 left16 VALUE"
  asked = ledger.value_question(TASK, [], RIGHT[:12])
  assert asked.endswith("8 REFERENCE 2 1 1 2 3 4 5 6 7 8 9 7 ? left20 VALUE")


def test_every_text_has_symbols():
  renderer = SymbolRenderer(
    ledger.SYMBOLS, end=ledger.END, read=ledger.read_words, write=ledger.write_words
  )
  texts = [ledger.question(TASK), ledger.value_question(TASK, RIGHT[:5], RIGHT[:12])]
  for text in texts:
    ids = renderer.opening([Message("user", text)], ())
    assert renderer.text(ids) == text
  written = renderer.write(said(RIGHT))
  assert len(written) == 15 and renderer.parse(written) == said(RIGHT)
  assert renderer.vocab_size == 47
  with pytest.raises(ValueError, match="expected a message"):
    ledger.write_words(())
