"""Running sums modulo 10 in one response: a long derivation of which every prefix is a state.

The policy is told a start digit and `OPERANDS` operand digits, lists the running sums, then `=` and
the answer. An episode may begin after any part of a response (`at_prefix`). The same symbols ask
for the value of such a state (`value_question`), answered by one of eleven value symbols.
"""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence

from agentrl_jax.rollout.environment import Action, Message, Opening, Step
from agentrl_jax.rollout.records import Task
from agentrl_jax.rollout.scripted import Policy

OPERANDS = 12
BUDGET = 20  # symbols of a response, prefix included; a right one has OPERANDS + 3 with the end
PARTS = 10  # values are multiples of 1 / PARTS
SPLITS = ("train", "held_out")
MISLEADING = (7, 8, 9)  # operands whose sums the scripted `misled` gets wrong by one,
WRONG = 0.6  # so often; any other digit
SLIPS = 0.02  # so often in every step

END = "<|end|>"
VALUES = tuple(f"v{i}" for i in range(PARTS + 1))
SYMBOLS = (
  *(END, "?", "=", "REFERENCE", "VALUE", *VALUES),
  *(str(digit) for digit in range(10)),
  *(f"left{i}" for i in range(BUDGET + 1)),
)


def sums(task: Task) -> list[int]:
  """The right running sums; the last is the answer."""
  total, found = task.params["start"], []
  for operand in task.params["operands"]:
    total = (total + operand) % 10
    found.append(total)
  return found


def question(task: Task) -> str:
  """What the policy is told, as symbols."""
  return f"{_numbers(task)} ?"


def at_prefix(task: Task, words: Sequence[str]) -> Task:
  """The same problem, begun after `words` of a response to it."""
  return Task(task.family, task.split, task.seed, {**task.params, "prefix": " ".join(words)})


def answered(words: Sequence[str]) -> int | None:
  """The digit after the first `=`, None where a response holds no complete answer."""
  if "=" not in words:
    return None
  rest = words[list(words).index("=") + 1 :]
  return int(rest[0]) if rest and rest[0].isdecimal() else None


def judge(task: Task, words: Sequence[str]) -> float:
  """1 for a response, prefix included, whose answer is right, else 0; the list is not looked at."""
  return float(answered(words) == sums(task)[-1])


# --- values in symbols ----------------------------------------------------------------------------


def value_question(task: Task, words: Sequence[str], reference: Sequence[str] = ()) -> str:
  """Asks for the expected score of a response that begins with `words`, in what is left of its
  budget.

  Args:
    task: the problem.
    words: the response so far, below `BUDGET` symbols.
    reference: the running list of a response that was right, if there is one.
  """
  known = ["REFERENCE", *reference] if reference else []
  parts = [_numbers(task), *known, "?", *words, f"left{BUDGET - len(words)}", "VALUE"]
  return " ".join(parts)


def value_word(value: float) -> str:
  """The symbol of a value on the grid. Raises ValueError for any other number."""
  index = round(value * PARTS)
  if not 0 <= index <= PARTS or abs(value * PARTS - index) > 1e-9:
    raise ValueError(f"value {value}, expected a multiple of {1 / PARTS} between 0 and 1")
  return VALUES[index]


def read_value(words: Sequence[str]) -> float:
  """The value that an answer without its end states; NaN if it is anything else."""
  if len(words) != 1 or words[0] not in VALUES:
    return math.nan
  return VALUES.index(words[0]) / PARTS


# --- environment ----------------------------------------------------------------------------------


class Ledger:
  """One response, in one turn.

  Reward parts: `correct`, and `finished` (it holds a complete answer). A turn that ran out of
  tokens without one is truncated, for whoever asked for it to value.
  """

  def __init__(self, task: Task):
    self._task = task
    self._over = False

  async def step(self, action: Action) -> Step:
    if self._over:
      raise RuntimeError("the episode is over")
    self._over = True
    text = action.content if isinstance(action, Message) else getattr(action, "text", "")
    words = [*_prefix(self._task), *text.split()]
    finished = float(answered(words) is not None)
    ended = isinstance(action, Message) or bool(finished)
    reward = {"correct": judge(self._task, words), "finished": finished}
    return Step((), reward, terminated=ended, truncated=not ended, info={"finished": finished})

  async def cut(self, reason: str) -> Step:
    del reason
    self._over = True
    return Step((), {"correct": 0.0, "finished": 0.0}, terminated=False, truncated=True)

  async def close(self) -> None:
    self._over = True


