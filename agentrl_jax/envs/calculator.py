"""Word problems with a calculator: the smallest task in which using a tool and finishing both
matter.

A problem is a question with one number for an answer. The policy may call `calc(expression)` and
ends the episode by answering. Problems are generated from a seed; train and held-out problems share
no template and no number. Any other set of (question, answer) pairs plays in the same environment
(`envs/gsm8k.py`).
"""

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from agentrl_jax.rollout.environment import (
  Action,
  Malformed,
  Message,
  Opening,
  Step,
  Tool,
  ToolCall,
)
from agentrl_jax.rollout.records import Task

FAMILY = "calculator"
TOOL = Tool(
  "calc",
  "Evaluates an arithmetic expression with + - * / and parentheses.",
  {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 200}},
    "required": ["expression"],
    "additionalProperties": False,
  },
)

Policy = Callable[[Sequence[Message]], Action]

# --- arithmetic -----------------------------------------------------------------------------------

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 20
MAX_DIGITS = 15
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(.))", re.DOTALL)
_SAME = str.maketrans("\u00d7\u00f7\u2212", "*/-")


def evaluate(expression: str) -> Fraction:
  """The exact value of an arithmetic expression: + - * / and parentheses over integers and
  decimals.

  Raises:
    ValueError: not such an expression, division by zero, or larger than the caps on characters,
      nesting and digits of a number (so the work is bounded).
  """
  if len(expression) > MAX_EXPRESSION_CHARS:
    raise ValueError(f"{len(expression)} characters, at most {MAX_EXPRESSION_CHARS}")
  tokens = _TOKEN.findall(expression.translate(_SAME).strip())
  value, at = _sum(tokens, 0, 0)
  if at != len(tokens):
    raise ValueError(f"unexpected {''.join(tokens[at])!r}")
  return value


def _sum(tokens: Sequence[tuple[str, str]], at: int, depth: int) -> tuple[Fraction, int]:
  value, at = _product(tokens, at, depth)
  while at < len(tokens) and tokens[at][1] in ("+", "-"):
    right, after = _product(tokens, at + 1, depth)
    value = value + right if tokens[at][1] == "+" else value - right
    at = after
  return value, at


def _product(tokens: Sequence[tuple[str, str]], at: int, depth: int) -> tuple[Fraction, int]:
  value, at = _atom(tokens, at, depth)
  while at < len(tokens) and tokens[at][1] in ("*", "/"):
    right, after = _atom(tokens, at + 1, depth)
    if tokens[at][1] == "/" and not right:
      raise ValueError("division by zero")
    value = value * right if tokens[at][1] == "*" else value / right
    at = after
  return value, at


def _atom(tokens: Sequence[tuple[str, str]], at: int, depth: int) -> tuple[Fraction, int]:
  if depth > MAX_DEPTH:
    raise ValueError(f"nested deeper than {MAX_DEPTH}")
  if at >= len(tokens):
    raise ValueError("incomplete")
  number, symbol = tokens[at]
  if number:
    if len(number) > MAX_DIGITS:
      raise ValueError(f"a number of {len(number)} digits, at most {MAX_DIGITS}")
    return Fraction(number.rstrip(".")), at + 1
  if symbol == "-":
    value, at = _atom(tokens, at + 1, depth + 1)
    return -value, at
  if symbol == "(":
    value, at = _sum(tokens, at + 1, depth + 1)
    if at >= len(tokens) or tokens[at][1] != ")":
      raise ValueError("a parenthesis is not closed")
    return value, at + 1
  raise ValueError(f"unexpected {symbol!r}")


def format_number(value: Fraction) -> str:
  """An integer as such, else a decimal rounded to six places without trailing zeros."""
  if value.denominator == 1:
    return str(value.numerator)
  scaled = round(value * 10**6)
  whole, rest = divmod(abs(scaled), 10**6)
  digits = f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
  return f"-{digits}" if scaled < 0 else digits


_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-\u2212]?\$?\.\d+")


