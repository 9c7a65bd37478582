"""What the numbers of a factory must satisfy: impossible ones are refused before a run begins."""

import math
import numbers
from collections.abc import Callable


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


def _expect(given: dict[str, object], holds: Callable[[float], bool], expected: str) -> None:
  for name, x in given.items():
    if not isinstance(x, numbers.Real) or not math.isfinite(x) or not holds(float(x)):
      raise ValueError(f"{name} is {x!r}, expected {expected}")
