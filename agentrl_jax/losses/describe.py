"""An algorithm explains itself: factories, arguments and formulas are read off its functions.

Every member of a slot is a closure made by a factory, so the factory's name, the values it closed
over and the first line of its docstring are already there; nothing is registered or repeated.
"""

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from agentrl_jax.types import Algorithm


@dataclasses.dataclass(frozen=True)
class Part:
  """One function of a composition: its factory, what it closed over, and its formula."""

  role: str
  name: str
  arguments: tuple[tuple[str, str], ...]
  formula: str
  depth: int = 0

  def __str__(self) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in self.arguments)
    return f"{'  ' * self.depth}{self.role}: {self.name}({arguments})"


def describe(algorithm: Algorithm) -> list[Part]:
  """The parts of an algorithm, slot by slot, each followed by the parts that it is made of."""
  slots = (
    ("advantage", algorithm.advantage),
    ("weight", algorithm.weight),
    ("loss", algorithm.loss),
  )
  return [part for role, function in slots for part in _parts(role, function, 0)]


def _parts(role: str, function: Callable, depth: int) -> Iterator[Part]:
  closed = inspect.getclosurevars(function).nonlocals
  arguments, inner = [], []
  for name, value in closed.items():
    functions = _functions(value)
    if functions and not _is_scale(value):
      inner += [(name, f, coefficient) for coefficient, f in functions]
    elif name != "__class__":
      arguments.append((name, _text(value)))
  name, formula = _factory(function)
  yield Part(role, name, tuple(arguments), formula, depth)
  for inner_role, part, coefficient in inner:
    label = inner_role if coefficient is None else f"{coefficient:g} x {inner_role}"
    yield from _parts(label, part, depth + 1)


def _functions(value: Any) -> list[tuple[float | None, Callable]]:
  """The functions that an argument holds, with their coefficients where it is a weighted sum."""
  if inspect.isfunction(value):
    return [(None, value)]
  if isinstance(value, tuple | list):
    found = []
    for item in value:
      if inspect.isfunction(item):
        found.append((None, item))
      elif isinstance(item, tuple) and len(item) == 2 and inspect.isfunction(item[1]):
        found.append((float(item[0]), item[1]))
    return found
  return []


def _is_scale(value: Any) -> bool:
  return getattr(value, "__module__", "") == "agentrl_jax.ops.scales"


def _factory(function: Callable) -> tuple[str, str]:
  """(name, formula): of the factory that made the function, or of the function itself."""
  name = function.__qualname__.split(".<locals>")[0]
  module = sys.modules.get(function.__module__)
  made_by = getattr(module, name, function)
  return name, (inspect.getdoc(made_by) or "").split("\n\n")[0].replace("\n", " ")


def _text(value: Any) -> str:
  if inspect.isfunction(value):
    return _factory(value)[0] + _closed_over(value)
  if isinstance(value, float):
    return "inf" if math.isinf(value) else f"{value:g}"
  return repr(value)


def _closed_over(function: Callable) -> str:
  inner = inspect.getclosurevars(function).nonlocals.values()
  return f"({', '.join(map(_text, inner))})" if inner else ""
