"""The environment outside the repository that docs/environments.md shows."""

import asyncio
import pathlib
import re

import fiddle as fdl
import numpy as np
import pytest

from agentrl_jax.orchestrate import tiny
from agentrl_jax.rollout.environment import Malformed, Message, ToolCall

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names():
  """What the complete file defines."""
  text = (ROOT / "docs/environments.md").read_text()
  found = re.search(r"```python\n(# my_task\.py\n.*?)```", text, re.S)
  assert found
  defined = {}
  exec(found.group(1), defined)
  return defined


@pytest.fixture
def opening(names):
  return asyncio.run(names["build"](names["make_task"]("train", 3)))


def test_the_documented_environment_answers_calls_and_scores_answers(names, opening):
  params = names["make_task"]("train", 3).params

  async def play(*actions):
    env = (await names["build"](names["make_task"]("train", 3))).env
    return [await env.step(action) for action in actions]

  wanted = ToolCall("price", {"fruit": params["question"].split()[3]})
  unknown = ToolCall("price", {"fruit": "brick"})
  told, refused = asyncio.run(play((wanted, unknown), Malformed("?", "no line")))
  assert [m.content for m in told.observation] == [str(params["answer"]), "error: no such fruit"]
  assert [m.content for m in refused.observation] == ["error: no line"]
  assert not told.terminated and not refused.terminated and not told.reward
  for text, worth in ((f"Answer: {params['answer']}", 1.0), ("Answer: 5", 0.0)):
    (end,) = asyncio.run(play(Message("assistant", text)))
    assert end.terminated and end.reward == {"correct": worth}
  cut = asyncio.run(opening.env.cut("turns"))
  assert cut.truncated and cut.reward == {"correct": 0.0}


def test_the_documented_tasks_are_read_as_lines(names, opening, tmp_path):
  directory = tmp_path / "model"
  directory.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64)(directory)
  tasks = fdl.build(names["config"]().tasks)
  renderer = tasks.renderer(directory)
  lines = renderer.text(renderer.opening(opening.messages[:3], opening.tools))
  assert lines == "Question: What does one grape cost?"
  call = renderer.write((ToolCall("price", {"fruit": "kiwi"}),))
  assert renderer.text(np.asarray(call)) == "Tool: price(kiwi)"
  assert renderer.parse(call) == (ToolCall("price", {"fruit": "kiwi"}),)
  assert len(tasks.train.tasks) == 256 and len(tasks.held_out) == 64
  assert not {str(t.params) for t in tasks.held_out} & {str(t.params) for t in tasks.train.tasks}
