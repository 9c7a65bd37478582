"""What a compiled program does on one device: products, bytes to and from memory, collectives.

XLA's own `cost_analysis` counts a loop's body once and is absent for GPU. Here the body counts as
often as it runs: the count is in the program, or the caller says what the data makes of it.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentrl_jax.analysis.planning.hlo import Instruction, Program, Shape, trip_count

Trips = Callable[[str], float | None]  # op_name of a loop that depends on data -> mean iterations
KernelCost = Callable[[str], tuple[float, float] | None]  # op_name of a kernel -> FLOPs, bytes

_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
  "partition-id", "replica-id", "add-dependency", "opt-barrier", "domain",
}  # fmt: skip
_PALLAS = 'custom_call_target="tpu_custom_call"'
_OF_XLA = 'is_spmd_generated="true"'
_COLLECTIVES = (
  "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
  "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind over one set of mesh axes. `nbytes` is what a device sends to others, all together."""

  kind: str
  axes: str
  group: int
  count: float
  nbytes: float


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one device. `unknown` names the loops whose iterations nobody could say, counted once, and
  `uncounted` the kernels whose products nobody could.
  """

  flops: float
  nbytes: float
  collectives: tuple[Collective, ...]
  unknown: tuple[str, ...]
  uncounted: tuple[str, ...] = ()


@dataclasses.dataclass
class _Count:
  program: Program
  mesh: Mapping[str, int]
  trips: Trips
  kernels: KernelCost
  fast: bool  # whether memory spaces other than 0 are on the chip
  flops: float = 0.0
  nbytes: float = 0.0
  sent: dict[tuple[str, str, int], list[float]] = dataclasses.field(default_factory=dict)
  channels: set[str] = dataclasses.field(default_factory=set)
  unknown: dict[str, None] = dataclasses.field(default_factory=dict)
  uncounted: dict[str, None] = dataclasses.field(default_factory=dict)


def count(
  program: Program,
  mesh: Mapping[str, int],
  *,
  trips: Trips = lambda _: None,
  kernels: KernelCost = lambda _: None,
  on_chip_spaces: bool = False,
) -> Cost:
  """The cost of one run on one device.

  Args:
    program: as `hlo.parse` gives it.
    mesh: sizes of the mesh axes in order; partition i lies where i has its coordinates.
    trips: mean iterations of a loop whose count is not in the program, None if unknown.
    kernels: FLOPs and bytes of one call of a Pallas kernel, which is opaque here.
    on_chip_spaces: memory spaces other than 0 are on the chip (TPU) and cost no traffic.
  """
  state = _Count(program, mesh, trips, kernels, on_chip_spaces)
  _walk(state, program.entry, 1.0, memory=True)
  found = [
    Collective(kind, axes, group, times, nbytes)
    for (kind, axes, group), (times, nbytes) in state.sent.items()
  ]
  found.sort(key=lambda c: -c.nbytes)
  return Cost(state.flops, state.nbytes, tuple(found), tuple(state.unknown), tuple(state.uncounted))


def _walk(state: _Count, computation: str, times: float, *, memory: bool) -> None:
  """Adds what `computation` costs when run `times`; inside a fusion nothing goes to memory."""
  inside = state.program.computations[computation]
  for instruction in inside.values():
    opcode = instruction.opcode
    if opcode == "while":
      known = trip_count(state.program, computation, instruction)
      runs = known if known is not None else state.trips(instruction.op_name)
      if runs is None:
        state.unknown[instruction.op_name or instruction.name] = None
      _walk(
        state, instruction.called("body")[0], times * (1 if runs is None else runs), memory=True
      )
      continue
    if opcode == "conditional":
      _walk_dearest(state, instruction, times)
      continue
    if _PALLAS in instruction.attributes:
      flops, nbytes = _kernel(state, instruction, inside)
      state.flops += times * flops
      state.nbytes += times * nbytes
      continue
    state.flops += times * products(instruction, inside)
    if memory:
      state.nbytes += times * _traffic(state, instruction, inside)
    _collective(state, instruction, inside, computation, times)
    for called in instruction.called("calls"):
      _walk(state, called, times, memory=memory and opcode in ("call", "async-start"))
    if opcode == "call":
      for called in instruction.called("to_apply"):
        _walk(state, called, times, memory=memory)


def _kernel(
  state: _Count, instruction: Instruction, inside: Mapping[str, Instruction]
) -> tuple[float, float]:
  """(FLOPs, bytes) of one call; of a kernel that nobody knows none, and each of its arrays once."""
  known = state.kernels(instruction.op_name)
  if known is not None:
    return known
  state.uncounted[instruction.op_name or instruction.name] = None
  return 0.0, _traffic(state, instruction, inside)


def _walk_dearest(state: _Count, instruction: Instruction, times: float) -> None:
  """Of the branches the one with most products, or most traffic where none has any."""
  best: tuple[tuple[float, float], _Count] | None = None
  for branch in instruction.called("branches"):
    trial = dataclasses.replace(
      state, sent={k: list(v) for k, v in state.sent.items()}, channels=set(state.channels)
    )
    _walk(trial, branch, times, memory=True)
    score = trial.flops, trial.nbytes
    best = (score, trial) if best is None or score > best[0] else best
  if best is not None:
    for field in ("flops", "nbytes", "sent", "channels"):
      setattr(state, field, getattr(best[1], field))


def products(instruction: Instruction, inside: Mapping[str, Instruction]) -> float:
  """FLOPs of a matrix product or convolution, 2 for each multiply-add; 0 for anything else."""
  if instruction.opcode == "dot":
    left = inside[instruction.operands[0]].shapes[0]
    contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
    return 2.0 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)
  if instruction.opcode == "convolution":
    return _convolution(instruction, inside)
  if instruction.opcode == "custom-call" and "gemm" in instruction.attributes:
    return _library_product(instruction, inside)
  return 0.0


def _numbers(text: str, name: str) -> list[int]:
  found = re.search(rf'"?{name}"?[=:] ?[{{\[]([\d,\s"]*)[}}\]]', text)
  return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _library_product(instruction: Instruction, inside: Mapping[str, Instruction]) -> float:
  left = inside[instruction.operands[0]].shapes[0]
  contracted = _numbers(instruction.attributes, "lhs_contracting_dimensions")
  return 2.0 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)


def _convolution(instruction: Instruction, inside: Mapping[str, Instruction]) -> float:
  """Counts only positions where the window lies on the input: TPU writes products as convolutions
  whose padding and dilation pick out a batch axis.
  """
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
  if labels is None:
    return 0.0
  left, right = (inside[name].shapes[0].dims for name in instruction.operands[:2])
  out = instruction.shapes[0].dims
  fields = dict(part.split("=") for part in window[1].split()) if window else {}
  spatial = [c for c in labels[3] if c.isdigit()]
  pairs = 1
  for axis, digit in enumerate(sorted(spatial)):
    pairs *= _window_pairs(
      out[labels[3].index(digit)],
      left[labels[1].index(digit)],
      right[labels[2].index(digit)],
      _window(fields, "stride", axis, 1),
      _window(fields, "lhs_dilate", axis, 1),
      _window(fields, "rhs_dilate", axis, 1),
      int(fields["pad"].split("x")[axis].split("_")[0]) if "pad" in fields else 0,
    )
  batch, features = out[labels[3].index("b")], out[labels[3].index("f")]
  return 2.0 * batch * features * right[labels[2].index("i")] * pairs


def _window(fields: Mapping[str, str], name: str, axis: int, default: int) -> int:
  return int(fields[name].split("x")[axis]) if name in fields else default


def _window_pairs(
  out: int, left: int, kernel: int, stride: int, dilate: int, kernel_dilate: int, pad: int
) -> int:
  """Pairs of an output and a kernel position that meet an input element."""
  at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilate - pad
  return int(np.sum((at >= 0) & (at <= (left - 1) * dilate) & (at % dilate == 0)))


def _traffic(state: _Count, instruction: Instruction, inside: Mapping[str, Instruction]) -> float:
  """Bytes that one instruction reads and writes."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(("-done", "-update")) or opcode == "async-start":
    return 0.0
  if opcode == "custom-call" and re.search(
    r'custom_call_target="(AllocateBuffer|Sharding|ConcatBitcast|AsyncCollective\w*)"',
    instruction.attributes,
  ):
    return 0.0
  sizes = [_size(state, inside[name].shapes) for name in instruction.operands if name in inside]
  written = _size(state, instruction.shapes)
  if opcode in ("dynamic-slice", "slice", "gather"):
    return 2 * written
  if opcode in ("dynamic-update-slice", "scatter"):
    return 2 * sum(sizes[1:])
  if opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
    return 2 * _size(state, instruction.shapes[:1])
  if opcode == "fusion":
    return _fusion_traffic(state, instruction, sizes)
  if opcode == "call":
    return 0.0
  return sum(sizes) + written


