import asyncio
import json
import os
from pathlib import Path

import pytest

from agentrl_jax.envs import gsm8k
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
  ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, row, reason):
  path = tmp_path / "tasks.jsonl"
  path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(row)}\n")
  with pytest.raises(ValueError) as caught:
    gsm8k.load_tasks(path, "train")
  assert str(caught.value).startswith(f"{path}, line 3: ") and reason in str(caught.value)


def test_every_real_problem_loads_and_the_worked_solutions_score():
  tasks = gsm8k.load_tasks(data_directory() / "test.jsonl", "test")
  assert len(tasks) == 1319 and tasks[0].params["answer"] == "18"
  assert len(gsm8k.load_tasks(data_directory() / "train.jsonl", "train")) == 7473
  within = [t for t in tasks if len(t.params["expressions"]) < 8]
  assert len(within) > 1250
  for task in within[:200]:
    reward = asyncio.run(play(task, gsm8k.oracle(task)))
    assert reward["correct"] == 1.0 and reward["finished"] == 1.0
