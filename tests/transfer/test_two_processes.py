"""A mesh over two `jax.distributed` processes: what the first of them pushes is, byte for byte,
what one process pushes that has all devices.
"""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate import hosts
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport
from tests.reference.transfer import random_weights
from tests.transfer.test_push import MODEL, rig


def spread(seed):
  """Weights over all devices of all processes, each of which makes its own shards."""
  placed = shardings(MODEL, make_mesh(fsdp=4, tensor=2))

  def place(array, sharding):
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  return jax.tree.map(place, random_weights(MODEL, seed), placed)


def pushed(root, rounds):
  """For each transport, the fingerprint of every round and what the server holds at the end."""

  async def push(transport):
    async with rig(root, 1, 30.0, transport) as (publisher, fakes):
      reports = [await publisher.publish(weights, v) for v, weights in enumerate(rounds, 1)]
      assert all(report.state is State.COMMITTED for report in reports), str(reports)
      held = {
        name: [str(a.dtype), list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()]
        for name, a in fakes[0].tensors.items()
      }
      return [[report.fingerprint for report in reports], held]

  return [
    asyncio.run(push(t)) for t in (DiskTransport(root), DirectTransport(bucket_bytes=1 << 10))
  ]


def join(process, address, root):
  """One of the two processes; the first prints what it pushed, and how many arrays it did not have
  whole.
  """
  jax.distributed.initialize(address, 2, int(process))
  trees = [spread(seed) for seed in (0, 1)]
  rounds = [hosts.gathered(tree) for tree in trees]
  if hosts.leads():
    away = sum(not leaf.is_fully_addressable for leaf in jax.tree.leaves(trees[0]))
    print(json.dumps([away, pushed(Path(root), rounds)]), flush=True)
  jax.distributed.shutdown()


def test_two_processes_push_what_one_does(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as probe:
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  program = "import sys; from tests.transfer.test_two_processes import join; join(*sys.argv[1:])"
  flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
  both = [
    subprocess.Popen(
      [sys.executable, "-c", program, str(process), address, str(tmp_path / "two")],
      stdout=subprocess.PIPE,
      text=True,
      cwd=Path(__file__).parents[2],
      env=os.environ | {"XLA_FLAGS": flags},
    )
    for process in range(2)
  ]
  outputs = [process.communicate(timeout=240)[0] for process in both]
  assert [process.returncode for process in both] == [0, 0]
  away, ours = json.loads(outputs[0].splitlines()[-1])
  assert away > 5  # it had to get these from the other
  theirs = pushed(tmp_path / "one", [spread(seed) for seed in (0, 1)])
  assert ours == theirs
  (fingerprints, held), _ = ours
  assert len(set(fingerprints)) == 2
  assert "model.embed_tokens.weight" in held
