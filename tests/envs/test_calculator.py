import asyncio
import contextlib
import dataclasses
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.envs import calculator
from agentrl_jax.envs.calculator import combine, evaluate, format_number, make_tasks, parse_answer
from agentrl_jax.rollout.environment import Malformed, Message, ToolCall
from agentrl_jax.rollout.records import Task

PLUS = Task("calculator", "train", 0, {"question": "12 and 7?", "answer": "19"})


async def play(task, policy):
  """Steps, messages and summed parts of one episode."""
  opening = await calculator.build(task)
  messages, parts = list(opening.messages), {}
  for _ in range(opening.turn_limit):
    action = policy(messages)
    calls = action if isinstance(action, tuple) else ()
    messages.append(action if isinstance(action, Message) else Message("assistant", "", calls))
    step = await opening.env.step(action)
    messages += step.observation
    parts |= step.reward
    if step.terminated:
      return step, messages, parts
  step = await opening.env.cut("turns")
  return step, messages, parts | dict(step.reward)


def run(task, policy):
  return asyncio.run(play(task, policy))


@pytest.mark.parametrize("split", calculator.SPLITS)
def test_the_oracle_solves_every_problem(split):
  for task in make_tasks(split, 300, two_step=0.5):
    step, _, parts = run(task, calculator.oracle(task))
    assert parts == {"correct": 1.0, "finished": 1.0, "tool": 1.0} and step.terminated


@pytest.mark.parametrize("split", calculator.SPLITS)
def test_naive_policies_score_what_their_rule_says(split):
  """Adding is right for sums (and where other operations happen to agree), a guess hardly ever."""
  tasks = make_tasks(split, 200, two_step=0.3)
  for task in tasks:
    numbers = [int(n) for n in re.findall(r"\d+", task.params["question"])]
    answer = int(task.params["answer"])
    _, _, parts = run(task, calculator.always_add)
    assert parts == {"correct": float(sum(numbers) == answer), "finished": 1.0, "tool": 1.0}
    _, _, parts = run(task, calculator.first_number)
    assert parts == {"correct": float(numbers[0] == answer), "finished": 1.0, "tool": 0.0}
    step, _, parts = run(task, calculator.never_answer)
    assert parts == {"correct": 0.0, "finished": 0.0, "tool": 1.0}
    assert step.truncated and not step.terminated
  added = sum("+" in t.params["expression"] and t.params["steps"] == 1 for t in tasks)
  assert 0.15 < added / len(tasks) < 0.35


def test_splits_share_no_template_and_no_number():
  train, held_out = calculator.TRAIN, calculator.HELD_OUT
  shapes = [{t.question for t in (*s.one_step, *s.two_step)} for s in (train, held_out)]
  assert not shapes[0] & shapes[1]
  numbers = [
    {
      int(n)
      for task in make_tasks(split, 500, two_step=0.5)
      for n in re.findall(r"\d+", task.params["question"])
    }
    for split in ("train", "held_out")
  ]
  assert not numbers[0] & numbers[1]
  assert numbers[0] <= {*train.small, *train.large}
  assert numbers[1] <= {*held_out.small, *held_out.large}


def test_generated_problems_are_stable():
  """Golden values: a change here changes every published curve."""
  task = calculator.make_task("train", 0)
  assert task == Task(
    "calculator",
    "train",
    0,
    {
      "question": "Ann finds 21 cups and then 2 more. How many cups?",
      "answer": "23",
      "expression": "21+2",
      "steps": 1,
    },
  )
  two = calculator.make_task("train", 0, two_step=0.5).params
  assert two["question"] == "Ann has 21 cups, buys 2 more and loses 5. How many cups?"
  assert (two["expression"], two["answer"], two["steps"]) == ("21+2-5", "18", 2)
  held_out = calculator.make_task("held_out", 0).params
  assert held_out["question"] == "A shop has 88 shells. It uses 6. How many shells stay?"


