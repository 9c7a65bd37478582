"""From a compiled program to numbers: memory against capacity, roofline time, what bounds it.

A roofline is a lower bound: products at peak, memory at full bandwidth, the network with all its
links, each hidden behind the slowest of the three.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.errors import JaxRuntimeError

from agentrl_jax.analysis.planning import hlo, hlo_cost, jaxpr_cost
from agentrl_jax.analysis.planning.chips import GIB, Chip, Topology
from agentrl_jax.analysis.planning.hlo_cost import Collective
from agentrl_jax.analysis.planning.traced import Run, Traced


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device at a program's peak; `elsewhere` is held meanwhile by other parts."""

  arguments: int
  outputs: int  # beyond those that take an argument's place
  temporaries: int
  code: int
  elsewhere: int
  capacity: float | None

  @property
  def peak(self) -> int:
    return self.arguments + self.outputs + self.temporaries + self.code + self.elsewhere

  @property
  def fits(self) -> bool | None:
    return None if self.capacity is None else self.peak <= self.capacity


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds that products, memory and network take at the chip's peaks."""

  products: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    return max(self.products, self.memory, self.network)

  @property
  def bound(self) -> str:
    return max(("products", "memory", "network"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Estimate:
  """One program on one device, but for `flops_all`, which is of all devices and of the jaxpr.

  `refused` is the compiler's own word where the program does not fit; then there is nothing else.
  """

  name: str
  once_per: str
  compile_seconds: float
  flops_all: float
  memory: Memory | None = None
  flops: float = 0.0
  nbytes: float = 0.0
  roofline: Roofline | None = None
  collectives: tuple[Collective, ...] = ()
  largest: tuple[tuple[str, int, str, int], ...] = ()  # array, bytes, jax's name, how many alike
  counted_once: tuple[str, ...] = ()
  uncounted: tuple[str, ...] = ()
  refused: str = ""


def estimate(traced: Traced, run: Run, topology: Topology, mesh: Mapping[str, int]) -> Estimate:
  """Traces, compiles and counts one program."""
  started = time.monotonic()
  trace = traced.trace()
  counts = jaxpr_cost.count(trace.jaxpr, traced.known)
  try:
    compiled = trace.lower().compile()
  except JaxRuntimeError as error:
    refused = refusal(str(error))
    if not refused:
      raise
    spent = time.monotonic() - started
    return Estimate(traced.name, traced.once_per, spent, counts.flops, refused=refused)
  spent = time.monotonic() - started
  program = hlo.parse(compiled.as_text())
  cost = hlo_cost.count(
    program,
    mesh,
    trips=counts.iterations,
    kernels=counts.kernel,
    on_chip_spaces=topology.platform == "tpu",
  )
  largest = [
    (f"{s.dtype}[{','.join(map(str, s.dims))}]", s.nbytes, name, alike)
    for s, name, alike in hlo_cost.largest_arrays(program)
  ]
  return Estimate(
    name=traced.name,
    once_per=traced.once_per,
    compile_seconds=spent,
    flops_all=counts.flops,
    memory=_memory(compiled, traced, run, topology.chip),
    flops=cost.flops,
    nbytes=cost.nbytes,
    roofline=roofline(cost, topology.chip),
    collectives=cost.collectives,
    largest=tuple(largest),
    counted_once=cost.unknown,
    uncounted=cost.uncounted,
  )


def refusal(message: str) -> str:
  """A compiler's word on a program that does not fit, in one line; empty for other errors."""
  if "RESOURCE_EXHAUSTED" not in message:
    return ""
  said = re.search(r"(Ran out of memory[^.]*\.?\d*[^.]*\.?\d*[^.]*)\. ", message)
  return (said[1] if said else message.split("\n")[0]).strip()


def _memory(compiled: Any, traced: Traced, run: Run, chip: Chip) -> Memory:
  found = compiled.memory_analysis()
  elsewhere = sum(size for name, size in run.resident.items() if name not in traced.holds)
  return Memory(
    arguments=found.argument_size_in_bytes,
    outputs=max(0, found.output_size_in_bytes - found.alias_size_in_bytes),
    temporaries=found.temp_size_in_bytes,
    code=found.generated_code_size_in_bytes,
    elsewhere=elsewhere,
    capacity=chip.memory,
  )


def roofline(cost: hlo_cost.Cost, chip: Chip) -> Roofline | None:
  """None where the chip's peaks are not known."""
  if chip.flops is None or chip.bandwidth is None or chip.interconnect is None:
    return None
  sent = sum(c.nbytes for c in cost.collectives)
  return Roofline(cost.flops / chip.flops, cost.nbytes / chip.bandwidth, sent / chip.interconnect)


@dataclasses.dataclass(frozen=True)
class TrainingStep:
  """Evaluation passes and update together. `model_flops` are three forward passes over the batch,
  attention and head included, recomputation not: what model FLOPs utilisation (MFU) is made of.
  """

  seconds: float
  model_flops: float
  mfu: float


def training_step(
  estimates: Mapping[str, Estimate], topology: Topology, evaluations: int
) -> TrainingStep | None:
  """None where a part of it was not planned, does not fit, or has no roofline."""
  parts = [estimates.get(name) for name in ("evaluate", "step")]
  if any(part is None or part.roofline is None for part in parts):
    return None
  evaluate, step = (part for part in parts if part is not None)
  seconds = step.roofline.seconds + evaluations * evaluate.roofline.seconds  # pyright: ignore
  model_flops = 3 * evaluate.flops_all
  peak = topology.count * (topology.chip.flops or math.inf)
  # The step alone, as its name says: evaluation is the price of the algorithm.
  mfu = model_flops / (step.roofline.seconds * peak)  # pyright: ignore
  return TrainingStep(seconds, model_flops, mfu)


def as_json(value: Any) -> Any:
  """Dataclasses with their derived numbers, as plain dicts and lists."""
  if isinstance(value, np.generic):
    return value.item()
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    derived = [n for n, v in vars(type(value)).items() if isinstance(v, property)]
    return fields | {name: as_json(getattr(value, name)) for name in derived}
  if isinstance(value, Mapping):
    return {str(k): as_json(v) for k, v in value.items()}
  if isinstance(value, tuple | list):
    return [as_json(v) for v in value]
  return value


def gib(nbytes: float) -> str:
  return f"{nbytes / GIB:.2f} GiB"
