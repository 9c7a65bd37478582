"""Every fault, in every phase and bucket: no hang, no mixture, and the next round puts it right.

Where each invariant of a push is tested (files of this folder unless a path is given):

W1   test_plan, test_plan_engines: every element painted once, from any mesh to any ranks
W2   test_stage: identity in bfloat16
W3   test_quantize: error bound
W4   test_quantize: quantising again
W5   test_quantize: scales, blocks of zeros
W6   test_quantize: dialects convert exactly; test_wire: another dtype is refused
W7   test_plan, test_plan_engines, test_wire, test_faults: names; test_push, test_families,
     test_sglang: what no plan names
W8   test_push: versions; test_sglang: every token has one; test_soak: the one that made it
W9   test_faults, test_push: kills at every call and bucket; test_tcp: at every frame; test_window:
     in the midst of one-sided writes; test_two_processes: a process of the trainer
W10  test_plan: tensors around the size of a bucket, of no size
W11  test_stage, test_quantize, test_plan_engines, test_two_processes: meshes, buckets, cut blocks
W12  test_sglang: prefix cache
W17  test_plan, test_plan_engines: fused and stacked layouts
W18  test_stage, test_sglang: one weight
W19  test_push, test_faults, test_window, test_two_processes: who is silent is named within the
     deadline
W20  test_push: replicas
W21  test_push, test_plan: ties
W22  test_adapters, test_sglang_adapters: an adapter changes what is answered
W23  test_sglang, test_sglang_fp8, test_plan_engines, test_window: equal to an export
W24  test_stage: hashes
W25  test_stage, test_two_processes: replicated sources
W26  test_delta: equal to a full push; another base, and a second application, refused
W27  test_push: staging is freed, or kept while it may be read
W28  test_push: fifty rounds; test_soak: two hundred on the real server
W29  test_plan: digests
W30  test_wire: fuzz
W31  test_push: a refused flush
W32  test_stage: rounding to bfloat16
W33  test_push: an older trainer

W13 to W16 are the training loop's (tests/orchestrate, tests/learner).
"""

import asyncio
import collections
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.transfer.report import PushError, State
from agentrl_jax.transfer.transports.broadcast import BroadcastTransport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport
from tests.reference.transfer import random_weights
from tests.sglang_fixture import REFERENCE
from tests.transfer.test_push import MODEL, rig
from tests.transfer.test_tcp import local

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
BROADCAST = "/update_weights_from_distributed"
SOCKET_SENDER = [sys.executable, str(REFERENCE / "socket_sender.py")]
BEFORE = ["/model_info", "/server_info", "/pause_generation"]
AFTER = ["/weights_checker", "/flush_cache", "/update_weight_version", "/continue_generation"]
LIMIT = 20.0  # seconds of one round: nothing here waits for a deadline
# A bucket of 1 kB makes several requests of the tiny model.
TRANSPORTS = {
  "disk": (lambda root: DiskTransport(root), [DISK]),
  "tcp": (
    lambda root: local(root.with_name(f"{root.name}-received"), bucket_bytes=1 << 10),
    [DISK],
  ),
  "broadcast": (
    lambda root: BroadcastTransport(SOCKET_SENDER, root=root, bucket_bytes=1 << 10),
    ["/begin_weight_update", BROADCAST, "/end_weight_update"],
  ),
  "bucket": (
    lambda root: TensorTransport(bucket_bytes=1 << 10),
    ["/begin_weight_update", TENSOR, "/end_weight_update"],
  ),
  "direct": (
    lambda root: DirectTransport(bucket_bytes=1 << 10),
    ["/begin_weight_update", TENSOR, "/end_weight_update"],
  ),
}
PROCESS_FAULTS = ["refuse", "drop", "lose", "die", "restart"]
BUCKET_FAULTS = ["flip", "truncate", "ignore", "replay"]


def at(weights, version):
  """The weights of a version: every tensor differs from every other version's."""
  return jax.tree.map(lambda w: w + jnp.float32(version), weights)


class Bench:
  """One fake server and its publisher, back at a committed version after every fault."""

  def __init__(self, publisher, fake, weights):
    self.publisher, self.fake, self.weights = publisher, fake, weights
    self.version = 0
    self.served: dict[str, bytes] = {}  # what each version answers with
    self.ended: collections.Counter = collections.Counter()

  async def commit(self):
    """Publishes the next version, which must succeed, and remembers its answer."""
    self.version += 1
    report = await self.publisher.publish(at(self.weights, self.version), self.version)
    assert report.state is State.COMMITTED, str(report)
    label, content = self.fake.answer()
    assert label == f"run:{self.version}"
    assert content not in self.served.values()
    self.served[label] = content

  async def round(self):
    """One round that may fail. Returns how it ended."""
    self.version += 1
    start = time.monotonic()
    try:
      report = await self.publisher.publish(at(self.weights, self.version), self.version)
      ended = str(report.state)
      assert report.state is State.COMMITTED or self.fake.url in report.message
    except PushError as error:
      ended = "refused"
      assert self.fake.url in str(error)
    assert time.monotonic() - start < LIMIT
    self.ended[ended] += 1
    return ended

  async def settle(self, ended):
    """Checks what the server would answer now, then makes it well again."""
    fake = self.fake
    if fake._server is not None and not fake.paused:
      label, content = fake.answer()
      if ended == "committed":
        assert label == f"run:{self.version}"
        assert content not in self.served.values()
      elif label == f"run:{self.version}":  # cut off after the label: it holds all of the new one
        await self.publisher.recover()
        fake.calls.clear()
        report = await self.publisher.publish(at(self.weights, self.version), self.version)
        assert report.state is State.COMMITTED  # by its checksums
        assert not {DISK, TENSOR, BROADCAST} & set(fake.calls)
      elif label != "default":  # a new process says that nothing was published to it
        assert self.served[label] == content  # an older version, whole
    else:
      assert ended != "committed"
    fake.faults.clear()
    fake.buckets.clear()
    if fake._server is None:
      with pytest.raises(PushError, match=fake.url):
        await self.publisher.recover()
      await fake.restart()
    await self.publisher.recover()
    await self.commit()