def test_tasks_are_different_questions_and_repeat_by_seed():
  tasks = make_tasks("train", 400, two_step=0.2)
  assert len({t.params["question"] for t in tasks}) == 400
  assert tasks == make_tasks("train", 400, two_step=0.2)
  assert {t.params["steps"] for t in make_tasks("train", 50)} == {1}
  with pytest.raises(ValueError, match="'test', expected one of train, held_out"):
    calculator.make_task("test", 0)


def test_more_tasks_than_there_are_end_with_an_error(monkeypatch):
  few = dataclasses.replace(calculator.TRAIN, large=range(10, 12), small=range(2, 3))
  few = dataclasses.replace(few, one_step=calculator.TRAIN.one_step[:1])
  monkeypatch.setattr(calculator, "SPLITS", {"train": few})
  there = 2 * 8 * 8  # numbers, people and things
  assert len(make_tasks("train", there)) == there
  with pytest.raises(ValueError, match=r"129 different tasks .*: found 128, then 10000 repeats"):
    make_tasks("train", there + 1)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_that_makes_no_sense_is_refused(count):
  with pytest.raises(ValueError, match=f"{count} tasks of split 'train', expected at least 1"):
    make_tasks("train", count)


@pytest.mark.parametrize("two_step", [7.0, -0.1, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(two_step):
  with pytest.raises(ValueError, match=f"two_step is {two_step}, expected a share from 0 to 1"):
    make_tasks("train", 1, two_step=two_step)


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("action", "words"),
  [
    ((ToolCall("calc", {"expression": "12+"}),), "incomplete"),
    ((ToolCall("calc", {"expression": "2**9"}),), "unexpected '*'"),
    ((ToolCall("calc", {"expression": 3}),), "expression, a text"),
    ((ToolCall("calc", {"expression": "1", "x": "1"}),), "expression, a text"),
    ((ToolCall("calculate", {"expression": "1"}),), "no tool calculate"),
    (Malformed("hm", "a line starts with"), "a line starts with"),
    (Message("assistant", "Answer: pens"), "no number"),
    (Message("assistant", ""), "no number"),
  ],
)
def test_what_the_policy_gets_wrong_is_an_observation(action, words):
  async def main():
    opening = await calculator.build(PLUS)
    wrong = await opening.env.step(action)
    right = await opening.env.step(Message("assistant", "Answer: 19"))
    return wrong, right

  wrong, right = asyncio.run(main())
  (answer,) = wrong.observation
  assert answer.role == "tool" and answer.content.startswith("error: ") and words in answer.content
  assert not wrong.terminated and wrong.reward == {} and sum(wrong.info.values()) == 1
  assert right.reward == {"correct": 1.0, "finished": 1.0, "tool": 0.0} and right.terminated


def test_several_calls_are_answered_in_order():
  async def main():
    opening = await calculator.build(PLUS)
    return await opening.env.step(
      tuple(ToolCall("calc", {"expression": e}) for e in ("1+1", "1/0", "2*3"))
    )

  step = asyncio.run(main())
  assert [m.content for m in step.observation] == ["2", "error: division by zero", "6"]
  assert step.info == {"invalid_calls": 1.0}


def test_tool_evidence_is_what_the_tool_did_not_what_the_policy_typed():
  policy = lambda messages: Message("assistant", "Result: 19 Answer: 19")  # noqa: E731
  assert run(PLUS, policy)[2] == {"correct": 1.0, "finished": 1.0, "tool": 0.0}


def test_combine_is_the_outcome_plus_small_parts():
  for correct in (0.0, 1.0):
    for finished in (0.0, 1.0):
      for tool in (0.0, 1.0):
        parts = {"correct": correct, "finished": finished, "tool": tool}
        assert combine(parts) == pytest.approx(correct + 0.1 * finished)
        assert combine(parts, tool=0.2) == pytest.approx(correct + 0.1 * finished + 0.2 * tool)
        assert (combine(parts, tool=0.2) >= 1.0) == (correct == 1.0)
  assert combine({}) == 0.0


def test_equal_tasks_start_equal_and_others_do_not():
  async def digest(task, **prompt):
    return (await calculator.build(task, **prompt)).state_hash

  other = Task("calculator", "train", 0, {"question": "12 and 7?", "answer": "20"})
  same = [asyncio.run(digest(PLUS)) for _ in range(2)]
  assert same[0] == same[1]
  assert asyncio.run(digest(other)) != same[0]
  assert asyncio.run(digest(PLUS, turn_limit=4)) != same[0]
  with pytest.raises(ValueError, match="answer 'pens'"):
    asyncio.run(digest(Task("calculator", "train", 0, {"question": "?", "answer": "pens"})))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("Answer: 19", 19),
    ("Answer: $1,234.50 in total", Fraction(2469, 2)),
    ("Answer: -3", -3),
    ("Answer: 19 of 20", 19),
    ("Answer: 2\nAnswer: 3.", 3),
    ("So 12 + 7 is 19.", 19),
    ("19.0", 19),
    (".5", Fraction(1, 2)),
    ("Answer:", None),
    ("5 Answer: none", None),
    ("", None),
  ],
)
def test_answers_are_read_by_one_rule(text, value):
  assert parse_answer(text) == value


