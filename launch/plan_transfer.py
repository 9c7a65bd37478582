"""What a weight push moves: `python -m launch.plan_transfer --model=DIR --mesh=fsdp=4,tensor=2`.

Reads only config.json of a Hugging Face directory. Prints the plan from a trainer's mesh to
tensor-parallel servers: its digest (two sides that agree print the same), bytes by link, largest
fan-in, buckets, and the least time of the wire at given link speeds. Nothing is moved.
"""

import math
import time
from collections.abc import Sequence

from absl import flags

from agentrl_jax.models.hf import load_model
from agentrl_jax.ops.quantize import OCP
from agentrl_jax.transfer.engine_layout import (
  direct_target,
  parameters,
  quantized_parameters,
  quantized_weights,
)
from agentrl_jax.transfer.forecast import forecast, report, source_on_mesh
from agentrl_jax.transfer.layout import assemblies
from agentrl_jax.transfer.plan import plan, whole, with_dtypes
from launch import command

MODEL = flags.DEFINE_string("model", "", "A Hugging Face directory; its weights are not read.")
MESH = flags.DEFINE_list("mesh", ["fsdp=1"], "Sizes of the trainer's mesh axes, fsdp=4,tensor=2.")
RANKS = flags.DEFINE_integer("ranks", 1, "Tensor-parallel ranks of a server.", lower_bound=1)
REPLICAS = flags.DEFINE_integer("replicas", 1, "Servers.", lower_bound=1)
DIRECT = flags.DEFINE_bool("direct", True, "Each rank gets its own part, else all of it.")
FP8 = flags.DEFINE_bool("fp8", False, "Matrices in FP8 with scales of 128 x 128 blocks.")
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "What servers hold the rest in.")
BUCKET_MB = flags.DEFINE_float("bucket_mb", 256.0, "Most megabytes of a bucket.", lower_bound=1e-3)
HOST = flags.DEFINE_integer("devices_per_host", 8, "Devices of one network link.", lower_bound=1)
SPEEDS = flags.DEFINE_list("speeds", ["1.25", "12.5", "50"], "Link speeds in GB/s.")


def main(arguments: Sequence[str]) -> int:
  del arguments
  if not MODEL.value:
    raise ValueError("give --model=DIR, a directory with config.json")
  links = speeds(SPEEDS.value)
  model = load_model(MODEL.value)
  start = time.process_time()
  source = source_on_mesh(model, sizes(MESH.value))
  made = assemblies(model.rules, {tensor.name: tensor.shape for tensor in source})
  quantized = quantized_weights(made, OCP) if FP8.value else {}
  count = RANKS.value * REPLICAS.value
  target = whole(made, DTYPE.value, range(count), quantized)
  if DIRECT.value:
    placed = parameters(made, RANKS.value, kv_heads=model.units.get("kv_heads"))
    quantized = quantized_parameters(placed, quantized)
    target = direct_target(placed, DTYPE.value, RANKS.value, REPLICAS.value)
    target = with_dtypes(target, quantized)
    made = [parameter.assembly for parameter in placed]
  routed = plan(
    source,
    target,
    made,
    bucket_bytes=int(BUCKET_MB.value * 1e6),
    split=False,
    quantized=quantized,
  )
  found = forecast(routed, source_host=HOST.value, target_host=HOST.value)
  print(report(routed, found, links))
  print(f"planned in {time.process_time() - start:.2f} CPU-seconds")
  return 0


def sizes(texts: Sequence[str]) -> dict[str, int]:
  """["fsdp=4", "tensor=2"] as numbers. Raises ValueError for anything else."""
  out = {}
  for text in texts:
    name, _, number = text.partition("=")
    if not number.isdecimal() or int(number) < 1:
      raise ValueError(f"--mesh has {text!r}, expected AXIS=SIZE")
    out[name] = int(number)
  return out


def speeds(texts: Sequence[str]) -> list[float]:
  """["1.25", "50"] as numbers. Raises ValueError for what is no positive one."""
  out = []
  for text in texts:
    try:
      speed = float(text)
    except ValueError:
      speed = math.nan
    if not 0 < speed < math.inf:
      raise ValueError(f"--speeds has {text!r}, expected GB/s, more than 0")
    out.append(speed)
  return out


if __name__ == "__main__":
  command.run(main)
