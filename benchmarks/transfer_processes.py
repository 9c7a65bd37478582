"""Staging of a push whose weights lie on 1, 2 and 4 processes of this machine: each writes its own
shards, against the first gathering all of them and staging alone.

    python -m benchmarks.transfer_processes [--layers=4] [--rounds=5]

The weights are made up: a Llama of width 1024 in float32, cut over eight devices, sent in bfloat16
by `disk`. Both ways take turns in every round; medians. Seconds are those of the first process,
from its wish to push until every byte is in shared memory and hashed, which is when a server would
be paused. On a machine with as many cores as processes the shards are cast and copied side by side;
with fewer they only take turns, and what is seen is what the conversation costs.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from agentrl_jax.models import llama
from agentrl_jax.models.model import Model, is_spec
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate import hosts
from agentrl_jax.transfer.engine_layout import push_plan
from agentrl_jax.transfer.sources import Sources, Task
from agentrl_jax.transfer.stage import source_layout, stage
from agentrl_jax.transfer.transports.disk import DiskTransport
from launch import processes

LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the made-up model.", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of both ways.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/transfer_processes.json", "JSON file.")
ONE = flags.DEFINE_string("one", None, "Of one of the measured processes: where its files go.")

COUNTS = 1, 2, 4
DEVICES = 8
OPTIONS = {"quantization": None, "bucket_bytes": 1 << 30, "align": 1}


def model() -> Model:
  """A Llama without a checkpoint."""
  return llama.bind(
    llama.Config(
      vocab_size=32_000, embed=1024, ffw=4096, layers=LAYERS.value, heads=16, kv_heads=8,
      head_dim=64, max_position=4096,
    )
  )  # fmt: skip


def weights(made: Model) -> object:
  """Float32 shards, each made by the process that holds it."""
  block = np.arange(1 << 16, dtype=np.float32) / (1 << 16)

  def place(spec, sharding):
    shape = sharding.shard_shape(spec.shape)
    return jax.make_array_from_callback(spec.shape, sharding, lambda _: np.resize(block, shape))

  placed = shardings(made, make_mesh(fsdp=DEVICES))
  return jax.tree.map(place, made.abstract(), placed, is_leaf=is_spec)


def one(root: str) -> None:
  """One of the processes; the first prints the seconds of each round by way, and the bytes."""
  made = model()
  tree, sources, disk = weights(made), Sources("benchmark"), DiskTransport(root)
  rounds: dict[str, list[float]] = {}
  nbytes = 0
  for turn in range(ROUNDS.value + 1):
    for way, run in (("each its shards", together), ("gathered by the first", gathered)):
      jax.block_until_ready(tree)
      start = time.perf_counter()
      nbytes = run(made, tree, sources, disk, f"{turn}")
      if turn:  # the first one compiles
        rounds.setdefault(way, []).append(time.perf_counter() - start)
  if hosts.leads():
    print(json.dumps([rounds, nbytes]), flush=True)


def together(made: Model, tree: object, sources: Sources, disk: DiskTransport, key: str) -> int:
  """Bytes staged by all processes."""
  if not hosts.leads():
    sources.stand_by(made, tree)
    return 0
  plan = push_plan(made, source_layout(tree), "bfloat16", **OPTIONS)
  if sources.count == 1:
    stage(plan, tree, disk.allocate(plan, key), key)
  else:
    task = Task(
      key, plan.digest, "bfloat16", staging=str(disk.staging(key)), seconds=120.0, **OPTIONS
    )
    sources.stage(task, plan, tree, disk)
  sources.release()
  disk.release(key)
  return plan.nbytes


def gathered(made: Model, tree: object, sources: Sources, disk: DiskTransport, key: str) -> int:
  """Bytes staged by the first process, which all others send it."""
  del sources
  whole = hosts.gathered(tree)
  if not hosts.leads():
    return 0
  plan = push_plan(made, source_layout(whole), "bfloat16", **OPTIONS)
  stage(plan, whole, disk.allocate(plan, key), key)
  disk.release(key)
  return plan.nbytes


def measured(count: int, root: Path) -> dict:
  """What so many processes of their own took."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  common = [
    sys.executable, "-m", "benchmarks.transfer_processes", f"--one={root}",
    f"--cpu_devices={DEVICES // count}", f"--layers={LAYERS.value}", f"--rounds={ROUNDS.value}",
  ]  # fmt: skip
  joining = [] if count == 1 else [f"--coordinator={address}", f"--processes={count}"]
  children = [
    subprocess.Popen(
      [*common, *joining, *([f"--process={i}"] if joining else [])],
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    for i in range(count)
  ]
  outputs = [child.communicate()[0] for child in children]
  if any(child.returncode for child in children):
    raise RuntimeError(f"processes ended with {[child.returncode for child in children]}")
  rounds, nbytes = json.loads(outputs[0].splitlines()[-1])
  return {
    way: {
      "seconds": statistics.median(seconds),
      "gigabytes_a_second": nbytes / 1e9 / statistics.median(seconds),
    }
    for way, seconds in rounds.items()
  } | {"bytes": nbytes}


def main(_) -> None:
  if ONE.value is not None:
    with processes.joined():
      one(ONE.value)
    return
  found = {}
  with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
    for count in COUNTS:
      found[str(count)] = measured(count, Path(root))
      print(count, json.dumps(found[str(count)]), flush=True)
  result = {
    "processes": found,
    "cores": len(os.sched_getaffinity(0)),
    "rounds": ROUNDS.value,
    "jax": jax.__version__,
  }
  path = Path(OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
