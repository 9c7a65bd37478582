"""Quantisation and staging of weights beside a memory copy and the plain cast, in one run.

    python -m benchmarks.transfer [--mb=256] [--smoke]

All cases take turns in every round, so that other work on the machine slows all of them; medians
over rounds. GB/s count the bytes that are read. CPU-seconds are this process's, all threads.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agentrl_jax.transfer.engine_layout import quantized_weights
from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.quantize import OCP, Quantization, quantize
from agentrl_jax.transfer.stage import allocate, source_layout, stage

MB = flags.DEFINE_integer("mb", 256, "Megabytes of bfloat16 in the matrix.", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds of all cases.", lower_bound=1)
SMOKE = flags.DEFINE_bool("smoke", False, "One small round: does it run? Writes nothing.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/transfer.json", "JSON file.")

COLUMNS = 4096
Case = tuple[Callable[[], object], int]  # what to run, the bytes that it reads


def kernels(rows: int) -> dict[str, Case]:
  """One matrix: a copy, the casts, and quantisation of every kind."""
  rng = np.random.default_rng(0)
  narrow = jnp.asarray(rng.normal(size=(rows, COLUMNS)), jnp.bfloat16)
  wide = narrow.astype(jnp.float32)
  host, target = np.asarray(narrow).view(np.uint8), np.empty((rows, COLUMNS * 2), np.uint8)
  to_fp8 = jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))
  to_bfloat16 = jax.jit(lambda x: x.astype(jnp.bfloat16))
  cases = {
    "memcpy": (lambda: np.copyto(target, host), host.nbytes),
    "cast bfloat16 to float8": (lambda: to_fp8(narrow), narrow.nbytes),
    "cast float32 to bfloat16": (lambda: to_bfloat16(wide), wide.nbytes),
    "quantise float32, blocks": (lambda: quantize(wide, OCP), wide.nbytes),
  }
  for name, how in {
    "blocks": OCP,
    "blocks, powers of two": Quantization(scale="power_of_two"),
    "blocks, FNUZ": Quantization("float8_e4m3fnuz", top=240.0),
    "one scale": Quantization(block=None),
  }.items():
    cases[f"quantise bfloat16, {name}"] = (lambda h=how: quantize(narrow, h), narrow.nbytes)
  return cases


def staging(rows: int) -> dict[str, Case]:
  """A tree of two matrices, transposed, packed and hashed as in a push."""
  rng = np.random.default_rng(0)
  names = ("up_proj", "down_proj")
  tree = {n: jnp.asarray(rng.normal(size=(COLUMNS, rows // 2)), jnp.float32) for n in names}
  rules = [assembly(f"l.{n}.weight", f"['{n}']", tree[n].shape, perm=(1, 0)) for n in names]
  nbytes = sum(array.nbytes for array in tree.values())
  cases = {}
  for name, how in (("bfloat16", None), ("FP8", OCP)):
    quantized = quantized_weights(rules, how) if how else {}
    routed = plan(
      source_layout(tree), whole(rules, "bfloat16", quantized=quantized), rules,
      bucket_bytes=1 << 30, split=False, quantized=quantized,
    )  # fmt: skip
    buffers = allocate(routed)
    cases[f"stage float32 as {name}"] = (
      lambda r=routed, b=buffers: stage(r, tree, b, "bench"), nbytes,
    )  # fmt: skip
  return cases


def measure(cases: dict[str, Case], rounds: int) -> dict[str, dict[str, float]]:
  """Medians over rounds in which the cases take turns; a first run of each compiles."""
  taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
  for turn in range(rounds + 1):
    for name, (run, _) in cases.items():
      cpu, wall = time.process_time(), time.perf_counter()
      jax.block_until_ready(run())
      if turn:
        taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
  out = {}
  for name, (_, nbytes) in cases.items():
    wall, cpu = (statistics.median(values) for values in zip(*taken[name], strict=True))
    out[name] = {
      "gigabytes_a_second": nbytes / 1e9 / wall,
      "gigabytes_a_cpu_second": nbytes / 1e9 / max(cpu, 1e-9),
      "wall_seconds": wall,
      "cpu_seconds": cpu,
    }
  return out


def main(_) -> None:
  rows = 256 if SMOKE.value else max(256, MB.value * 1_000_000 // (2 * COLUMNS) // 256 * 256)
  found = measure(kernels(rows) | staging(rows), 1 if SMOKE.value else ROUNDS.value)
  for name, row in found.items():
    print(
      f"{name:40} {row['gigabytes_a_second']:6.2f} GB/s {row['gigabytes_a_cpu_second']:6.2f} "
      f"GB/CPU-s {row['cpu_seconds']:.3f} CPU-s"
    )
  if SMOKE.value:
    return
  result = {
    "bytes": rows * COLUMNS * 2,
    "rounds": ROUNDS.value,
    "cases": found,
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
  }
  path = Path(OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
