"""Compiled XLA programs read back from their text: computations, instructions, shapes, loops.

The text is the only description that every backend gives of what it will run on one device.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BYTES = {
  "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
  "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COMMENT = re.compile(r"/\*.*?\*/")


class Shape(NamedTuple):
  """One array on one device; `space` is XLA's memory space, 0 where nothing else is said."""

  dtype: str
  dims: tuple[int, ...]
  space: int = 0

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def nbytes(self) -> int:
    width = 1 if self.dtype.startswith("f8") else _BYTES.get(self.dtype, 0)
    return math.ceil(self.elements * width)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """`shapes` are its arrays, one unless it is a tuple; `attributes` what follows the operands."""

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  attributes: str
  literal: str  # what stands between the parentheses
  root: bool

  @property
  def op_name(self) -> str:
    """The path of named scopes and transformations that jax gave it; empty if it has none."""
    return _attribute(self.attributes, r'op_name="([^"]*)"')

  def called(self, *kinds: str) -> tuple[str, ...]:
    """Names of computations that it calls as `kinds` (calls, body, condition, ...)."""
    found = [name for kind, name in _CALLED.findall(self.attributes) if kind in kinds]
    if "branches" in kinds:
      listed = _BRANCHES.search(self.attributes)
      found += _NAME.findall(listed[1]) if listed else []
      found += self.called("true_computation", "false_computation")
    return tuple(found)


Computation = Mapping[str, Instruction]  # in the text's order


@dataclasses.dataclass(frozen=True)
class Program:
  """All computations of a module by name, and which of them is run."""

  computations: Mapping[str, Computation]
  entry: str

  def root(self, computation: str) -> Instruction:
    return next(i for i in self.computations[computation].values() if i.root)


def parse(text: str) -> Program:
  """The program of `compiled.as_text()`. Raises ValueError if the text has no entry computation."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = "", None
  for line in _lines(text):
    header = _HEADER.match(line)
    if header:
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and " = " in line:
      instruction = _instruction(line)
      current[instruction.name] = instruction
  if not entry:
    raise ValueError(f"no entry computation in a text of {len(text)} characters")
  return Program(computations, entry)


def _lines(text: str) -> Iterator[str]:
  """Lines of the text; an instruction that goes on below, as a Pallas kernel's does, is one."""
  whole = ""
  for line in text.splitlines():
    if whole and (line.startswith("  ") or whole.count("{") == whole.count("}")):
      yield whole
      whole = ""
    if whole or line.startswith("  "):
      whole += line
    else:
      yield line
  if whole:
    yield whole


def _instruction(line: str) -> Instruction:
  left, right = _COMMENT.sub("", line).strip().split(" = ", 1)
  end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
  kind, rest = right[:end], right[end:].lstrip()
  opening = rest.index("(")
  closing = _closing(rest, opening)
  inside = rest[opening + 1 : closing]
  return Instruction(
    name=left.split()[-1].lstrip("%"),
    opcode=rest[:opening],
    shapes=tuple(shapes(kind)),
    operands=tuple(_NAME.findall(inside)),
    attributes=rest[closing + 1 :],
    literal=inside,
    root=left.startswith("ROOT "),
  )


def _closing(text: str, start: int) -> int:
  """The index of the parenthesis that closes the one at `start`."""
  depth = 0
  for index in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[index], 0)
    if depth == 0:
      return index
  raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def shapes(text: str) -> Iterator[Shape]:
  """Every array of a type, in order."""
  for dtype, dims, layout in _ARRAY.findall(text):
    space = _SPACE.search(layout)
    sizes = tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip())
    yield Shape(dtype, sizes, int(space[1]) if space else 0)


def _attribute(text: str, pattern: str) -> str:
  found = re.search(pattern, text)
  return found[1] if found else ""


def trip_count(program: Program, computation: str, loop: Instruction) -> int | None:
  """How often a while loop runs its body, None where that depends on data.

  XLA says so for some backends; else it is read from `index < constant` with its start and step.
  """
  known = _attribute(loop.attributes, r'known_trip_count":\{"n":"(\d+)"')
  if known:
    return int(known)
  condition = program.computations[loop.called("condition")[0]]
  compare = program.root(loop.called("condition")[0])
  if compare.opcode in ("fusion", "call"):
    wrapped = program.root(compare.called("calls", "to_apply")[0])
    compare = dataclasses.replace(wrapped, operands=compare.operands)
  if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
    return None
  caller = program.computations[computation]
  start = caller.get(loop.operands[0])
  index, limit = (_loop_value(condition, caller, start, name) for name in compare.operands[:2])
  if limit is None:
    return None
  position = _tuple_index(condition.get(compare.operands[0]))
  step = _step(program, loop.called("body")[0], position)
  return max(0, math.ceil((limit - (index or 0)) / step))


def _tuple_index(instruction: Instruction | None) -> int | None:
  if instruction is None or instruction.opcode != "get-tuple-element":
    return None
  return int(_attribute(instruction.attributes, r"index=(\d+)"))


def _loop_value(
  condition: Computation, caller: Computation, start: Instruction | None, name: str
) -> int | None:
  """A constant of the condition, or the constant that its part of the loop's tuple starts with."""
  instruction = condition.get(name)
  position = _tuple_index(instruction)
  if position is not None and start is not None and start.opcode == "tuple":
    instruction = caller.get(start.operands[position])
  while instruction is not None and instruction.opcode in ("copy", "bitcast"):
    instruction = caller.get(instruction.operands[0])
  if instruction is None or instruction.opcode != "constant":
    return None
  return int(instruction.literal) if instruction.literal.lstrip("-").isdigit() else None


def _step(program: Program, body: str, position: int | None) -> int:
  """The constant that the body adds to the loop's index; 1 where that cannot be read."""
  inside, root = program.computations[body], program.root(body)
  if position is None or root.opcode != "tuple":
    return 1
  added = inside.get(root.operands[position])
  if added is None or added.opcode != "add":
    return 1
  constants = [inside[name] for name in added.operands if name in inside]
  values = [c.literal for c in constants if c.opcode == "constant" and c.literal.isdigit()]
  return max(1, int(values[0])) if values else 1
