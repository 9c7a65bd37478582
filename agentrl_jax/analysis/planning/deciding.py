"""Which values of a jaxpr decide how often its loops run and which branches are taken.

Everything else need not be computed to count them. Most integers of a step are masks, scanned over
chunk by chunk or kept for a backward pass, and decide nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where primitives that call keep what they call
APART = ("shard_map", "pallas_call")  # what these are given is taken as not known

Variables = set[Any]  # of a jaxpr and of those inside it


def deciding(jaxpr: Any) -> Variables:
  """The variables whose values may decide."""
  found: Variables = set()
  _into(jaxpr, [], found)
  return found


def opened(inner: Any) -> tuple[Any, Sequence[Any]]:
  """A jaxpr and its constants, which one that is not closed does not have."""
  return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])


def called(eqn: Any) -> Any:
  """What a primitive calls as it is, closed or not; None if it calls nothing."""
  return next((eqn.params[key] for key in CALLS if key in eqn.params), None)


def scan_split(eqn: Any) -> tuple[int, int]:
  """(constants, carried values) of a scan: what is scanned over has an axis more outside than in.

  Read from ranks, as jax's own names for the numbers change from version to version.
  """
  inner = eqn.params["jaxpr"].jaxpr

  def sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in pairs)

  carries = len(inner.outvars) - sliced(eqn.outvars, inner.outvars)
  return len(inner.invars) - sliced(eqn.invars, inner.invars) - carries, carries


def _into(jaxpr: Any, results: Iterable[Any], found: Variables) -> None:
  """Adds what decides within, and what these results follow from."""
  _add(results, found)
  for eqn in reversed(jaxpr.eqns):
    name = eqn.primitive.name
    if name == "scan":
      _settle(_scan, eqn, found)
    elif name == "while":
      _settle(_while, eqn, found)
    elif name == "cond":
      for branch in eqn.params["branches"]:
        _call(eqn, branch.jaxpr, eqn.invars[1:], found)
      _add(eqn.invars[:1], found)
    elif (inner := called(eqn)) is not None:
      _call(eqn, opened(inner)[0], [] if name in APART else eqn.invars, found)
    elif any(variable in found for variable in eqn.outvars):
      _add(eqn.invars, found)


def _add(variables: Iterable[Any], found: Variables) -> None:
  found.update(v for v in variables if not isinstance(v, core.Literal))


def _through(
  source: Sequence[Any], target: Sequence[Any], found: Variables, into: Variables | None = None
) -> None:
  """Adds of the target what stands where something found stands in the source."""
  pairs = zip(source, target, strict=False)
  chosen = [b for a, b in pairs if not isinstance(a, core.Literal) and a in found]
  _add(chosen, found if into is None else into)


def _call(eqn: Any, inner: Any, given: Sequence[Any], found: Variables) -> None:
  """Found by itself first: jax calls the same jaxpr from several places, of which each has its own
  reasons.
  """
  own: Variables = set()
  _through(eqn.outvars, inner.outvars, found, own)
  _into(inner, [], own)
  _through(inner.invars, given, own, found)
  found |= own


def _settle(once: Callable[[Any, Variables], None], eqn: Any, found: Variables) -> None:
  """Until nothing more is found: what decides in one iteration is made in the one before."""
  before = -1
  while len(found) > before:
    before = len(found)
    once(eqn, found)


def _scan(eqn: Any, found: Variables) -> None:
  inner, (consts, carries) = eqn.params["jaxpr"].jaxpr, scan_split(eqn)
  carried = inner.invars[consts : consts + carries]
  _through(eqn.outvars, inner.outvars, found)
  _through(carried, inner.outvars, found)
  _into(inner, [], found)
  _through(inner.invars, eqn.invars, found)
  _through(eqn.outvars[:carries], eqn.invars[consts:], found)


def _while(eqn: Any, found: Variables) -> None:
  test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
  of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  carry = eqn.invars[of_test + of_body :]
  _into(test, test.outvars, found)
  for wanted in (eqn.outvars, test.invars[of_test:], body.invars[of_body:]):
    _through(wanted, body.outvars, found)
    _through(wanted, carry, found)
  _into(body, [], found)
  _through(test.invars[:of_test], eqn.invars, found)
  _through(body.invars[:of_body], eqn.invars[of_test:], found)