async def build(task: Task) -> Opening:
  """The environment of a task of `make_task`, at its prefix if it has one.

  Raises ValueError naming what is wrong with its params, or a prefix that leaves no budget.
  """
  name = f"{task.family}/{task.split}/{task.seed}"
  try:
    told, begun = question(task), _prefix(task)
  except (KeyError, TypeError) as error:
    raise ValueError(f"task {name}: params {dict(task.params)!r} lack {error}") from error
  if len(begun) >= BUDGET:
    raise ValueError(f"task {name}: a prefix of {len(begun)} symbols, expected below {BUDGET}")
  messages = [Message("user", told)]
  messages += [Message("assistant", " ".join(begun))] if begun else []
  state = json.dumps([task.family, dict(task.params)], sort_keys=True)
  return Opening(Ledger(task), messages, (), 1, hashlib.sha256(state.encode()).hexdigest()[:16])


def combine(parts: Mapping[str, float]) -> float:
  """1 for a right answer, else 0."""
  return parts.get("correct", 0.0)


def read_words(words: Sequence[str]) -> Action:
  """A response is its text."""
  return Message("assistant", " ".join(words))


def write_words(action: Action) -> list[str]:
  """Inverse of `read_words`. Raises ValueError for calls, of which there are none here."""
  if not isinstance(action, Message):
    raise ValueError(f"{action!r}, expected a message")
  return action.content.split()


def _numbers(task: Task) -> str:
  return " ".join(map(str, (task.params["start"], *task.params["operands"])))


def _prefix(task: Task) -> list[str]:
  return task.params.get("prefix", "").split()


# --- tasks ----------------------------------------------------------------------------------------


def make_task(split: str, seed: int) -> Task:
  """The task of a seed. Raises ValueError for an unknown split."""
  if split not in SPLITS:
    raise ValueError(f"split {split!r}, expected one of {', '.join(SPLITS)}")
  draw = random.Random(f"ledger/{split}/{seed}")
  while True:
    digits = [draw.randrange(10) for _ in range(OPERANDS + 1)]
    if _split_of(digits) == split:
      return Task("ledger", split, seed, {"start": digits[0], "operands": digits[1:]})


def make_tasks(split: str, count: int, *, first_seed: int = 0) -> list[Task]:
  """The tasks of consecutive seeds."""
  return [make_task(split, first_seed + i) for i in range(count)]


def _split_of(digits: Sequence[int]) -> str:
  """A quarter of all instances is held out, by a hash of the instance alone."""
  digest = hashlib.sha256(json.dumps(list(digits)).encode()).digest()
  return "held_out" if digest[0] % 4 == 0 else "train"


# --- scripted policies ----------------------------------------------------------------------------


def oracle(task: Task) -> Policy:
  """Goes on from a prefix without an error of its own."""
  return lambda messages: _response(task, random.Random(0), wrong=0.0, slips=0.0)


def misled(task: Task) -> Policy:
  """Follows a wrong rule: after an operand of `MISLEADING` its sum is one too small, `WRONG` of the
  time; any step may slip. Later sums build on what it wrote.
  """
  draw = random.Random(f"misled/{task.split}/{task.seed}")
  return lambda messages: misled_response(task, draw)


def misled_response(task: Task, draw: random.Random) -> Message:
  """What `misled` says, by draws of the caller's."""
  return _response(task, draw, wrong=WRONG, slips=SLIPS)


def _response(task: Task, draw: random.Random, *, wrong: float, slips: float) -> Message:
  """The rest of a response whose prefix is a part of a running list."""
  begun, operands = _prefix(task), task.params["operands"]
  total, words = (int(begun[-1]) if begun else task.params["start"]), list[str]()
  for operand in operands[len(begun) :]:
    total = (total + operand + _error(operand, draw, wrong, slips)) % 10
    words.append(str(total))
  return Message("assistant", " ".join([*words, "=", str(total)]))


def _error(operand: int, draw: random.Random, wrong: float, slips: float) -> int:
  """What a step adds to the right sum, modulo 10."""
  if draw.random() < slips:
    return draw.randrange(1, 10)
  return -1 if operand in MISLEADING and draw.random() < wrong else 0


def chance_of_misled(task: Task, words: Sequence[str]) -> float:
  """Exact chance that `misled` goes on from `words`, a part of a running list, to the right answer.

  The sum of the errors that are left must undo that of the last sum: a convolution modulo 10.
  """
  operands = task.params["operands"]
  right = [task.params["start"], *sums(task)]
  written = int(words[-1]) if words else task.params["start"]
  chance = [0.0] * 10  # of being off by so much
  chance[(written - right[len(words)]) % 10] = 1.0
  for operand in operands[len(words) :]:
    step = [SLIPS / 9] * 10
    astray = (1 - SLIPS) * (WRONG if operand in MISLEADING else 0.0)
    step[0] = 1 - SLIPS - astray
    step[9] += astray
    chance = [sum(chance[(i - j) % 10] * step[j] for j in range(10)) for i in range(10)]
  return chance[0]