def parse_answer(text: str) -> Fraction | None:
  """The number a text answers with, for training and evaluation alike; None if there is none.

  After the last "Answer:" the first number counts, in a text without it the last one. A currency
  sign and thousands separators are read over.
  """
  _, label, rest = text.rpartition("Answer:")
  numbers = _NUMBER.findall(rest if label else text)
  if not numbers:
    return None
  number = re.sub(r"[$,]", "", numbers[0] if label else numbers[-1]).replace("\u2212", "-")
  return Fraction(number) if len(number) <= MAX_EXPRESSION_CHARS else None


# --- environment ----------------------------------------------------------------------------------


def combine(parts: Mapping[str, float], *, finished: float = 0.1, tool: float = 0.0) -> float:
  """`correct`, plus small rewards for answering at all and for having used the tool; 1 is a
  success.
  """
  return (
    parts.get("correct", 0.0)
    + finished * parts.get("finished", 0.0)
    + tool * parts.get("tool", 0.0)
  )


class Calculator:
  """One problem. Ends when the policy answers with a number.

  Reward parts, all given at the end: `correct` (the outcome), `finished` (a number was answered)
  and `tool` (the calculator returned a value: evidence is what the tool did, never what the policy
  typed).
  """

  def __init__(self, answer: Fraction):
    self._answer = answer
    self._results = 0
    self._over = False

  async def step(self, action: Action) -> Step:
    if self._over:
      raise RuntimeError("the episode is over")
    match action:
      case Message():
        number = parse_answer(action.content)
        if number is None:
          return _invalid("no number to answer with")
        self._over = True
        return Step((), self._parts(number), terminated=True)
      case Malformed():
        return _invalid(action.reason)
      case calls:
        answers = [self._call(call) for call in calls]
        wrong = sum(a.content.startswith("error:") for a in answers)
        return Step(tuple(answers), {}, terminated=False, info={"invalid_calls": float(wrong)})

  async def cut(self, reason: str) -> Step:
    self._over = True
    return Step((), self._parts(None), terminated=False, truncated=True)

  async def close(self) -> None:
    self._over = True

  def _call(self, call: ToolCall) -> Message:
    if call.name != TOOL.name:
      return Message("tool", f"error: no tool {call.name[:20]}, only {TOOL.name}", name=TOOL.name)
    expression = call.arguments.get("expression")
    if not isinstance(expression, str) or len(call.arguments) != 1:
      return Message("tool", "error: the one argument is expression, a text", name=TOOL.name)
    try:
      value = evaluate(expression)
    except ValueError as error:
      return Message("tool", f"error: {error}", name=TOOL.name)
    self._results += 1
    return Message("tool", format_number(value), name=TOOL.name)

  def _parts(self, answer: Fraction | None) -> dict[str, float]:
    return {
      "correct": float(answer == self._answer),
      "finished": float(answer is not None),
      "tool": float(self._results > 0),
    }


def _invalid(reason: str) -> Step:
  message = Message("tool", f"error: {reason}", name=TOOL.name)
  return Step((message,), {}, terminated=False, info={"invalid_actions": 1.0})


SYSTEM = "Use calc, then answer."
EXAMPLES = (
  ("Ann has 12 pens and buys 7 more. How many pens?", "12+7", "19"),
  ("Tom has 30 cards and loses 4. How many cards?", "30-4", "26"),
  ("Sam has 15 bags with 3 eggs each. How many eggs?", "15*3", "45"),
)


def example_messages(examples: Sequence[tuple[str, str, str]] = EXAMPLES) -> list[Message]:
  """Worked dialogues of (question, expression, answer) that show the form of a call and of an
  answer.
  """
  messages = []
  for question, expression, answer in examples:
    messages += [
      Message("user", question),
      Message("assistant", "", (ToolCall(TOOL.name, {"expression": expression}),)),
      Message("tool", answer, name=TOOL.name),
      Message("assistant", f"Answer: {answer}"),
    ]
  return messages