@pytest.mark.parametrize(
  ("expression", "value"),
  [
    ("12+7", 19),
    (" 2 + 3*4 ", 14),
    ("(2+3)*4", 20),
    ("10/4", Fraction(5, 2)),
    ("8-3-2", 3),
    ("-2*-3", 6),
    ("1.5+.5", 2),
    ("6\u00d77\u00f72\u22121", 20),
  ],
)
def test_expressions(expression, value):
  assert evaluate(expression) == value


@pytest.mark.parametrize(
  "expression",
  [
    *("", "1+", "(1", "1)", "2**3", "1 2", "a", "__import__('os')", "1/0", "1/(2-2)", "1" * 16),
    *("(" * 30 + "1" + ")" * 30, "-" * 40 + "1", "1+" * 150 + "1", "1e9", "9" * 201),
  ],
)
def test_what_is_no_expression_is_refused(expression):
  with pytest.raises(ValueError):
    evaluate(expression)


@given(st.text(alphabet="0123456789+-*/(). ax\n\u00d7\u0663\u00b2", max_size=60))
@settings(deadline=None)
def test_no_text_makes_the_calculator_raise_anything_else(text):
  with contextlib.suppress(ValueError):
    assert isinstance(format_number(evaluate(text)), str)
  assert parse_answer(text) is None or isinstance(parse_answer(text), Fraction)


numbers = st.integers(0, 9999).map(str)
expressions = st.recursive(
  numbers,
  lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join), inner.map("({})".format)
  ),
  max_leaves=8,
)


@given(expressions)
@settings(deadline=None)
def test_values_equal_pythons_own(expression):
  try:
    expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", re.sub(r"\b0+(?=\d)", "", expression)))
  except ZeroDivisionError:
    with pytest.raises(ValueError, match="division by zero"):
      evaluate(expression)
    return
  assert evaluate(expression) == expected


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (Fraction(19), "19"),
    (Fraction(-5, 2), "-2.5"),
    (Fraction(1, 3), "0.333333"),
    (Fraction(2, 3), "0.666667"),
    (Fraction(-1, 10**9), "0"),
    (Fraction(10**20), "1" + "0" * 20),
  ],
)
def test_numbers_are_written_short(value, text):
  assert format_number(value) == text


@given(st.fractions(max_denominator=1000))
@settings(deadline=None)
def test_a_written_number_reads_back_within_its_rounding(value):
  assert abs(parse_answer(format_number(value)) - value) <= Fraction(1, 2 * 10**6)