@pytest.fixture(scope="module")
def weights():
  return random_weights(MODEL)


def benched(tmp_path, weights, kind, test):
  async def main():
    async with rig(tmp_path, 1, 30.0, transport=TRANSPORTS[kind][0](tmp_path)) as (
      publisher,
      fakes,
    ):
      bench = Bench(publisher, fakes[0], weights)
      await bench.commit()
      return await test(bench)

  return asyncio.run(main())


async def calls_of_a_round(bench):
  """How often each route is called."""
  bench.fake.calls.clear()
  await bench.commit()
  return collections.Counter(bench.fake.calls)


def some_slow(*quick):
  return [
    pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in TRANSPORTS
  ]


@pytest.mark.parametrize("kind", some_slow("bucket"))
def test_faults_are_survived(tmp_path, weights, kind, record_property, capsys):  # W9, W19
  """Kills and losses at every call of every route, and damage to every bucket."""

  async def test(bench):
    injected = 0
    counts = await calls_of_a_round(bench)
    routes = [*BEFORE, *TRANSPORTS[kind][1], *AFTER]
    assert set(counts) == set(routes)
    bucketed = [route for route in (TENSOR, BROADCAST) if route in routes]
    assert all(counts[route] > 3 for route in bucketed)
    for route in routes:
      kinds = PROCESS_FAULTS + (BUCKET_FAULTS if route in bucketed else [])
      for call in range(counts[route]):
        for fault in kinds:
          bench.fake.faults[route] = [None] * call + [fault]
          ended = await bench.round()
          if fault in BUCKET_FAULTS and not (fault == "replay" and ended == "committed"):
            assert ended == "fenced", (route, call, fault)
          await bench.settle(ended)
          injected += 1
    return injected, bench.ended

  injected, ended = benched(tmp_path, weights, kind, test)
  assert sum(ended.values()) == injected
  assert injected > 50
  with capsys.disabled():
    endings = ", ".join(f"{n} {state}" for state, n in sorted(ended.items()))
    print(f"\n{kind}: {injected} faults injected, {injected} survived ({endings})")
  record_property("injected", injected)


@pytest.mark.parametrize("kind", some_slow("disk"))
def test_the_sender_is_stopped_at_every_call(tmp_path, weights, kind):  # W9
  """The trainer's round is cancelled while the server works on each call in turn."""

  async def test(bench):
    counts = await calls_of_a_round(bench)
    for route, count in counts.items():
      for call in range(count):
        bench.version += 1
        bench.fake.calls.clear()
        bench.fake.faults[route] = [None] * call + ["hang"]
        running = asyncio.create_task(
          bench.publisher.publish(at(bench.weights, bench.version), bench.version)
        )
        async with asyncio.timeout(LIMIT):
          while bench.fake.calls.count(route) <= call:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
          await running
        with pytest.raises(PushError, match="was interrupted by CancelledError"):
          await bench.publisher.publish(at(bench.weights, bench.version), bench.version)
        await bench.settle("cancelled")
    return sum(counts.values())

  assert benched(tmp_path, weights, kind, test) >= 10
  assert list(tmp_path.iterdir()) == []


def test_a_server_of_other_tensors_is_fenced(tmp_path, weights):  # W7
  """A parameter that the server has under another name is missing from what it reports."""

  async def test(bench):
    load = bench.fake._load

    def renamed(named, fault):
      load([(n.replace("model.norm", "model.final"), a) for n, a in named], fault)

    bench.fake.tensors.pop("model.norm.weight")
    bench.fake._load = renamed
    bench.version += 1
    report = await bench.publisher.publish(at(weights, bench.version), bench.version)
    assert report.state is State.FENCED
    assert "model.norm.weight of rank 0 is not there" in report.message

  benched(tmp_path, weights, "bucket", test)


def test_a_server_restarted_between_verification_and_label_is_not_labelled(tmp_path, weights):
  """It would serve the weights it was started from under the new version's name."""

  async def test(bench):
    act = bench.fake._act

    def restarting(route, body, fault):
      answer = act(route, body, fault)
      if route == "/flush_cache":
        bench.fake._reborn()
      return answer

    bench.fake._act = restarting
    bench.version += 1
    report = await bench.publisher.publish(at(weights, bench.version), bench.version)
    assert report.state is State.FENCED
    assert f"{bench.fake.url} was restarted during the round" in report.message
    assert (bench.fake.version, bench.fake.paused) == ("default", True)

  benched(tmp_path, weights, "disk", test)


def test_pause_may_end_requests_instead(tmp_path, weights):
  async def test(bench):
    modes = []
    act = bench.fake._act

    def watching(route, body, fault):
      if route == "/pause_generation":
        modes.append(body["mode"])
      return act(route, body, fault)

    bench.fake._act = watching
    await bench.commit()
    bench.publisher.pause_mode = "abort"
    await bench.commit()
    assert modes == ["retract", "abort"]

  benched(tmp_path, weights, "disk", test)