async def build(
  task: Task,
  *,
  turn_limit: int = 3,
  system: str | None = None,
  examples: Sequence[tuple[str, str, str]] = EXAMPLES,
) -> Opening:
  """The environment of a task with `params` question and answer; other arguments set the prompt.

  Raises:
    ValueError: the task's answer is not a number.
  """
  question, answer = task.params["question"], parse_answer(str(task.params["answer"]))
  if answer is None:
    raise ValueError(
      f"task {task.family}/{task.split}/{task.seed}: answer {task.params['answer']!r}"
    )
  messages = [
    *([Message("system", system)] if system else []),
    *example_messages(examples),
    Message("user", question),
  ]
  state = [question, format_number(answer), turn_limit, [[m.role, m.content] for m in messages]]
  digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
  return Opening(Calculator(answer), messages, (TOOL,), turn_limit, digest)


# --- problems -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Template:
  """A question and the expression that answers it, over the numbers a, b, c and the words who,
  what.
  """

  question: str
  expression: str
  numbers: Mapping[str, str]  # name -> "small" or "large", the range it is drawn from


@dataclasses.dataclass(frozen=True)
class Split:
  """What problems of a split are made of. Splits share no template and no number."""

  small: range
  large: range
  one_step: tuple[Template, ...]
  two_step: tuple[Template, ...]


_TWO = {"a": "large", "b": "small"}
_THREE = {"a": "large", "b": "small", "c": "small"}

TRAIN = Split(
  small=range(2, 6),
  large=range(10, 50),
  one_step=(
    Template("{who} has {a} {what} and buys {b} more. How many {what}?", "{a}+{b}", _TWO),
    Template("{who} finds {a} {what} and then {b} more. How many {what}?", "{a}+{b}", _TWO),
    Template("{who} has {a} {what} and loses {b}. How many {what}?", "{a}-{b}", _TWO),
    Template("{who} had {a} {what} and gave away {b}. How many {what}?", "{a}-{b}", _TWO),
    Template("{who} has {a} bags with {b} {what} each. How many {what}?", "{a}*{b}", _TWO),
    Template("{who} buys {a} {what} for {b} dollars each. What is the cost?", "{a}*{b}", _TWO),
  ),
  two_step=(
    Template(
      "{who} has {a} {what}, buys {b} more and loses {c}. How many {what}?", "{a}+{b}-{c}", _THREE
    ),
    Template(
      "{who} has {a} bags with {b} {what} each and {c} more {what}. How many {what}?",
      "{a}*{b}+{c}",
      _THREE,
    ),
    Template(
      "{b} friends share {a} {what}, and each buys {c} more. How many {what} each?",
      "{a}/{b}+{c}",
      _THREE,
    ),
  ),
)
HELD_OUT = Split(
  small=range(6, 10),
  large=range(50, 100),
  one_step=(
    Template("A box holds {a} {what}. {who} puts in {b} more. How many {what}?", "{a}+{b}", _TWO),
    Template("There are {a} {what} and {b} more come. How many {what}?", "{a}+{b}", _TWO),
    Template("{who} makes {a} {what} and sells {b}. How many {what} stay?", "{a}-{b}", _TWO),
    Template("A shop has {a} {what}. It uses {b}. How many {what} stay?", "{a}-{b}", _TWO),
    Template("There are {a} rows of {b} {what}. How many {what}?", "{a}*{b}", _TWO),
    Template("{who} packs {a} {what} a day for {b} days. How many {what}?", "{a}*{b}", _TWO),
  ),
  two_step=(
    Template(
      "A box holds {a} {what}. {who} puts in {b} and takes out {c}. How many {what}?",
      "{a}+{b}-{c}",
      _THREE,
    ),
    Template(
      "There are {a} rows of {b} {what} and {c} in a heap. How many {what}?",
      "{a}*{b}+{c}",
      _THREE,
    ),
    Template(
      "{a} {what} fill {b} equal jars, then each gets {c} more. How many {what} a jar?",
      "{a}/{b}+{c}",
      _THREE,
    ),
  ),
)
SPLITS: Mapping[str, Split] = {"train": TRAIN, "held_out": HELD_OUT}
MAX_REPEATS = 10_000  # in a row: then next to no new question is left
_WHO = ("Ann", "Ben", "Dan", "Eva", "Ida", "Max", "Sam", "Tom")
_WHAT = ("pens", "cards", "coins", "books", "apples", "cups", "eggs", "shells")


