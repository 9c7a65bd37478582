"""Hundreds of pushes while the real server generates: memory stays, nothing is left behind, and
each token tells which version made it.

Version v's head is zero but for two rows, plus and minus the first channel of the last hidden
state: whatever that is, a greedy token is one of the two, so the token itself proves the version.
"""

import asyncio
import contextlib
import os
import statistics
import time
import uuid
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.rollout.sglang import read_version_spans
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.transports.disk import DiskTransport
from tests.transfer.test_sglang import PROMPT
from tests.transfer.test_tcp import local

PUSHES = 200
WARM_UP = 60  # after which nothing may grow
GROWTH = 24e6  # bytes that the median of the last ten rounds may lie over that after the warm-up
REQUESTS = 4  # at once
TOKENS = 48
CYCLE = 120  # versions until the same two tokens come again

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]


def at(weights, version):
  """The weights whose greedy tokens are 4 or 5, 6 or 7, ... by the version."""
  token = 4 + 2 * (version % CYCLE)
  head = np.zeros(weights.unembedding.shape, np.float32)
  head[0, token], head[0, token + 1] = 1.0, -1.0
  return weights.replace(unembedding=jnp.asarray(head))


def family(pid):
  """A process and those below it, by their ids."""
  children = Path(f"/proc/{pid}/task").glob("*/children")
  below = [int(child) for path in children for child in path.read_text().split()]
  return [pid, *(one for child in below for one in family(child))]


def resident(pid):
  """Bytes in memory of these processes; of what is shared, their share."""
  rows = [
    line.split() for one in family(pid)
    for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
  ]  # fmt: skip
  return 1024 * sum(int(row[1]) for row in rows if row[0] == "Pss:")


def segments(pid):
  """Files of shared memory that these processes map or hold open, removed ones too."""
  found = []
  for one in family(pid):
    lines = Path(f"/proc/{one}/maps").read_text().splitlines()
    found += [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]
    for link in Path(f"/proc/{one}/fd").iterdir():
      with contextlib.suppress(FileNotFoundError):
        found.append(os.readlink(link))
  return sorted(path for path in found if path.startswith("/dev/shm/"))


@pytest.mark.parametrize("way", ["disk", "tcp"])
def test_pushes_while_generating(sglang_server, tiny_llama, way):  # W8, W27, W28
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  root = Path(f"/dev/shm/agentrl-soak-{uuid.uuid4().hex}")
  transport = DiskTransport(root) if way == "disk" else local(root, connections=2)
  run_id = f"soak-{way}"
  begun = committed = 0
  responses, trainer, server = [], [], []
  held = []

  async def ask(client, done):
    while not done.is_set():
      first, options = committed, {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
      answer = await client.post(
        f"{sglang_server.url}/generate", json={"input_ids": PROMPT, "sampling_params": options}
      )
      answer.raise_for_status()
      responses.append((first, begun, answer.json()))

  async def main():
    nonlocal begun, committed
    publisher = sglang_publisher(
      model, [sglang_server.url], transport=transport, run_id=run_id, deadline=120
    )
    begun = 1
    assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED
    committed, done = 1, asyncio.Event()
    async with httpx.AsyncClient(timeout=120) as client:
      asking = [asyncio.create_task(ask(client, done)) for _ in range(REQUESTS)]
      for version in range(2, PUSHES + 2):
        begun = version
        report = await publisher.publish(at(weights, version), version)
        assert report.state is State.COMMITTED, str(report)
        committed = version
        trainer.append(resident(os.getpid()))
        server.append(resident(sglang_server.pid))
        if version == WARM_UP:
          held.extend(segments(sglang_server.pid))
      done.set()
      await asyncio.gather(*asking)
    await publisher.close()

  start = time.monotonic()
  asyncio.run(main())
  seconds = time.monotonic() - start
  spanning = check_versions(responses, run_id)
  assert spanning > PUSHES / 10  # pushes fell into running requests
  grown = {}
  for name, seen in (("trainer", trainer), ("server", server)):
    first = statistics.median(seen[WARM_UP : WARM_UP + 10])
    grown[name] = statistics.median(seen[-10:]) - first
    print(f"{way}: {name} {first / 1e6:.1f} MB after {WARM_UP}, grown by {grown[name] / 1e6:.2f}")
  print(
    f"{way}: {PUSHES} pushes in {seconds:.0f} s, {len(responses)} responses, {spanning} over "
    "several versions"
  )
  assert max(grown.values()) < GROWTH, grown
  root.rmdir()  # which it only can be when it is empty
  assert [path for path in segments(os.getpid()) if str(root) in path] == []
  assert segments(sglang_server.pid) == [path for path in held if str(root) not in path]


def check_versions(responses, run_id):
  """How many responses were made by several versions. Each token's label is the version that made
  it, was live, and is not lower than the one before.
  """
  spanning = 0
  for first, last, reply in responses:
    tokens, meta = np.asarray(reply["output_ids"]), reply["meta_info"]
    assert len(tokens) == TOKENS
    assert all(span["version"].startswith(f"{run_id}:") for span in meta["weight_versions"])
    versions = read_version_spans(meta, TOKENS, "soak")
    assert first <= versions[0] and versions[-1] <= last
    assert (np.diff(versions) >= 0).all()
    np.testing.assert_array_equal((tokens - 4) // 2, versions % CYCLE)
    spanning += len(set(versions.tolist())) > 1
  return spanning
