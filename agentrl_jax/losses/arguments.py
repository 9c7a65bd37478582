"""What the arguments of a factory must be: impossible ones are refused before a run begins."""

import math
import numbers
from collections.abc import Callable

from agentrl_jax.ops.scales import GROUP


def finite(**given: object) -> None:
  """Raises ValueError, naming it, for an argument that is no finite number."""
  _expect(given, lambda x: True, "a finite number")


def above_zero(**given: object) -> None:
  """Raises ValueError, naming it, for an argument that is not finite and > 0."""
  _expect(given, lambda x: x > 0, "> 0")


def not_negative(**given: object) -> None:
  """Raises ValueError, naming it, for an argument that is not finite and >= 0."""
  _expect(given, lambda x: x >= 0, ">= 0")


def fraction(**given: object) -> None:
  """Raises ValueError, naming it, for an argument that is not from 0 to 1."""
  _expect(given, lambda x: 0 <= x <= 1, "0 to 1")


def band(*, low: float, high: float) -> None:
  """Raises ValueError unless 0 <= low <= high; high may be infinite."""
  if not 0 <= low <= high:
    raise ValueError(f"the band is low={low}, high={high}, expected 0 <= low <= high")


def whole(least: int, **given: object) -> None:
  """Raises ValueError, naming it, for an argument that is no whole number >= `least`."""
  for name, x in given.items():
    if not isinstance(x, numbers.Integral) or isinstance(x, bool) or x < least:
      raise ValueError(f"{name} is {x!r}, expected a whole number of at least {least}")


def a_scale(**given: object) -> None:
  """Raises ValueError, naming it, for an argument that is no scale: "turn" is not, TURN is."""
  for name, x in given.items():
    if not callable(x):
      raise ValueError(f"{name} is {x!r}, expected a function like TURN of ops.scales")


def within_trajectories(**given: object) -> None:
  """Raises ValueError, naming it, for what is no scale, and for GROUP.

  A group has no order in time, and may lie in several micro-batches: a loss sees but a part of it.
  """
  a_scale(**given)
  for name, x in given.items():
    if x is GROUP:
      raise ValueError(f"{name} is GROUP, expected units that each lie within one trajectory")


def _expect(given: dict[str, object], holds: Callable[[float], bool], expected: str) -> None:
  for name, x in given.items():
    if not isinstance(x, numbers.Real) or not math.isfinite(x) or not holds(float(x)):
      raise ValueError(f"{name} is {x!r}, expected {expected}")