def _size(state: _Count, shapes: Sequence[Shape]) -> float:
  return sum(shape.nbytes for shape in shapes if shape.space == 0 or not state.fast)


def _fusion_traffic(state: _Count, instruction: Instruction, sizes: Sequence[float]) -> float:
  """A slice read in a fusion costs the slice, an update in place the update."""
  body = state.program.computations[instruction.called("calls")[0]]
  users: dict[str, list[Instruction]] = {}
  for inner in body.values():
    for name in inner.operands:
      users.setdefault(name, []).append(inner)
  total = 0.0
  for inner in body.values():
    if inner.opcode == "parameter" and int(inner.literal) < len(sizes):
      total += _read(inner, users, body, sizes[int(inner.literal)], state)
  root = next(i for i in body.values() if i.root)
  ends = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
  for shape, end in zip(instruction.shapes, ends, strict=False):
    end = _through_bitcasts(end, body)
    if end.opcode == "dynamic-update-slice":
      total += _size(state, body[end.operands[1]].shapes)
    else:
      total += _size(state, [shape])
  return total


def _through_bitcasts(instruction: Instruction, body: Mapping[str, Instruction]) -> Instruction:
  while instruction.opcode in ("bitcast", "copy") and instruction.operands[0] in body:
    instruction = body[instruction.operands[0]]
  return instruction


