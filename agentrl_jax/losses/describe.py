"""An algorithm explains itself: factories, arguments and formulas are read off its functions.

Every member of a slot is a closure made by a factory, so the factory's name, the values it closed
over and the first line of its docstring are already there; nothing is registered or repeated. A
user's own may also be a plain or jitted function, a partial application or an object.
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
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
  factory, given, formula = _read(function)
  arguments, inner = [], []
  for name, value in given.items():
    functions = _functions(value)
    if functions and not _is_scale(value):
      inner += [(name, f, coefficient) for coefficient, f in functions]
    elif name != "__class__":
      arguments.append((name, _text(value)))
  yield Part(role, factory, tuple(arguments), formula, depth)
  for inner_role, part, coefficient in inner:
    label = inner_role if coefficient is None else f"{coefficient:g} x {inner_role}"
    yield from _parts(label, part, depth + 1)


def _functions(value: Any) -> list[tuple[float | None, Callable]]:
  """The functions that an argument holds, with their coefficients where it is a weighted sum."""
  if _is_function(value):
    return [(None, value)]
  if isinstance(value, tuple | list):
    found = []
    for item in value:
      if _is_function(item):
        found.append((None, item))
      elif isinstance(item, tuple) and len(item) == 2 and _is_function(item[1]):
        found.append((float(item[0]), item[1]))
    return found
  return []


def _is_function(value: Any) -> bool:
  return callable(value) and not isinstance(value, type)


def _is_scale(value: Any) -> bool:
  return getattr(value, "__module__", "") == "agentrl_jax.ops.scales"


def _read(function: Callable) -> tuple[str, Mapping[str, Any], str]:
  """(name, arguments, formula): what it closed over, was applied to in part, or has as fields."""
  if isinstance(function, functools.partial):
    name, given, formula = _read(function.func)
    numbered = {f"argument {k}": value for k, value in enumerate(function.args)}
    return name, {**given, **numbered, **function.keywords}, formula
  plain = inspect.unwrap(function)  # a jitted function wraps a plain one
  if inspect.isfunction(plain):
    name, formula = _factory(plain)
    return name, inspect.getclosurevars(plain).nonlocals, formula
  made_by = type(plain)
  return made_by.__name__, getattr(plain, "__dict__", {}), _first_paragraph(made_by)


def _factory(function: Callable) -> tuple[str, str]:
  """(name, formula): of the factory that made the function, or of the function itself."""
  name = function.__qualname__.split(".<locals>")[0]
  module = sys.modules.get(function.__module__)
  made_by = getattr(module, name, function)
  return name, _first_paragraph(made_by)


def _first_paragraph(documented: Any) -> str:
  return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _text(value: Any) -> str:
  if getattr(value, "shape", ()):
    return f"{value.dtype}{list(value.shape)}"
  if inspect.isfunction(value):
    return _factory(value)[0] + _closed_over(value)
  if isinstance(value, float):
    return "inf" if math.isinf(value) else f"{value:g}"
  return repr(value)


def _closed_over(function: Callable) -> str:
  inner = inspect.getclosurevars(function).nonlocals.values()
  return f"({', '.join(map(_text, inner))})" if inner else ""
