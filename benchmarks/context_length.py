"""The longest row that a training step of Qwen3-4B fits on H200s, one row at a time; planned.

    bash launch/environment.sh --extra=plan-gpu --dir=.venv-plan
    .venv-plan/bin/python -m benchmarks.context_length [--context=8] [--smoke]

Compiles the step of `config:qwen3_4b_h200_8` for a mesh with only a context axis at two lengths,
draws a line through the compiler's peaks, and compiles what the line says fits just so and what
does not: memory is linear in T where those agree. A second line goes through the last two peaks.
"""

import json
from pathlib import Path
from typing import Any

from absl import app, flags

from agentrl_jax.analysis.planning import chips

CONTEXT = flags.DEFINE_multi_integer("context", [1, 8], "Devices that a row is cut over.")
LENGTHS = flags.DEFINE_list("lengths", ["16384", "32768"], "Positions a device, for the line.")
SMOKE = flags.DEFINE_bool("smoke", False, "The two lengths only, nothing written.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/context_length.json", "Results.")
UNIT = 1024  # positions a device
TRIES = 4


def peak(length: int, context: int) -> dict[str, Any]:
  """What the compiler says of a step on one row of this length."""
  import fiddle as fdl
  from jax.errors import JaxRuntimeError

  from agentrl_jax.analysis.planning import estimate
  from agentrl_jax.models import sharding
  from configs.pods.qwen3 import qwen3_4b_h200_8
  from launch import programs

  topology = chips.parse(f"h200:{context}")
  config = qwen3_4b_h200_8()
  config.tasks, config.mesh = None, {"context": context}
  config.batch.groups, config.batch.members, config.batch.row_length = 1, 2, length  # one at a time
  config.limits.context_tokens = length - 1
  experiment = fdl.build(config)
  mesh = sharding.make_mesh(devices=chips.devices(topology), **experiment.mesh)
  assert experiment.architecture is not None
  run = programs.trace_run(experiment, experiment.architecture, mesh, None)
  step = next(traced for traced in run.programs if traced.name == "step")
  line: dict[str, Any] = {"length": length, "context": context}
  try:
    found = step.trace().lower().compile().memory_analysis()
  except JaxRuntimeError as error:
    refused = estimate.refusal(str(error))
    if not refused:
      raise
    line |= {"fits": False, "refused": refused}
  else:
    outputs = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
    used = found.argument_size_in_bytes + outputs + found.temp_size_in_bytes
    peak_bytes = used + found.generated_code_size_in_bytes
    line |= {"fits": peak_bytes <= topology.chip.memory, "peak_bytes": peak_bytes}
  print(json.dumps(line), flush=True)
  return line


def longest(context: int) -> list[dict[str, Any]]:
  """The two points of the line, then lengths where it meets the capacity until one fits, and one
  that is 3 % longer and does not.
  """
  points = [peak(int(length) * context, context) for length in LENGTHS.value]
  if SMOKE.value:
    return points
  capacity = chips.CHIPS["h200"].memory
  assert capacity is not None
  unit = UNIT * context
  for _ in range(TRIES):
    (x0, y0), (x1, y1) = [(p["length"], p["peak_bytes"]) for p in points if "peak_bytes" in p][-2:]
    meets = x0 + (capacity - y0) * (x1 - x0) / (y1 - y0)
    length = int(meets * 0.99) // unit * unit
    points.append(peak(length, context))
    if points[-1]["fits"]:
      return [*points, peak(int(length * 1.03) // unit * unit, context)]
  raise RuntimeError(f"none of {TRIES} lengths fits, the last was {length}: {points[-1]}")


def main(argv: list[str]) -> None:
  del argv
  chips.prepare_process(chips.parse("h200:8"))
  found = {str(context): longest(context) for context in CONTEXT.value}
  if not SMOKE.value:
    Path(OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(OUTPUT.value).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)
