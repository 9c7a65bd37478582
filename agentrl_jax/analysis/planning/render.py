"""A plan as text: what a person reads before booking a pod."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_jax.analysis.planning.chips import GIB, Topology
from agentrl_jax.analysis.planning.estimate import Estimate, Memory, TrainingStep, gib
from agentrl_jax.analysis.planning.traced import Run


def text(
  *,
  heading: str,
  run: Run,
  topology: Topology,
  mesh: Mapping[str, int],
  sharding: str,
  estimates: Sequence[Estimate],
  step: TrainingStep | None,
  batch: Any,
) -> str:
  """The whole report."""
  chip = topology.chip
  used = " x ".join(f"{name} {size}" for name, size in mesh.items() if size > 1) or "one device"
  lines = [
    heading,
    "",
    f"parameters     {run.parameters:,}",
    f"devices        {topology.count} x {chip.name} ({topology.name})",
    f"mesh           {used}",
    f"training step  {run.rows} rows of {batch.row_length} = {run.tokens:,} positions, the fullest "
    f"that {batch.groups} groups of {batch.members} can make; {batch.micro_rows} rows a device at "
    "a time",
    f"attention      {'; '.join(run.attention)}",
  ]
  if chip.flops is not None:
    lines += [
      f"a device has   {chip.flops / 1e12:.1f} TFLOP/s bfloat16, {gib(chip.memory or 0)}, "
      f"{(chip.bandwidth or 0) / 1e9:.0f} GB/s memory, {(chip.interconnect or 0) / 1e9:.0f} GB/s "
      f"to others ({chip.source})"
    ]
  held = ", ".join(f"{name} {gib(size)}" for name, size in run.resident.items())
  lines += [f"a device keeps {held}", "", "weights (bytes a device)", sharding, ""]
  for estimate in estimates:
    lines += [*_program(estimate), ""]
  if step is not None:
    lines += [
      f"a training step takes at least {step.seconds:.2f} s, evaluation included; its update is "
      f"{step.model_flops / 1e15:.2f} PFLOP of model products, MFU at most {step.mfu:.1%}"
    ]
  return "\n".join(lines).rstrip() + "\n"


def _program(estimate: Estimate) -> Iterator[str]:
  yield f"{estimate.name} (once per {estimate.once_per})"
  if estimate.refused:
    yield f"  DOES NOT FIT: {estimate.refused}"
    return
  assert estimate.memory is not None
  yield from _memory(estimate.memory)
  yield (
    f"  products     {estimate.flops / 1e12:.3f} TFLOP a device; {estimate.flops_all / 1e12:.3f} "
    "TFLOP before they were shared out"
  )
  yield f"  memory       {estimate.nbytes / 1e9:.2f} GB read and written a device"
  if estimate.roofline is not None:
    r = estimate.roofline
    yield (
      f"  roofline     {r.seconds * 1e3:.1f} ms, bound by {r.bound} (products "
      f"{r.products * 1e3:.1f}, memory {r.memory * 1e3:.1f}, network {r.network * 1e3:.1f})"
    )
  for c in estimate.collectives:
    if c.nbytes >= 1e6 or c is estimate.collectives[0]:
      yield (
        f"  sends        {c.nbytes / 1e6:>12,.1f} MB  {c.kind} over {c.axes} ({c.group} devices, "
        f"{c.count:,.0f} times)"
      )
  for array, nbytes, name, alike in estimate.largest[:6]:
    times = f" x {alike}" if alike > 1 else ""
    yield f"  large value  {nbytes / 2**20:>8,.0f} MiB  {array}{times}  {name}"
  for loop in estimate.counted_once:
    yield f"  counted once: the loop {loop}, as its iterations depend on what is sampled"
  for kernel in estimate.uncounted:
    yield f"  not counted: the products of the kernel {kernel}"


def _memory(memory: Memory) -> Iterator[str]:
  parts = (
    f"arguments {gib(memory.arguments)}, new outputs {gib(memory.outputs)}, temporaries "
    f"{gib(memory.temporaries)}, code {gib(memory.code)}, held elsewhere {gib(memory.elsewhere)}"
  )
  verdict = ""
  if memory.capacity is not None:
    room = memory.capacity - memory.peak
    verdict = (
      f" of {gib(memory.capacity)}: fits, {gib(room)} left"
      if room >= 0
      else f" of {gib(memory.capacity)}: DOES NOT FIT, {gib(-room)} too much"
    )
  yield f"  peak         {memory.peak / GIB:.2f} GiB a device{verdict}"
  yield f"               {parts}"