def _read(
  parameter: Instruction,
  users: Mapping[str, list[Instruction]],
  body: Mapping[str, Instruction],
  size: float,
  state: _Count,
) -> float:
  """Bytes of a fusion's operand that its users look at."""
  total, pending = 0.0, [parameter]
  while pending:
    source = pending.pop()
    for user in users.get(source.name, []):
      first = bool(user.operands) and user.operands[0] == source.name
      if user.opcode in ("dynamic-slice", "slice", "gather") and first:
        total += sum(shape.nbytes for shape in user.shapes) if size else 0.0
      elif user.opcode == "dynamic-update-slice" and first:
        continue  # in place
      elif user.opcode == "bitcast":
        pending.append(user)
      else:
        return size
  return min(total, size)


def _collective(
  state: _Count,
  instruction: Instruction,
  inside: Mapping[str, Instruction],
  computation: str,
  times: float,
) -> None:
  kind = next((c for c in _COLLECTIVES if instruction.opcode in (c, f"{c}-start")), None)
  if kind is None:
    return
  channel = re.search(r"channel_id=(\d+)", instruction.attributes)
  # All collectives that a `shard_map` asks for have JAX's one channel; those of XLA one each.
  written = channel is not None and channel[1] == "1" and _OF_XLA not in instruction.attributes
  if channel is not None and not written:
    if channel[1] in state.channels:  # start, middle and end of one transfer all show it on TPU
      return
    state.channels.add(channel[1])
  groups = device_groups(instruction.attributes, state.mesh)
  size = max((len(group) for group in groups), default=1)
  if kind == "collective-permute":
    size = 2
  if size == 1:
    return
  moved = sum(
    shape.nbytes for name in instruction.operands if name in inside for shape in inside[name].shapes
  )
  if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  share = (size - 1) / size
  sent = {
    "all-gather": moved * (size - 1),  # the operand is this device's part
    "all-reduce": 2 * moved * share,
    "reduce-scatter": moved * share,
    "all-to-all": moved * share,
    "ragged-all-to-all": moved * share,
  }.get(kind, moved)
  key = kind, _axes(groups, state.mesh), size
  entry = state.sent.setdefault(key, [0.0, 0.0])
  entry[0] += times
  entry[1] += times * sent


def device_groups(attributes: str, mesh: Mapping[str, int]) -> list[list[int]]:
  """Which partitions of the program talk to each other, in any of XLA's three spellings.

  A collective-permute's source and target pairs count as groups of two.
  """
  everyone = math.prod(mesh.values())
  pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
  listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
  if pairs or listed:
    text = (pairs or listed)[1]  # pyright: ignore
    groups = [[int(n) for n in re.findall(r"\d+", g)] for g in re.findall(r"\{([\d,]*)\}", text)]
    return groups or [list(range(everyone))]
  tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
  if tiled:
    target, source = (tuple(map(int, tiled[i].split(","))) for i in (1, 2))
    ids = np.arange(math.prod(source)).reshape(source)
    if tiled[3]:
      ids = ids.transpose(tuple(map(int, tiled[3].split(","))))
    return ids.reshape(target).tolist()
  named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes)
  if named:
    sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", named[1])}
    chosen = re.findall(r"'(\w+)'", named[2])
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    axes = [list(sizes).index(name) for name in chosen]
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    width = math.prod(ids.shape[axis] for axis in axes)
    return ids.transpose(*rest, *axes).reshape(-1, width).tolist()
  return [list(range(everyone))]


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
  """The mesh axes along which members of a group differ, joined by `+`."""
  shape = tuple(mesh.values())
  differing: set[int] = set()
  for group in groups:
    places = np.array(np.unravel_index(np.array(group), shape))
    differing |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
  return "+".join(name for i, name in enumerate(mesh) if i in differing) or "-"


def largest_arrays(program: Program, limit: int = 10) -> list[tuple[Shape, str, int]]:
  """(array, jax's name for it, how many alike) of what a program makes, largest first.

  A list of values, not XLA's buffer assignment: values that live at different times share memory.
  """
  fused = {
    name
    for computation in program.computations.values()
    for i in computation.values()
    if i.opcode != "call"
    for name in i.called("calls", "to_apply")
  }
  alike: dict[tuple[Shape, str], int] = {}
  for name, computation in program.computations.items():
    if name in fused:
      continue
    for i in computation.values():
      if i.opcode in _FREE or i.opcode in ("while", "conditional", "call"):
        continue
      for shape in i.shapes:
        key = shape, i.op_name or i.name
        alike[key] = alike.get(key, 0) + 1
  ranked = sorted(alike.items(), key=lambda item: -item[0][0].nbytes)
  return [(shape, name, n) for (shape, name), n in ranked[:limit]]
