"""A mesh over two `jax.distributed` processes: what both of them push, or the first alone, is, byte
for byte, what one process pushes that has all devices; and one that fails ends the round, not more.
"""

import asyncio
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.ops.quantize import Quantization
from agentrl_jax.orchestrate import hosts
from agentrl_jax.transfer import sources as sources_module
from agentrl_jax.transfer.engine_layout import push_plan
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.sources import Sources, Task
from agentrl_jax.transfer.stage import source_layout, stage
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport
from tests.ports import free_port
from tests.reference.transfer import random_weights
from tests.transfer.test_push import MODEL, rig
from tests.transfer.test_tcp import Peer, gone_within, local

BLOCKS = Quantization(block=(4, 3))  # of 8 x 8 matrices, which lie on 4 x 2 devices
SHORT = 2.0  # seconds that a slow process is waited for
SEEDS = 0, 1


def spread(seed):
  """Weights over all devices of all processes, each of which makes its own shards."""
  placed = shardings(MODEL, make_mesh(fsdp=4, tensor=2))

  def place(array, sharding):
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  return jax.tree.map(place, random_weights(MODEL, seed), placed)


def held(fake):
  """What a server holds, by tensor."""
  return {
    name: [str(a.dtype), list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()]
    for name, a in fake.tensors.items()
  }


def pushed(root, rounds, transports, sources=None):
  """For each transport, the fingerprint of every round and what the server holds at the end."""

  async def push(transport):
    async with rig(root, 1, 60.0, transport, sources) as (publisher, fakes):
      reports = []
      for version, weights in enumerate(rounds, 1):
        reports.append(await publisher.publish(weights, version))
        if sources is not None:
          sources.release()
      assert all(report.state is State.COMMITTED for report in reports), str(reports)
      return [[report.fingerprint for report in reports], held(fakes[0])]

  return [asyncio.run(push(transport)) for transport in transports]


def transports(root):
  return DiskTransport(root), DirectTransport(bucket_bytes=1 << 10)


def quantized(weights, align=1):
  """The plan of a push in FP8 whose blocks the shards cut."""
  options = {"quantization": BLOCKS, "bucket_bytes": 1 << 10, "align": align}
  return push_plan(MODEL, source_layout(weights), "bfloat16", **options), options


def staged(root, weights, sources=None):
  """The fingerprint of a push in FP8, by one process or by all."""
  plan, options = quantized(weights)
  disk = DiskTransport(root)
  if sources is None:
    return stage(plan, weights, disk.allocate(plan, "fp8"), "fp8").fingerprint
  task = Task("fp8", plan.digest, "bfloat16", staging=str(disk.staging("fp8")), seconds=60.0,
              **options)  # fmt: skip
  made = sources.stage(task, plan, weights, disk).fingerprint
  sources.release()
  return made


def delivered(root, weights, sources=None):
  """What a receiver holds of each tensor after a delivery in FP8, by one process or by all."""
  plan, options = quantized(weights, align=16)
  transport = over_tcp(root)
  if sources is None:
    made = stage(plan, weights, transport.allocate(plan, "fp8"), "fp8")
  else:
    task = Task("fp8", plan.digest, "bfloat16", staging="", seconds=60.0, **options)
    made = sources.stage(task, plan, weights, transport)
  asyncio.run(transport.deliver(made, Peer(), 1))
  (arrived,) = transport._process._rounds.values()
  found = {
    name: hashlib.sha256(arrived.read(name).tobytes()).hexdigest()
    for name in arrived.ledger.expected
  }
  if sources is not None:
    made.join(None)
    sources.release()
  transport.close()
  return found


def over_tcp(root):
  return local(root / "received", connections=2, bucket_bytes=1 << 10)


def started(name, root):
  """Both processes, in a function of this module."""
  address = f"127.0.0.1:{free_port()}"
  program = (
    f"import sys; from tests.transfer.test_two_processes import {name}; {name}(*sys.argv[1:])"
  )
  flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
  return [
    subprocess.Popen(
      [sys.executable, "-c", program, str(process), address, str(root)],
      stdout=subprocess.PIPE,
      text=True,
      cwd=Path(__file__).parents[2],
      env=os.environ | {"XLA_FLAGS": flags},
    )
    for process in range(2)
  ]


def join(process, address, root):
  """One of the two processes; the first prints what was pushed, and how many arrays it did not have
  whole.
  """
  jax.distributed.initialize(address, 2, int(process))
  root = Path(root)
  trees = [spread(seed) for seed in SEEDS]
  sources = Sources("weights")
  open_one, closed = over_tcp(root), over_tcp(root)
  closed.close()
  able = [sources.share(way) for way in (*transports(root), open_one, closed)]
  open_one.close()
  gathered = [hosts.gathered(tree) for tree in trees]
  if hosts.leads():
    away = sum(not leaf.is_fully_addressable for leaf in jax.tree.leaves(trees[0]))
    alone = pushed(root, gathered, transports(root), sources=None)
    together = pushed(root, trees, transports(root)[:1], sources)
    fp8 = staged(root, trees[0], sources)
    tcp = pushed(root, trees, [over_tcp(root)], sources)
    sent = delivered(root, trees[0], sources)
    print(json.dumps([away, able, alone, together, fp8, tcp, sent]), flush=True)
  else:
    for tree in [*trees, trees[0], *trees, trees[0]]:
      sources.stand_by(MODEL, tree)
  jax.distributed.shutdown()