def make_task(split: str, seed: int, *, two_step: float = 0.0) -> Task:
  """The problem of a seed; `two_step` is the probability of a two-step one.

  Answers are whole numbers that are not negative. Raises ValueError for an unknown split.
  """
  if split not in SPLITS:
    raise ValueError(f"split {split!r}, expected one of {', '.join(SPLITS)}")
  source = SPLITS[split]
  draw = random.Random(f"{FAMILY}/{split}/{seed}")
  steps = 2 if draw.random() < two_step else 1
  template = draw.choice(source.two_step if steps == 2 else source.one_step)
  words = {"who": draw.choice(_WHO), "what": draw.choice(_WHAT)}
  while True:
    ranges = {"small": source.small, "large": source.large}
    numbers = {name: draw.choice(ranges[kind]) for name, kind in template.numbers.items()}
    expression = template.expression.format(**numbers)
    answer = evaluate(expression)
    if answer.denominator == 1 and answer >= 0:
      break
  params = {
    "question": template.question.format(**numbers, **words),
    "answer": format_number(answer),
    "expression": expression,
    "steps": steps,
  }
  return Task(FAMILY, split, seed, params)


def make_tasks(split: str, count: int, *, first_seed: int = 0, two_step: float = 0.0) -> list[Task]:
  """`count` different problems, from consecutive seeds; a seed that repeats a question is passed
  over.

  Raises:
    ValueError: an unknown split, numbers that make no sense, or more problems than are found before
      `MAX_REPEATS` seeds in a row repeat a question.
  """
  if count < 1:
    raise ValueError(f"{count} tasks of split {split!r}, expected at least 1")
  if not 0 <= two_step <= 1:
    raise ValueError(f"two_step is {two_step}, expected a share from 0 to 1")
  tasks: dict[str, Task] = {}
  seed = new = first_seed  # `new` is the seed of the last question that was no repeat
  while len(tasks) < count:
    task = make_task(split, seed, two_step=two_step)
    new = seed if tasks.setdefault(task.params["question"], task) is task else new
    if seed - new >= MAX_REPEATS:
      raise ValueError(
        f"{count} different tasks of split {split!r} with two_step={two_step:g}: found "
        f"{len(tasks)}, then {MAX_REPEATS} repeats in a row"
      )
    seed += 1
  return list(tasks.values())


# --- scripted policies ----------------------------------------------------------------------------


def oracle(task: Task) -> Policy:
  """Calls the calculator once with the right expression, then answers what it returned."""

  def act(messages: Sequence[Message]) -> Action:
    if messages[-1].role == "tool":
      return Message("assistant", f"Answer: {messages[-1].content}")
    return (ToolCall(TOOL.name, {"expression": task.params["expression"]}),)

  return act


def first_number(messages: Sequence[Message]) -> Action:
  """A naive policy: answers the first number of the question."""
  question = next(m.content for m in reversed(messages) if m.role == "user")
  return Message("assistant", f"Answer: {_NUMBER.findall(question)[0]}")


def always_add(messages: Sequence[Message]) -> Action:
  """A naive policy: adds all numbers of the question with the calculator and answers the sum."""
  if messages[-1].role == "tool":
    return Message("assistant", f"Answer: {messages[-1].content}")
  return (ToolCall(TOOL.name, {"expression": "+".join(_NUMBER.findall(messages[-1].content))}),)


def never_answer(messages: Sequence[Message]) -> Action:
  """A naive policy: calls the calculator for ever."""
  return (ToolCall(TOOL.name, {"expression": "1+1"}),)
