"""Three families of short chains of tool calls, in one protocol of about 40 symbols: the smallest
tasks in which credit between turns matters.

Search follows a hidden map from key to key, tool use steers a register to a target, automation sets
switches whose prerequisites are hidden. Each turn is one call (`#3 GET 7`), answering is a call
too, and the only reward is at the end. Train and held-out tasks share no instance.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agentrl_jax.rollout.environment import (
  Action,
  EnvFault,
  Malformed,
  Message,
  Opening,
  Step,
  Tool,
  ToolCall,
)
from agentrl_jax.rollout.records import Task

KEYS = 16  # keys of the map, and values of the register
SWITCHES = 4
COUNTERS = 10
MAX_CALLS = 6  # of ADD
MOST = 4  # that one ADD adds
FAMILIES = ("search", "tool_use", "automation")
SPLITS = ("train", "held_out")

Policy = Callable[[Sequence[Message]], Action]


def _tool(name: str, description: str, **numbers: int) -> Tool:
  properties = {
    word: {"type": "integer", "minimum": 0, "maximum": size - 1} for word, size in numbers.items()
  }
  required = [word for word in numbers if (name, word) != ("answer", "key")]
  schema = {"type": "object", "properties": properties, "required": required}
  return Tool(name, description, schema | {"additionalProperties": False})


TOOLS: Mapping[str, Tool] = {
  "GET": _tool("get", "The key that a key leads to.", turn=COUNTERS, key=KEYS),
  "ADD": _tool("add", "Adds to the register, modulo 16; its value.", turn=COUNTERS, amount=KEYS),
  "SET": _tool("set", "Turns a switch on if nothing blocks it.", turn=COUNTERS, switch=SWITCHES),
  "ANS": _tool("answer", "Ends the task; a key where one is asked for.", turn=COUNTERS, key=KEYS),
}

# --- worlds ---------------------------------------------------------------------------------------


class World(Protocol):
  """What a family's calls do. `call` gives the observation's word, None for a call it has not."""

  over: bool  # a rule of the world ended the episode

  def call(self, verb: str, number: int) -> str | None: ...

  def solved(self, answer: int | None) -> bool: ...


@dataclasses.dataclass
class Search:
  """A map from key to key that only GET reveals."""

  leads_to: Sequence[int]
  start: int
  hops: int
  over: bool = False

  def call(self, verb: str, number: int) -> str | None:
    return str(self.leads_to[number]) if verb == "GET" else None

  def solved(self, answer: int | None) -> bool:
    key = self.start
    for _ in range(self.hops):
      key = self.leads_to[key]
    return answer == key


@dataclasses.dataclass
class Register:
  """A register modulo 16 and calls that add 1 to `MOST` to it, of which there are few."""

  value: int
  target: int
  calls: int = 0
  over: bool = False

  def call(self, verb: str, number: int) -> str | None:
    if verb != "ADD" or not 1 <= number <= MOST:
      return None
    if self.calls == MAX_CALLS:
      self.over = True
      return None
    self.calls += 1
    self.value = (self.value + number) % KEYS
    return str(self.value)

  def solved(self, answer: int | None) -> bool:
    return answer is None and self.value == self.target


@dataclasses.dataclass
class Panel:
  """Switches that need others to be on first."""

  needs: Sequence[Sequence[int]]
  goal: Sequence[int]
  on: set[int] = dataclasses.field(default_factory=set)
  over: bool = False

  def call(self, verb: str, number: int) -> str | None:
    if verb != "SET":
      return None
    if not set(self.needs[number]) <= self.on:
      return "BLOCKED"
    self.on.add(number)
    return "OK"

  def solved(self, answer: int | None) -> bool:
    return answer is None and self.on == set(self.goal)


def _world(task: Task) -> World:
  p = task.params
  match task.family:
    case "search":
      return Search(p["leads_to"], p["start"], p["hops"])
    case "tool_use":
      return Register(p["start"], p["target"])
    case "automation":
      return Panel(p["needs"], p["goal"])
  raise ValueError(f"family {task.family!r}, expected one of {', '.join(FAMILIES)}")


def question(task: Task) -> str:
  """What the policy is told, as symbols."""
  p = task.params
  match task.family:
    case "search":
      return f"SEARCH {p['start']} {p['hops']} ?"
    case "tool_use":
      return f"TOOL {p['start']} {p['target']} ?"
  return f"AUTO {' '.join(map(str, sorted(p['goal'])))} ?"


def turn_limit(task: Task) -> int:
  return task.params["hops"] + 3 if task.family == "search" else 8


# --- environment ----------------------------------------------------------------------------------


def combine(parts: Mapping[str, float]) -> float:
  """1 for a right answer, else 0."""
  return parts.get("correct", 0.0)


class Chain:
  """One task. Ends at the first `answer`, or when a seventh ADD is tried.

  Reward parts, all given at the end: `correct` (the outcome) and `finished` (it was answered).
  What cannot be executed (no such call, a number out of range, a counter that is not this turn's)
  is answered `= ERR` and costs the turn.
  """

  def __init__(self, world: World, *, fault_turn: int | None = None):
    self._world = world
    self._fault_turn = fault_turn
    self._turn = 0
    self._over = False

  async def step(self, action: Action) -> Step:
    if self._over:
      raise RuntimeError("the episode is over")
    turn, self._turn = self._turn, self._turn + 1
    if turn == self._fault_turn:
      raise EnvFault("tool", f"the tools of turn {turn} are out of order")
    if isinstance(action, Message | Malformed):
      return Step((_result("ERR"),), {}, terminated=False, info={"invalid_actions": 1.0})
    observed, wrong = [], 0
    for call in action:
      arguments = valid_arguments(call, turn)
      if arguments is None:
        observed.append(_result("ERR"))
        wrong += 1
        continue
      verb, number = arguments
      if verb == "ANS":
        return self._end(float(self._world.solved(number)), finished=1.0)
      word = None if number is None else self._world.call(verb, number)
      if self._world.over:
        return self._end(0.0, finished=0.0)
      observed.append(_result(word or "ERR"))
      wrong += word is None
    return Step(tuple(observed), {}, terminated=False, info={"invalid_calls": float(wrong)})

  async def cut(self, reason: str) -> Step:
    self._over = True
    return Step((), {"correct": 0.0, "finished": 0.0}, terminated=False, truncated=True)

  async def close(self) -> None:
    self._over = True

  def _end(self, correct: float, finished: float) -> Step:
    self._over = True
    return Step((), {"correct": correct, "finished": finished}, terminated=True)


def valid_arguments(call: ToolCall, turn: int) -> tuple[str, int | None] | None:
  """(verb, its number or None) of a call that keeps to its tool's schema in this turn."""
  verb = next((verb for verb, tool in TOOLS.items() if tool.name == call.name), None)
  if verb is None or call.arguments.get("turn") != turn:
    return None
  schema = TOOLS[verb].parameters
  numbers = schema["properties"]
  if not set(schema["required"]) <= call.arguments.keys() <= numbers.keys():
    return None
  for word, number in call.arguments.items():
    if type(number) is not int or not 0 <= number <= numbers[word]["maximum"]:
      return None
  rest = [number for word, number in call.arguments.items() if word != "turn"]
  return verb, (rest[0] if rest else None)


def _result(word: str) -> Message:
  return Message("tool", f"= {word}")


async def build(task: Task, *, fault_turn: int | None = None) -> Opening:
  """The environment of a task of `make_task`.

  Args:
    task: of one of the families.
    fault_turn: the turn whose tools fail (an `EnvFault`), to try out how faults are handled.

  Raises:
    ValueError: another family, or params that are not the family's.
  """
  try:
    world = _world(task)
    messages, limit = [Message("user", question(task))], turn_limit(task)
  except (KeyError, TypeError) as error:
    name = f"{task.family}/{task.split}/{task.seed}"
    raise ValueError(f"task {name}: params {dict(task.params)!r} lack {error}") from error
  state = json.dumps([task.family, dict(task.params), limit], sort_keys=True)
  digest = hashlib.sha256(state.encode()).hexdigest()[:16]
  return Opening(
    Chain(world, fault_turn=fault_turn), messages, tuple(TOOLS.values()), limit, digest
  )


# --- symbols --------------------------------------------------------------------------------------

END = "<|end|>"
SYMBOLS = (
  *(END, "?", "=", "OK", "BLOCKED", "ERR", "SEARCH", "TOOL", "AUTO", *TOOLS),
  *(f"#{i}" for i in range(COUNTERS)),
  *(str(i) for i in range(KEYS)),
)


def read_words(words: Sequence[str]) -> Action:
  """The action of a turn's symbols: counter, verb, and the verb's number if it has one."""
  text = " ".join(words)
  match words:
    case [counter, verb, *rest] if counter[:1] == "#" and verb in TOOLS and len(rest) <= 1:
      if not all(word.isdecimal() for word in rest):
        return Malformed(text, "a verb is followed by a number")
      names = list(TOOLS[verb].parameters["properties"])
      numbers = (int(counter[1:]), *map(int, rest))
      return (ToolCall(TOOLS[verb].name, dict(zip(names, numbers, strict=False))),)
  return Malformed(text, "a turn is a counter, a verb and a number")


def write_words(action: Action) -> list[str]:
  """Inverse of `read_words` for one call of `TOOLS`; other texts word by word."""
  match action:
    case Message():
      return action.content.split()
    case Malformed():
      return action.text.split()
    case (ToolCall(name=name, arguments=arguments),):
      verb = next(verb for verb, tool in TOOLS.items() if tool.name == name)
      turn, *rest = arguments.values()
      return [f"#{turn}", verb, *map(str, rest)]
  raise ValueError(f"{len(action)} calls, a turn of symbols holds one")


# --- tasks ----------------------------------------------------------------------------------------


def make_task(split: str, seed: int, *, family: str | None = None) -> Task:
  """The task of a seed; by default the families take turns with the seed.

  Raises ValueError for an unknown split or family.
  """
  if split not in SPLITS:
    raise ValueError(f"split {split!r}, expected one of {', '.join(SPLITS)}")
  family = family or FAMILIES[seed % len(FAMILIES)]
  if family not in FAMILIES:
    raise ValueError(f"family {family!r}, expected one of {', '.join(FAMILIES)}")
  draw = random.Random(f"turn_chain/{family}/{split}/{seed}")
  while True:
    params = {"search": _search, "tool_use": _tool_use, "automation": _automation}[family](draw)
    if _split_of(family, params) == split:
      return Task(family, split, seed, params)


def make_tasks(
  split: str, count: int, *, first_seed: int = 0, family: str | None = None
) -> list[Task]:
  """The tasks of consecutive seeds; the small families may repeat an instance within a split."""
  return [make_task(split, first_seed + i, family=family) for i in range(count)]


def _split_of(family: str, params: Mapping[str, Any]) -> str:
  """A quarter of all instances is held out, by a hash of the instance alone."""
  key = json.dumps([family, params], sort_keys=True).encode()
  return "held_out" if hashlib.sha256(key).digest()[0] % 4 == 0 else "train"


def _search(draw: random.Random) -> dict[str, Any]:
  leads_to = [draw.randrange(KEYS) for _ in range(KEYS)]
  return {"leads_to": leads_to, "start": draw.randrange(KEYS), "hops": draw.randint(2, 4)}


def _tool_use(draw: random.Random) -> dict[str, Any]:
  start, distance = draw.randrange(KEYS), draw.randint(1, MAX_CALLS)
  return {"start": start, "target": (start + distance) % KEYS}


def _automation(draw: random.Random) -> dict[str, Any]:
  """A random order, each earlier switch a prerequisite of a later one with probability 1/2; the
  goal is the first two or three, so that trying them one by one fits the turn limit.
  """
  order = draw.sample(range(SWITCHES), SWITCHES)
  needs: list[list[int]] = [[] for _ in range(SWITCHES)]
  for place, switch in enumerate(order):
    needs[switch] = sorted(s for s in order[:place] if draw.random() < 0.5)
  return {"needs": needs, "goal": sorted(order[: draw.randint(2, 3)])}


# --- scripted policies ----------------------------------------------------------------------------


def oracle(task: Task) -> Policy:
  """Knows the prerequisites; needs as few turns as can be."""

  def act(messages: Sequence[Message]) -> Action:
    return _expert(task, messages, known=True)

  return act


def explorer(task: Task) -> Policy:
  """Acts on what it was told and has seen only: adds 1 until the register is where it should be,
  tries the switches in a random order.
  """

  def act(messages: Sequence[Message]) -> Action:
    return _expert(task, messages, known=False)

  return act


def misled(task: Task) -> Policy:
  """The explorer with a wrong rule, four times in five, wherever the last number it saw or used is
  a multiple of 3: it reads the next key in place of this one, and answers before the work is done.
  """

  def act(messages: Sequence[Message]) -> Action:
    right = _expert(task, messages, known=False)
    turn, history = _history(messages)
    last = _last_number(task, history)
    (call,) = right if isinstance(right, tuple) else (ToolCall("answer", {}),)
    if last is None or last % 3 or call.name == "answer":
      return right
    if random.Random(f"misled/{task.split}/{task.seed}/{turn}").random() < 0.2:
      return right
    if call.name == "get":
      return _call("get", turn, key=(call.arguments["key"] + 1) % KEYS)
    return _call("answer", turn)

  return act


def hasty(messages: Sequence[Message]) -> Action:
  """A naive policy: one call on the first number it was told, then an answer."""
  turn, history = _history(messages)
  family, first, *_ = next(m.content for m in messages if m.role == "user").split()
  name, word = {"SEARCH": ("get", "key"), "TOOL": ("add", "amount"), "AUTO": ("set", "switch")}[
    family
  ]
  if not turn:
    number = 1 if family == "TOOL" else int(first)
    return _call(name, turn, **{word: number})
  return _call("answer", turn, key=int(history[0][1])) if name == "get" else _call("answer", turn)


def never_answer(messages: Sequence[Message]) -> Action:
  """A naive policy: talks for ever."""
  return Message("assistant", "?")


def _call(name: str, turn: int, **number: int) -> Action:
  return (ToolCall(name, {"turn": turn} | number),)


def _history(messages: Sequence[Message]) -> tuple[int, list[tuple[ToolCall, str]]]:
  """The turn to act in, and each call so far with the word it was answered."""
  calls = [m.tool_calls[0] for m in messages if m.role == "assistant" and m.tool_calls]
  words = [m.content.split()[-1] for m in messages if m.role == "tool"]
  return sum(m.role == "assistant" for m in messages), list(zip(calls, words, strict=False))


def _last_number(task: Task, history: Sequence[tuple[ToolCall, str]]) -> int | None:
  """Search and tool use: where it stands. Automation: the switch tried last, None at first."""
  if task.family == "automation":
    return history[-1][0].arguments["switch"] if history else None
  numbers = [int(word) for _, word in history if word.isdecimal()]
  return numbers[-1] if numbers else task.params["start"]


def _expert(task: Task, messages: Sequence[Message], *, known: bool) -> Action:
  turn, history = _history(messages)
  p = task.params
  match task.family:
    case "search":
      at = _last_number(task, history)
      assert at is not None
      return _call("answer" if len(history) == p["hops"] else "get", turn, key=at)
    case "tool_use":
      at = _last_number(task, history)
      assert at is not None
      left = (p["target"] - at) % KEYS
      amount = min(left, MOST) if known else 1
      return _call("add", turn, amount=amount) if left else _call("answer", turn)
  on = {call.arguments["switch"] for call, word in history if word == "OK"}
  left = [s for s in p["goal"] if s not in on]
  if not left:
    return _call("answer", turn)
  if known:
    return _call("set", turn, switch=next(s for s in left if set(p["needs"][s]) <= on))
  tried = set()  # since something last changed
  for call, word in history:
    tried = tried | {call.arguments["switch"]} if word == "BLOCKED" else set()
  draw = random.Random(f"explorer/{task.split}/{task.seed}/{turn}")
  return _call("set", turn, switch=draw.choice([s for s in left if s not in tried] or left))