def test_two_processes_push_what_one_does(tmp_path):
  both = started("join", tmp_path / "two")
  outputs = [process.communicate(timeout=240)[0] for process in both]
  assert [process.returncode for process in both] == [0, 0]
  away, able, alone, together, fp8, tcp, sent = json.loads(outputs[0].splitlines()[-1])
  assert away > 5  # it had to get these from the other
  assert able == [True, False, True, False]
  trees = [spread(seed) for seed in SEEDS]
  theirs = pushed(tmp_path / "one", trees, transports(tmp_path / "one"))
  assert alone == theirs
  assert together == theirs[:1]
  (fingerprints, tensors), _ = alone
  assert len(set(fingerprints)) == 2
  assert "model.embed_tokens.weight" in tensors
  assert fp8 == staged(tmp_path / "one", trees[0])
  ((hashes, arrived),) = tcp
  assert arrived == tensors and len(set(hashes)) == 2
  assert sent == delivered(tmp_path / "one", trees[0])
  assert "model.layers.0.mlp.up_proj.weight_scale_inv" in sent


def fail(process, address, root):
  """One of two processes, of which the second is slow, then holds other weights, then bad ones,
  then dies. The first prints each report's state, message and seconds, and what its server said
  after each.
  """
  jax.distributed.initialize(address, 2, int(process))
  root = Path(root)
  sources, tree = Sources("weights"), spread(0)
  if not hosts.leads():
    _fail_in_turn(sources, tree)

  async def main():
    said = []
    async with rig(root, 1, 60.0, DiskTransport(root), sources) as (publisher, (fake,)):

      async def push(version, deadline):
        publisher.deadline, start = deadline, time.monotonic()
        report = await publisher.publish(tree, version)
        seconds = time.monotonic() - start
        if report.state is State.COMMITTED:
          sources.release()
        left = [str(path) for path in root.iterdir()]
        said.append([report.state, report.message, seconds, fake.answer()[0], fake.paused, left])

      await push(1, 60.0)
      await push(2, SHORT)  # slow
      await push(2, 60.0)
      await push(3, 60.0)  # a copy that differs
      await push(3, 60.0)  # not finite
      await push(3, SHORT)  # dead
    print(json.dumps(said), flush=True)

  asyncio.run(main())
  os._exit(0)  # the other cannot take part in a shutdown


def _fail_in_turn(sources, tree):
  fill, rounds = sources_module.fill, itertools.count(1)

  def failing(plan, weights, *rest, **options):
    match next(rounds):
      case 2:
        time.sleep(SHORT + 2.0)
      case 4:
        weights = weights.replace(final_norm=full(weights.final_norm, 2.0))
      case 5:
        weights = weights.replace(unembedding=full(weights.unembedding, np.inf))
      case 6:
        fill(plan, weights, *rest, **{**options, "together": _Dies()})
    return fill(plan, weights, *rest, **options)

  sources_module.fill = failing
  for _ in range(3):
    sources.stand_by(MODEL, tree)


def full(leaf, value):
  """This process's shards of an array like `leaf`, all of one value."""
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: np.full(leaf.shape, value, np.float32)[index]
  )


class _Dies:
  """Once its part is written, before it says so."""

  def written(self, sums):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_fails_ends_its_round_and_no_more(tmp_path):  # W9, W19
  both = started("fail", tmp_path)
  outputs = [process.communicate(timeout=240)[0] for process in both]
  assert [process.returncode for process in both] == [0, -signal.SIGKILL]
  rows = json.loads(outputs[0].splitlines()[-1])
  states, messages, seconds, versions, paused, left = zip(*rows, strict=True)
  assert states == ("committed", "aborted", "committed", "aborted", "aborted", "aborted")
  assert versions == ("run:1", "run:1", "run:2", "run:2", "run:2", "run:2")
  assert not any(paused) and not any(left)  # it goes on with the old; no file of ours stays
  silent = "stage: process 1 gave no word within 2 s: it is dead, or slow"
  assert (messages[1], messages[5]) == (silent, silent)
  assert max(seconds) < 60
  assert re.fullmatch(
    r"stage: final_norm: the copy on device \d+ differs from .*", messages[3]
  )  # W25
  assert messages[4] == "stage: process 1: unembedding has a value that is not finite"


def lose(process, address, root):
  """One of two processes, of which the second dies while it sends; as `fail`."""
  jax.distributed.initialize(address, 2, int(process))
  root = Path(root)
  sources, tree = Sources("weights"), spread(0)
  if not hosts.leads():
    join, deliveries = sources_module.join, itertools.count(1)
    sources_module.join = lambda *arguments: (
      os.kill(os.getpid(), signal.SIGKILL) if next(deliveries) == 2 else join(*arguments)
    )
    while True:
      sources.stand_by(MODEL, tree)

  async def main():
    said = []
    async with rig(root, 1, 60.0, over_tcp(root), sources) as (publisher, (fake,)):
      for version, deadline in ((1, 60.0), (2, SHORT)):
        publisher.deadline = deadline
        report = await publisher.publish(tree, version)
        said.append([report.state, report.message, fake.answer()[0], fake.paused])
        if version == 1:
          sources.release()
      gone_within(root / "received", 5.0)
    print(json.dumps(said), flush=True)

  asyncio.run(main())
  os._exit(0)


def test_a_process_that_dies_while_it_sends_leaves_the_server_as_it_was(tmp_path):  # W9, W19
  both = started("lose", tmp_path)
  outputs = [process.communicate(timeout=240)[0] for process in both]
  assert [process.returncode for process in both] == [0, -signal.SIGKILL]
  first, dead = json.loads(outputs[0].splitlines()[-1])
  assert first == ["committed", "", "run:1", False]
  assert (dead[0], *dead[2:]) == ("aborted", "run:1", False)
  assert dead[1].endswith(": process 1 gave no word within 2 s: it is dead, or slow"), dead[1]
