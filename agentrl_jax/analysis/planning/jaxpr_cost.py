"""Products of a traced program, and how often its loops run, before any compiler has seen it.

The jaxpr is walked with the batch's integers in hand: what is `deciding` how often a loop runs is
computed, everything else stays unknown. So a loop whose bounds are data is counted as the data has
it, which no compiler can do.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from agentrl_jax.analysis.planning import pallas_cost
from agentrl_jax.analysis.planning.deciding import (
  Variables,
  called,
  deciding,
  opened,
  scan_split,
)

Known = np.ndarray | None  # None: not known
SMALL = 1 << 24  # elements of arrays worth computing
MOST_ITERATIONS = 1 << 20

# Scopes by which `models`, `ops.logprobs` and `learner.step` say what their shapes do not.
_TILES = re.compile(r"tiles_of_(\d+)_in_(\d+)_groups_of_(\d+)_rows")
_SHARE = re.compile(r"one_in_(\d+)_rows")
_TRIANGLE = re.compile(r"triangle_of_(\d+)_blocks")
_AT_MOST = re.compile(r"at_most_(\d+)_iterations")


@dataclasses.dataclass
class Count:
  """`flops` of products, 2 a multiply-add, over all devices.

  `loops` gives for the path of each loop that depends on data (times entered, iterations in all),
  `kernels` for that of each Pallas kernel (FLOPs, bytes) of one call on one device.
  """

  flops: float = 0.0
  loops: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  unknown: dict[str, None] = dataclasses.field(default_factory=dict)
  kernels: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

  def add(self, other: "Count", times: float = 1.0) -> None:
    self.flops += times * other.flops
    for path, (entered, iterations) in other.loops.items():
      before = self.loops.get(path, (0.0, 0.0))
      self.loops[path] = before[0] + times * entered, before[1] + times * iterations
    self.unknown |= other.unknown
    self.kernels |= other.kernels

  def iterations(self, op_name: str) -> float | None:
    """Mean iterations of the loop that XLA knows by this name; None where it was not met.

    Where the data were too large to compute with, the loop's scope says it, as `expected` reads it.
    """
    entered, iterations = self.loops.get(path_of(op_name), (0.0, 0.0))
    return iterations / entered if entered else expected(op_name)

  def kernel(self, op_name: str) -> tuple[float, float] | None:
    """(FLOPs, bytes) of the kernel that XLA knows by this name; None where it was not met."""
    return self.kernels.get(path_of(op_name.removesuffix("/pallas_call")))


def path_of(op_name: str) -> str:
  """A loop's path without what differs between jax's names and XLA's copies of them.

  Kept are loops, named scopes, and whether it belongs to a backward pass or a recomputation.
  """
  parts = op_name.split(";")[0].split("/")
  dropped = {"eval_jaxpr", "checkpoint", "body", "closed_call", "core_call", "shard_map", ""}
  kept = [p for p in parts if p not in dropped and not re.match(r"(jit|jvp|vmap)\(", p)]
  return "/".join(re.sub(r"transpose\(.*\)", "transpose", p) for p in kept)


def expected(path: str) -> float | None:
  """Iterations of a loop on data that are not known, by the scope directly around it; else None.

  A grouped matmul's loop over tiles has those of groups with equally many rows, attention over
  blocks of keys those of a row that is one sample, and one with a most has the most.
  """
  tiles = _TILES.search(path)
  if tiles is not None:
    block, groups, rows = map(int, tiles.groups())
    return groups * math.ceil(rows / (_share(path) * groups * block))
  around = path.split("/")[-2:-1]
  triangle, most = (scope.search("".join(around)) for scope in (_TRIANGLE, _AT_MOST))
  if triangle is not None:
    return (int(triangle[1]) + 1) / 2
  return None if most is None else int(most[1])


def _share(path: str) -> int:
  """One in how many rows of a grouped matmul is expected to be of a group of this device."""
  found = _SHARE.search(path)
  return int(found[1]) if found else 1


def count(closed: Any, values: Sequence[Known]) -> Count:
  """Counts a `ClosedJaxpr` whose flat arguments are `values`, arrays or None where not known."""
  total = Count()
  wanted = deciding(closed.jaxpr)
  _run(total, closed.jaxpr, [_small(c) for c in closed.consts], list(values), "", wanted)
  return total


def _small(value: Any) -> Known:
  if not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jax.dtypes.extended):
    return None
  small = np.size(value) <= SMALL and value.dtype.kind in "biuf"
  return np.asarray(value) if small else None


def _run(
  total: Count,
  jaxpr: Any,
  consts: Sequence[Known],
  args: Sequence[Known],
  path: str,
  wanted: Variables,
) -> list[Known]:
  """Walks a jaxpr, adds to `total`, and gives what is known of those of its results that are
  wanted.
  """
  given = (*zip(jaxpr.constvars, consts, strict=True), *zip(jaxpr.invars, args, strict=True))
  known: dict[Any, Known] = {v: value for v, value in given if v in wanted}

  def read(variable: Any) -> Known:
    if isinstance(variable, core.Literal):
      return _small(np.asarray(variable.val))
    return known.get(variable)

  for eqn in jaxpr.eqns:
    inputs = [read(v) for v in eqn.invars]
    here = "/".join(p for p in (path, str(eqn.source_info.name_stack)) if p)
    outputs = _equation(total, eqn, inputs, here, wanted)
    pairs = zip(eqn.outvars, outputs, strict=True)
    known |= {v: out for v, out in pairs if out is not None and v in wanted}
  return [read(v) for v in jaxpr.outvars]


def _equation(
  total: Count, eqn: Any, inputs: list[Known], path: str, wanted: Variables
) -> Sequence[Known]:
  name = eqn.primitive.name
  if name == "scan":
    return _scan(total, eqn, inputs, path, wanted)
  if name == "while":
    return _while(total, eqn, inputs, path, wanted)
  if name == "cond":
    return _cond(total, eqn, inputs, path, wanted)
  if name == "pallas_call":
    return _kernel(total, eqn, path, wanted)
  total.flops += products(eqn) / (_share(path) if name.startswith("ragged_dot") else 1)
  inner = called(eqn)
  if inner is not None:
    return _call(total, eqn, inner, inputs, path, wanted)
  if not any(v in wanted for v in eqn.outvars):
    return [None] * len(eqn.outvars)
  return _evaluate(eqn, inputs)


def products(eqn: Any) -> float:
  """FLOPs of one equation, 2 a multiply-add, if it is a matrix product or convolution; else 0."""
  name = eqn.primitive.name
  if name == "dot_general":
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
  if name in ("ragged_dot", "ragged_dot_general"):
    rows, width = eqn.invars[0].aval.shape[-2:]
    return 2.0 * rows * width * eqn.invars[1].aval.shape[-1]
  if name == "conv_general_dilated":
    kernel, dims = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    each = math.prod(kernel) // kernel[dims[0]]
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * each
  return 0.0


def _call(
  total: Count, eqn: Any, inner: Any, inputs: list[Known], path: str, wanted: Variables
) -> Sequence[Known]:
  """A function called as it is; on a mesh (`shard_map`), by every device, and on unknown parts."""
  jaxpr, consts = opened(inner)
  once = Count()
  times, nothing = 1.0, list[Known]([None] * len(jaxpr.invars))
  if eqn.primitive.name == "shard_map":
    times, inputs = float(eqn.params["mesh"].size), nothing[: len(inputs)]
  name = eqn.params.get("name")
  if eqn.primitive.name == "remat2" or eqn.primitive.name == "checkpoint":
    name = None
  here = f"{path}/jit({name})" if name else path
  if len(inputs) != len(jaxpr.invars):
    inputs = [None] * len(jaxpr.invars)
  found = _run(once, jaxpr, [_small(c) for c in consts], inputs, here, wanted)
  total.add(once, times)
  return found if times == 1.0 and len(found) == len(eqn.outvars) else [None] * len(eqn.outvars)


def _kernel(total: Count, eqn: Any, path: str, wanted: Variables) -> Sequence[Known]:
  """A Pallas kernel: its body is run for each step of its grid that a scope says is not skipped."""
  jaxpr, consts = opened(eqn.params["jaxpr"])
  once = Count()
  _run(once, jaxpr, [_small(c) for c in consts], [None] * len(jaxpr.invars), path, wanted)
  found = _TRIANGLE.search(path)
  share = (int(found[1]) + 1) / (2 * int(found[1])) if found else 1.0
  flops = once.flops * share * math.prod(pallas_cost.grid_of(eqn))
  total.flops += flops
  total.unknown |= once.unknown
  total.kernels[path_of(path)] = flops, pallas_cost.traffic(eqn, share)
  return [None] * len(eqn.outvars)


def _evaluate(eqn: Any, inputs: list[Known]) -> Sequence[Known]:
  """The results, where all arguments are known and the results are small and no computed floats."""
  unknown = [None] * len(eqn.outvars)
  outs = [v.aval for v in eqn.outvars]
  if any(i is None for i in inputs) or eqn.effects or eqn.primitive.name in _OF_PLACES:
    return unknown
  if eqn.primitive.name in _PLACED:
    return inputs
  kinds = "biuf" if eqn.primitive.name in _MOVED else "biu"
  if any(getattr(a, "dtype", None) is None or a.dtype.kind not in kinds for a in outs):
    return unknown
  if any(math.prod(a.shape) > SMALL for a in outs):
    return unknown
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    results = eqn.primitive.bind(*inputs, **eqn.params)
  results = results if eqn.primitive.multiple_results else [results]
  return [np.asarray(r) for r in results]


_PLACED = {"sharding_constraint", "optimization_barrier", "reshard", "copy", "copy_p"}
_OF_PLACES = {"program_id", "num_programs", "axis_index"}  # of a step of a grid, or of a device
# The one float that decides how often a loop runs is a weight that is zero or not.
_MOVED = {"reshape", "squeeze", "transpose", "slice", "dynamic_slice", "gather"}


def _scan(
  total: Count, eqn: Any, inputs: list[Known], path: str, wanted: Variables
) -> Sequence[Known]:
  """Iterations are alike, and one stands for the rest, once nothing that decides changes."""
  params, inner = eqn.params, eqn.params["jaxpr"]
  consts, carries = scan_split(eqn)
  pairs = zip(inner.jaxpr.invars, inputs, strict=True)
  inputs = [value if v in wanted else None for v, value in pairs]
  fixed, carry, xs = inputs[:consts], inputs[consts : consts + carries], inputs[consts + carries :]
  length = params["length"]
  order = range(length - 1, -1, -1) if params["reverse"] else range(length)
  here, made = f"{path}/while", []
  for done, index in enumerate(order):
    once = Count()
    slices = [None if x is None else x[index] for x in xs]
    outs = _run(once, inner.jaxpr, _consts(inner), [*fixed, *carry, *slices], here, wanted)
    changed = [not _same(a, b) for a, b in zip(carry, outs[:carries], strict=True)]
    carry = outs[:carries]
    made.append(outs[carries:])
    if not any(changed) and all(x is None for x in xs):
      total.add(once, length - done)
      made += [made[-1]] * (length - done - 1)
      break
    total.add(once)
  if not made:
    return [*carry, *[None] * (len(eqn.outvars) - carries)]
  made = made[::-1] if params["reverse"] else made
  stacked = [
    None if any(p is None for p in part) else np.stack(part) for part in zip(*made, strict=True)
  ]
  return [*carry, *stacked]


def _consts(closed: Any) -> list[Known]:
  return [_small(c) for c in closed.consts]


def _same(a: Known, b: Known) -> bool:
  return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))


def _while(
  total: Count, eqn: Any, inputs: list[Known], path: str, wanted: Variables
) -> Sequence[Known]:
  """Runs while its condition is known to hold; a loop that is unknown counts once, and is named."""
  params = eqn.params
  test, body = params["cond_jaxpr"], params["body_jaxpr"]
  split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  of_test, of_body, carry = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
  here = f"{path}/while"
  alike = not _depends_on_data(body.jaxpr)
  each: Count | None = None
  iterations = 0
  while True:
    go_on = _run(Count(), test.jaxpr, _consts(test), [*of_test, *carry], "", wanted)[0]
    if go_on is None or iterations >= MOST_ITERATIONS:
      return _unknown_while(total, eqn, of_body, iterations, here, wanted)
    if not go_on:
      break
    once = Count()
    carry = _run(once, body.jaxpr, _consts(body), [*of_body, *carry], here, wanted)
    iterations += 1
    if not alike:
      total.add(once)
      continue
    each = once
    rest = _remaining(eqn, of_test, of_body, carry)
    if rest is not None:
      iterations += rest[0]
      carry = rest[1]
      break
  if each is not None:
    total.add(each, iterations)
  total.add(Count(loops={path_of(here): (1.0, float(iterations))}))
  return carry


def _remaining(
  eqn: Any, of_test: list[Known], of_body: list[Known], carry: list[Known]
) -> tuple[int, list[Known]] | None:
  """The rest of a counting loop, `index < limit` with steps of one, without walking it."""
  test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
  if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
    return None
  sides = []
  for variable in test.eqns[0].invars:
    if isinstance(variable, core.Literal):
      sides.append((None, np.asarray(variable.val)))
      continue
    place = list(test.invars).index(variable) - len(of_test)
    sides.append((place, carry[place] if place >= 0 else of_test[place]))
  (place, index), (_, limit) = sides
  if place is None or place < 0 or index is None or limit is None:
    return None
  out = body.outvars[place]
  made = next((e for e in body.eqns if out in e.outvars), None)
  if (
    made is None
    or made.primitive.name != "add"
    or made.invars[0] != body.invars[len(of_body) + place]
  ):
    return None
  if not isinstance(made.invars[1], core.Literal) or made.invars[1].val != 1:
    return None
  rest = max(0, int(limit) - int(index))
  kept = [
    c if body.outvars[i] is body.invars[len(of_body) + i] else None for i, c in enumerate(carry)
  ]
  kept[place] = np.asarray(limit)
  return rest, kept


def _unknown_while(
  total: Count, eqn: Any, of_body: list[Known], done: int, path: str, wanted: Variables
) -> Sequence[Known]:
  body = eqn.params["body_jaxpr"]
  carry = [None] * (len(body.jaxpr.invars) - len(of_body))
  if not done:
    once = Count()
    _run(once, body.jaxpr, _consts(body), [*of_body, *carry], path, wanted)
    iterations = expected(path)
    if iterations is not None:
      total.add(once, iterations)
      return carry
    total.add(once)
  total.unknown[path_of(path)] = None
  return carry


def _depends_on_data(jaxpr: Any) -> bool:
  """Whether a loop or branch inside may differ from one run of `jaxpr` to the next."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in ("while", "cond"):
      return True
    for value in eqn.params.values():
      for inner in value if isinstance(value, (list, tuple)) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns") and _depends_on_data(inner):
          return True
  return False


def _cond(
  total: Count, eqn: Any, inputs: list[Known], path: str, wanted: Variables
) -> Sequence[Known]:
  """The branch that is taken; where that is unknown, the one with most products."""
  branches, (index, *args) = eqn.params["branches"], inputs
  chosen = range(len(branches)) if index is None else [min(int(index), len(branches) - 1)]
  tried = []
  for i in chosen:
    once, here = Count(), f"{path}/cond/branch_{i}_fun"
    outs = _run(once, branches[i].jaxpr, _consts(branches[i]), args, here, wanted)
    tried.append((once, outs))
  once, outs = max(tried, key=lambda pair: pair[0].flops)
  total.add(once)
  return outs if len(tried) == 1 else [None] * len(eqn.outvars)


def known_leaves(tree: Any) -> list[Known]:
  """The leaves of arguments as `count` takes them: numpy arrays, and None for shapes."""
  leaves = jax.tree.leaves(tree)
  return [_small(x) if isinstance(x, np.ndarray | np.generic) else None for x in leaves]


def mean_iterations(counts: Count) -> Mapping[str, float]:
  """Mean iterations of every loop that depends on data, by its path."""
  return {path: n / entered for path, (entered, n) in counts.loops.items() if entered}
