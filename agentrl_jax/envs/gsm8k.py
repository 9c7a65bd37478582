"""GSM8K (Cobbe et al., 2021): grade-school word problems, in the calculator's environment.

Rows are `{"question": text, "answer": text that ends with "#### number"}`, from a jsonl or parquet
path.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.envs import calculator
from agentrl_jax.envs.calculator import Policy
from agentrl_jax.envs.datasets import read_tasks
from agentrl_jax.rollout.environment import Action, Message, ToolCall
from agentrl_jax.rollout.records import Task

FAMILY = "gsm8k"
EXAMPLES = (
  (
    "Natalie sold 24 clips in April and half as many in May. How many clips in all?",
    "24+24/2",
    "36",
  ),
  (
    "A coat costs $80. It is sold for 15% less. What is the price?",
    "80-80*15/100",
    "68",
  ),
)
_STEP = re.compile(r"<<([^=<>]+)=[^<>]*>>")  # the worked solutions' own calculator calls
# Of a record and not of a model: an optional sign and currency, thousands by commas, decimals.
_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")

build = functools.partial(
  calculator.build,
  turn_limit=8,
  system="Solve the problem step by step with calc, then write the answer as 'Answer: number'.",
  examples=EXAMPLES,
)


def task_from_row(row: Mapping[str, Any], split: str, index: int) -> Task:
  """One problem. Raises ValueError with the reason if a field is missing or the answer is no
  number.
  """
  for name in ("question", "answer"):
    if not isinstance(row.get(name), str) or not row[name].strip():
      raise ValueError(f"field {name!r} is {row.get(name)!r}, expected text")
  work, mark, last = row["answer"].rpartition("####")
  if not mark:
    raise ValueError("field 'answer' has no '#### number' at its end")
  answer = calculator.parse_answer(last) if _NUMBER.fullmatch(last.strip()) else None
  if answer is None:
    raise ValueError(f"answer {last.strip()!r} is not a number")
  params = {
    "question": " ".join(row["question"].split()),
    "answer": calculator.format_number(answer),
    "expressions": [e.strip() for e in _STEP.findall(work)],
  }
  return Task(FAMILY, split, index, params)


def load_tasks(path: str | Path, split: str) -> list[Task]:
  """All problems of a jsonl or parquet file, in its order. Raises as `read_tasks`."""
  return read_tasks(path, functools.partial(task_from_row, split=split))


def oracle(task: Task) -> Policy:
  """Makes the worked solution's calls one by one, then gives the recorded answer."""

  def act(messages: Sequence[Message]) -> Action:
    asked = max(i for i, m in enumerate(messages) if m.role == "user")
    done = sum(m.role == "tool" for m in messages[asked:])
    if done < len(task.params["expressions"]):
      return (ToolCall(calculator.TOOL.name, {"expression": task.params["expressions"][done]}),)
    return Message("assistant", f"Answer: {task.params['answer']}")

  return act
