import asyncio
import json
import os
from pathlib import Path

import pytest

from agentrl_jax.envs import gsm8k
from agentrl_jax.orchestrate import tasksets
from agentrl_jax.rollout.environment import Message

ROW = {
  "question": "How many\nclips?",
  "answer": "48/2 = <<48/2=24>>24.\n<<48+24=72>>72\n#### 1,072",
}


def data_directory():
  root = Path(__file__).resolve().parents[2]
  directory = Path(os.environ.get("AGENTRL_DATA", root.parent / "shared" / "data")) / "gsm8k"
  if not directory.is_dir():
    pytest.skip(f"no GSM8K in {directory}: set AGENTRL_DATA to a folder with gsm8k/*.jsonl")
  return directory


async def play(task, policy):
  opening = await gsm8k.build(task)
  messages = list(opening.messages)
  for _ in range(opening.turn_limit):
    action = policy(messages)
    if isinstance(action, Message):
      messages.append(action)
    step = await opening.env.step(action)
    messages += step.observation
    if step.terminated:
      return step.reward
  return (await opening.env.cut("turns")).reward


def test_a_row_becomes_a_task():
  task = gsm8k.task_from_row(ROW, "train", 5)
  assert (task.family, task.split, task.seed) == ("gsm8k", "train", 5)
  assert task.params == {
    "question": "How many clips?",
    "answer": "1072",
    "expressions": ["48/2", "48+24"],
  }


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"answer": "#### 1"}, "field 'question' is None"),
    ({"question": " ", "answer": "#### 1"}, "field 'question'"),
    ({"question": "q", "answer": 3}, "field 'answer' is 3"),
    ({"question": "q", "answer": "3"}, "no '#### number'"),
    ({"question": "q", "answer": "#### many"}, "'many' is not a number"),
    *(
      ({"question": "q", "answer": f"#### {answer}"}, f"{answer!r} is not a number")
      for answer in ("1/2", "3.5e3", "12,34", "1 000", "2^3", "5.", "5%", "3 or 4", "--2")
    ),
  ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, row, reason):
  path = tmp_path / "tasks.jsonl"
  path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(row)}\n")
  with pytest.raises(ValueError) as caught:
    gsm8k.load_tasks(path, "train")
  assert str(caught.value).startswith(f"{path}, line 3: ") and reason in str(caught.value)


@pytest.mark.parametrize(
  ("answer", "number"),
  [("-3", "-3"), ("$1,234.50", "1234.5"), ("1234567", "1234567"), ("0.5 ", "0.5")],
)
def test_a_well_formed_answer_is_read(answer, number):
  task = gsm8k.task_from_row({"question": "q", "answer": f"#### {answer}"}, "train", 0)
  assert task.params["answer"] == number


@pytest.mark.parametrize(
  ("test", "words"),
  [
    (["c", "b"], "test.jsonl: problem 2 is problem 2 of {}/train.jsonl again: 'b'"),
    (["c", "d", "c"], "test.jsonl: problem 3 is problem 1 of {}/test.jsonl again: 'c'"),
  ],
)
def test_a_question_of_two_splits_or_twice_in_test_is_refused(tmp_path, test, words):
  for split, questions in (("train", ["a", "b", "a"]), ("test", test)):
    rows = [json.dumps({"question": q, "answer": "#### 1"}) for q in questions]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
  with pytest.raises(ValueError) as caught:
    tasksets.gsm8k(str(tmp_path), data_dir=str(tmp_path / "tasks"))
  assert words.format(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"examples": -1}, "examples is -1, expected 0 to 3"),
    ({"examples": 4}, "examples is 4, expected 0 to 3"),
    ({"held_out_tasks": -1}, "held_out_tasks -1, expected at least 1"),
    ({"two_step": 7.0}, "two_step is 7.0"),
    ({"finished": float("nan")}, "finished is nan, expected a finite reward"),
  ],
)
def test_numbers_of_a_task_set_that_make_no_sense_are_refused(tmp_path, fields, words):
  with pytest.raises(ValueError) as caught:
    tasksets.calculator(**{"train_tasks": 2, "held_out_tasks": 2} | fields, data_dir=str(tmp_path))
  assert words in str(caught.value)


def test_every_real_problem_loads_and_the_worked_solutions_score():
  tasks = gsm8k.load_tasks(data_directory() / "test.jsonl", "test")
  assert len(tasks) == 1319 and tasks[0].params["answer"] == "18"
  assert len(gsm8k.load_tasks(data_directory() / "train.jsonl", "train")) == 7473
  within = [t for t in tasks if len(t.params["expressions"]) < 8]
  assert len(within) > 1250
  for task in within[:200]:
    reward = asyncio.run(play(task, gsm8k.oracle(task)))
    assert reward["correct"] == 1.0 and reward["finished"] == 1.0
