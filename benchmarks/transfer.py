"""Quantisation and staging of weights beside a memory copy and the plain cast, in one run; with a
model also whole pushes of it into a SGLang server by every transport; with --fp8 those of a random
Qwen3 of 243 MB, in bfloat16 and in FP8 in turns.

    python -m benchmarks.transfer [--mb=256] [--model=DIR] [--fp8] [--smoke]

All cases take turns in every round, so that other work on the machine slows all of them; medians
over rounds. GB/s count the bytes that are read; of pushes, the bytes of the model from the call of
`publish` to its return. CPU-seconds are this process's, all threads. `idle` is how long the server
could not generate. "SGLang loads from disk" is its own route on the model's directory, alone.

With --fp8 two servers run at once, of the same model in the two formats, which start without
weights. That of FP8 has a test's plug-in in place of SGLang's FP8 product, which a CPU lacks; what
a push meets is SGLang's own. What a run does not measure stays in the file as it was.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from agentrl_jax.models import qwen3
from agentrl_jax.models.decoder import Config
from agentrl_jax.models.hf import load_model, load_weights, save_weights
from agentrl_jax.models.model import initialize
from agentrl_jax.ops.quantize import OCP, Quantization, quantize
from agentrl_jax.orchestrate.engines import fp8_model, window_for
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer, find_python
from agentrl_jax.transfer.engine_layout import quantized_weights
from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.push import SGLangPublisher, sglang_publisher
from agentrl_jax.transfer.receive import ReceiverProcess
from agentrl_jax.transfer.report import PushError, PushReport, State
from agentrl_jax.transfer.stage import allocate, source_layout, stage
from agentrl_jax.transfer.transports import Transport
from agentrl_jax.transfer.transports.auto import fastest
from agentrl_jax.transfer.transports.broadcast import SENDER, BroadcastTransport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tcp import TcpTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport
from agentrl_jax.transfer.transports.window import Library, OneSidedTransport, Opening
from tests.reference.plugins import write_plugin

MB = flags.DEFINE_integer("mb", 256, "Megabytes of bfloat16 in the matrix.", lower_bound=1)
MODEL = flags.DEFINE_string("model", None, "Model to push; without it nothing is pushed.")
FP8 = flags.DEFINE_bool("fp8", False, "Push a random Qwen3 in bfloat16 and in FP8.")
ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds of all cases.", lower_bound=1)
SMOKE = flags.DEFINE_bool("smoke", False, "One small round: does it run? Writes nothing.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/transfer.json", "JSON file.")

COLUMNS = 4096
# SGLang's Llama drops scales of blocks, its Qwen3 loads them.
QWEN3: Mapping[str, Any] = {
  "vocab_size": 4096, "embed": 1024, "ffw": 3072, "layers": 9, "heads": 8, "kv_heads": 4,
  "head_dim": 128, "max_position": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL = {"embed": 256, "ffw": 256, "layers": 1, "vocab_size": 256}
FORMATS = {"bfloat16": None, "FP8": OCP}
FP8_PLUGIN = Path(__file__).parents[1] / "tests/reference/sglang_fp8_cpu.py"
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


def transports(
  url: str, window: Opening | None, libraries: Sequence[Library]
) -> dict[str, Transport]:
  """Every way into a server on this machine; one-sided writes by the libraries that it has."""
  receiver = ReceiverProcess()
  ways: dict[str, Transport] = {
    f"tcp, {n} connections": TcpTransport({url: receiver.address}, receiver.token, connections=n)
    for n in (1, 2)
  }
  ways["tcp, 4 connections"] = TcpTransport(
    {url: receiver.address}, receiver.token, process=receiver
  )
  if window is not None:
    ways |= {
      library.name: OneSidedTransport(library, {url: window.address}, window.token)
      for library in libraries
    }
  return ways | {
    "disk": DiskTransport(),
    "broadcast": BroadcastTransport([str(find_python()), str(SENDER)]),
    "direct": DirectTransport(),
    "bucket": TensorTransport(),
  }


def pushes(directory: Path, rounds: int) -> dict[str, dict[str, float]]:
  """Medians over rounds in which the transports take turns, in bfloat16, with two sets of weights
  in turn; a first round of each is left out.
  """
  model = load_model(directory)
  weights = load_weights(model, directory)
  reports: dict[str, list[PushReport]] = {}
  own: list[float] = []
  choose = fastest()
  window, lacking = window_for(choose, 1)
  for name, reason in lacking.items():
    if reason:
      print(f"{name} is left out: {reason}")
  libraries = [library for library in choose.libraries if not lacking[library.name]]

  async def main(url: str) -> None:
    publishers = {
      name: sglang_publisher(model, [url], transport=way, run_id="benchmark")
      for name, way in transports(url, window, libraries).items()
    }

    async def alone() -> None:
      own.append(await _loads_from_disk(url, directory))

    reports.update(await take_turns(publishers, weights, rounds, before=alone))

  environment = window.environment() if window else {}
  with SGLangServer(ServerOptions(directory, dtype="bfloat16", environment=environment)) as server:
    asyncio.run(main(server.url))
  found = {"SGLang loads from disk": {"wall_seconds": statistics.median(own[1:])}}
  return found | {name: medians(held) for name, held in reports.items()}


def pushes_of_both_formats(sizes: Mapping[str, Any], rounds: int) -> dict[str, dict[str, float]]:
  """As `pushes`, of a random Qwen3 of these sizes into a server of each of `FORMATS` in turns; by
  "TRANSPORT, FORMAT".
  """
  model = qwen3.bind(Config(**sizes))
  weights = initialize(model, jax.random.key(0))

  async def main(urls: Mapping[str, str]) -> dict[str, list[PushReport]]:
    ways = {name: transports(url, None, ()) for name, url in urls.items()}
    publishers = {
      f"{way}, {name}": sglang_publisher(
        model, [urls[name]], transport=ways[name][way], run_id="benchmark", quantization=how
      )
      for way in ways["FP8"]
      for name, how in FORMATS.items()
    }
    return await take_turns(publishers, weights, rounds, servers=len(urls))

  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    save_weights(model, weights, root / "bfloat16", dtype=jnp.bfloat16)
    fp8_model(root / "bfloat16", root / "FP8")
    (root / "plugin").mkdir()
    write_plugin(root / "plugin", FP8_PLUGIN, "sglang_fp8_cpu:register")
    path = os.pathsep.join([str(root / "plugin"), os.environ.get("PYTHONPATH", "")])
    environments = {"bfloat16": {}, "FP8": {"PYTHONPATH": path}}
    options = {
      name: ServerOptions(
        root / name,
        dtype="bfloat16",
        extra=("--load-format", "dummy"),
        environment=environments[name],
      )
      for name in FORMATS
    }
    with SGLangServer(options["bfloat16"]) as plain, SGLangServer(options["FP8"]) as fp8:
      reports = asyncio.run(main({"bfloat16": plain.url, "FP8": fp8.url}))
  return {name: medians(held) for name, held in reports.items()}


async def take_turns(
  publishers: Mapping[str, SGLangPublisher],
  weights: Any,
  rounds: int,
  *,
  servers: int = 1,
  before: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, list[PushReport]]:
  """A push by each in every round, of two sets of weights in turn; the first round is left out.

  Args:
    servers: that consecutive publishers push to in turn.
    before: done at the start of each round.
  """
  trees = (weights, jax.tree.map(lambda w: w * jnp.asarray(1.01, w.dtype), weights))
  reports: dict[str, list[PushReport]] = {}
  version = 0
  for turn in range(rounds + 1):
    if before is not None:
      await before()
    for name, publisher in publishers.items():
      version += 1
      report = await publisher.publish(trees[version // servers % 2], version)
      if report.state is not State.COMMITTED:
        raise PushError(str(report))
      print(f"{name}: {report}", flush=True)
      if turn:
        reports.setdefault(name, []).append(report)
  for publisher in publishers.values():
    await publisher.close()
  return reports


def medians(held: Sequence[PushReport]) -> dict[str, float]:
  """Of the pushes of one kind, phases apart."""
  nbytes = held[0].phases["stage"].nbytes
  wall = statistics.median(sum(p.seconds for p in report.phases.values()) for report in held)
  return {
    "gigabytes_a_second": nbytes / 1e9 / wall,
    "bytes": nbytes,
    "wall_seconds": wall,
    "idle_seconds": statistics.median(report.idle_seconds for report in held),
  } | {
    f"{phase}_seconds": statistics.median(report.phases[phase].seconds for report in held)
    for phase in held[0].phases
  }


async def _loads_from_disk(url: str, directory: Path) -> float:
  """Seconds of the server's own load of the model's files."""
  async with httpx.AsyncClient(trust_env=False, timeout=600) as client:
    start = time.perf_counter()
    body = {"model_path": str(directory), "load_format": "safetensors"}
    answer = await client.post(f"{url}/update_weights_from_disk", json=body)
    answer.raise_for_status()
    return time.perf_counter() - start


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
  logging.set_verbosity(logging.WARNING)  # not a line for every request
  rows = 256 if SMOKE.value else max(256, MB.value * 1_000_000 // (2 * COLUMNS) // 256 * 256)
  found = measure(kernels(rows) | staging(rows), 1 if SMOKE.value else ROUNDS.value)
  for name, row in found.items():
    print(
      f"{name:40} {row['gigabytes_a_second']:6.2f} GB/s {row['gigabytes_a_cpu_second']:6.2f} "
      f"GB/CPU-s {row['cpu_seconds']:.3f} CPU-s"
    )
  pushed = {}
  if MODEL.value:
    pushed = pushes(Path(MODEL.value), 1 if SMOKE.value else ROUNDS.value)
  both = {}
  if FP8.value:
    sizes = {**QWEN3, **(SMALL if SMOKE.value else {})}
    both = pushes_of_both_formats(sizes, 1 if SMOKE.value else ROUNDS.value)
  for name, row in (pushed | both).items():
    print(name, " ".join(f"{key} {value:.3g}" for key, value in row.items()))
  if SMOKE.value:
    return
  path = Path(OUTPUT.value)
  earlier = json.loads(path.read_text()) if path.exists() else {}
  result = {
    "bytes": rows * COLUMNS * 2,
    "rounds": ROUNDS.value,
    "cases": found,
    "pushes": pushed or earlier.get("pushes", {}),
    "pushes_of_both_formats": (
      {"model": dict(QWEN3), "rounds": ROUNDS.value, "cases": both}
      if both
      else earlier.get("pushes_of_both_formats", {})
    ),
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
