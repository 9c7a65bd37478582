"""The round against servers that fail: every end state, no hang, no doubtful answer."""

import asyncio
import contextlib
import dataclasses
import os
import random
import threading
import time
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import llama
from agentrl_jax.transfer import push
from agentrl_jax.transfer.engine_layout import expected_checksums
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import PushError, State
from agentrl_jax.transfer.transports.disk import DiskTransport
from tests.reference.transfer import random_weights
from tests.transfer.fake_server import FakeServer
from tests.transfer.test_transports import held

MODEL = llama.bind(
  llama.Config(
    vocab_size=64, embed=8, ffw=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_position=64
  )
)
DEADLINE = 30.0  # seconds for each call
SHORT = 2.0  # where a server is told to hang
DISK = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def weights():
  return random_weights(MODEL)


def at(weights, version):
  """The weights of a version, each different from the others."""
  return weights.replace(final_norm=weights.final_norm + jnp.float32(version))


@contextlib.asynccontextmanager
async def rig(root, servers, deadline, transport=None, sources=None):
  """Fake servers and their publisher."""
  transport = transport or DiskTransport(root)
  async with contextlib.AsyncExitStack() as stack:
    fakes = [await stack.enter_async_context(FakeServer()) for _ in range(servers)]
    publisher = sglang_publisher(
      MODEL,
      [f.url for f in fakes],
      transport=transport,
      run_id="run",
      deadline=deadline,
      sources=sources,
    )
    stack.push_async_callback(publisher.close)
    yield publisher, fakes


def published(root, test, servers=1, deadline=DEADLINE):
  """Runs `test(publisher, fakes)` on a publisher of fake servers."""

  async def main():
    async with rig(root, servers, deadline) as (publisher, fakes):
      return await test(publisher, fakes)

  return asyncio.run(main())


def test_a_round_commits_in_order(tmp_path, weights):
  async def test(publisher, fakes):
    report = await publisher.publish(at(weights, 1), 1)
    assert report.state is State.COMMITTED
    assert fakes[0].calls == [
      "/model_info", "/server_info", "/weights_checker",  # what it holds, once for each start of it
      "/model_info", "/pause_generation", DISK, "/weights_checker", "/flush_cache",
      "/server_info", "/model_info", "/update_weight_version", "/server_info",
      "/continue_generation",
      "/model_info",
    ]  # fmt: skip
    assert list(report.phases) == [
      "prepare", "stage", "pause", "send", "verify", "flush", "version", "continue",
    ]  # fmt: skip
    assert report.phases["stage"].nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert fakes[0].answer()[0] == "run:1"
    assert str(report).startswith("push v1 committed by disk: 0 MB in ")
    assert 0 < report.idle_seconds < sum(p.seconds for p in report.phases.values())
    assert not os.path.exists(fakes[0].directories[0])  # staging is gone, W27

  published(tmp_path, test)


def test_no_proxy_sees_a_push(tmp_path, weights, monkeypatch):
  monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
  monkeypatch.delenv("no_proxy", raising=False)
  monkeypatch.delenv("NO_PROXY", raising=False)

  async def test(publisher, fakes):
    assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED

  published(tmp_path, test)


def test_a_tied_unembedding_is_sent_once(tmp_path):  # W21
  model = llama.bind(
    llama.Config(
      vocab_size=64, embed=8, ffw=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_position=64,
      tied=True,
    )
  )  # fmt: skip

  async def test(publisher, fakes):
    publisher.model = model
    assert (await publisher.publish(random_weights(model), 1)).state is State.COMMITTED
    assert "lm_head.weight" not in fakes[0].tensors
    assert "model.embed_tokens.weight" in fakes[0].tensors

  published(tmp_path, test)


def test_a_parameter_that_no_plan_makes_is_named_before_a_server_pauses(tmp_path, weights):  # W7
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    before = fakes[1].answer()
    late = {"model.layers.0.self_attn.qkv_proj.bias": np.ones(4, np.float32)}
    fakes[1].beside = late | {"model.layers.0.self_attn.attn.k_scale": np.ones(1, np.float32)}
    await fakes[1].restart()
    fakes[1].calls.clear()
    with pytest.raises(PushError, match=rf"{fakes[1].url} holds {next(iter(late))}, .*1 of 3 such"):
      await publisher.publish(at(weights, 2), 2)
    assert fakes[1].calls == ["/model_info", "/server_info", "/weights_checker"]
    assert fakes[0].answer() == before and list(tmp_path.iterdir()) == []
    fakes[0].beside = {k: v for k, v in fakes[1].beside.items() if k not in late}
    fakes[1].beside = fakes[0].beside
    await fakes[1].restart()  # as whoever repairs it does
    assert (await publisher.publish(at(weights, 2), 2)).state is State.COMMITTED

  published(tmp_path, test, servers=2)


def test_a_head_of_its_own_where_the_model_is_tied_is_found(tmp_path):  # W21
  model = llama.bind(dataclasses.replace(MODEL.config, tied=True))

  async def test(publisher, fakes):
    (fake,) = fakes
    publisher.model = model
    weights = random_weights(model)
    fake.beside = {"lm_head.weight": np.asarray(weights.embedding)}
    assert (await publisher.publish(weights, 1)).state is State.COMMITTED
    report = await publisher.publish(jax.tree.map(lambda w: 2 * w, weights), 2)
    assert report.state is State.FENCED
    assert "lm_head.weight is not sent and is not model.embed_tokens.weight" in report.message

  published(tmp_path, test)


def test_versions_increase_and_a_repeat_is_a_no_op(tmp_path, weights):  # W8, W33
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 5), 5)
    fakes[0].calls.clear()
    repeated = await publisher.publish(at(weights, 5), 5)
    assert repeated.state is State.COMMITTED
    assert DISK not in fakes[0].calls
    with pytest.raises(PushError, match="holds version 5, refusing to publish 4"):
      await publisher.publish(at(weights, 4), 4)
    restarted = sglang_publisher(
      MODEL, [fakes[0].url], transport=publisher.transport, run_id="run", deadline=DEADLINE
    )  # a trainer that came back from an older checkpoint
    with pytest.raises(PushError, match="holds version 5, refusing to publish 3"):
      await restarted.publish(at(weights, 3), 3)
    other = await restarted.publish(at(weights, 9), 5)  # the same version, other weights
    assert other.state is State.FENCED
    assert "failed verification: model.norm.weight of rank 0 differs" in other.message
    await restarted.close()
    foreign = sglang_publisher(
      MODEL, [fakes[0].url], transport=publisher.transport, run_id="other", deadline=DEADLINE
    )
    with pytest.raises(PushError, match="serves run 'run', this is 'other'"):
      await foreign.publish(at(weights, 6), 6)
    await foreign.close()

  published(tmp_path, test)


# route, faults in order -> end state of version 2 (None: refused before anything changed)
FAULTS = [
  ("/model_info", ["refuse"], None),
  ("/model_info", ["hang"], None),
  ("/server_info", ["drop"], None),
  ("/pause_generation", ["refuse"], State.ABORTED),
  ("/pause_generation", ["hang"], State.ABORTED),
  ("/pause_generation", ["lose"], State.ABORTED),
  (DISK, ["refuse"], State.FENCED),
  (DISK, ["drop"], State.FENCED),
  (DISK, ["hang"], State.FENCED),
  (DISK, ["lose"], State.COMMITTED),  # its checksums show that all of it arrived
  ("/weights_checker", ["refuse"], State.FENCED),
  ("/weights_checker", ["hang"], State.FENCED),
  ("/flush_cache", ["refuse"], State.FENCED),  # W31
  ("/flush_cache", ["hang"], State.FENCED),
  ("/update_weight_version", ["refuse"], State.FENCED),
  ("/update_weight_version", ["lose"], State.COMMITTED),  # asked, and it was set
  ("/continue_generation", ["refuse"], State.FENCED),
  ("/continue_generation", ["lose"], State.COMMITTED),
  ("/continue_generation", ["hang", "hang"], State.FENCED),
]


@pytest.mark.parametrize(("route", "faults", "state"), FAULTS, ids=lambda x: str(x))
def test_a_fault_in_each_phase(tmp_path, weights, route, faults, state):  # W9, W19, W31
  async def test(publisher, fakes):
    (fake,) = fakes
    await publisher.publish(at(weights, 1), 1)
    before = fake.answer()
    fake.faults[route] = list(faults)
    start = time.monotonic()
    if state is None:
      with pytest.raises(PushError, match=f"no server answers: {fake.url}{route}"):
        await publisher.publish(at(weights, 2), 2)
    else:
      report = await publisher.publish(at(weights, 2), 2)
      assert report.state is state
      assert report.receivers == {fake.url: state}
      assert state is State.COMMITTED or f"{fake.url}{route}" in report.message
    assert time.monotonic() - start < 4 * SHORT + 10  # nobody hangs past its deadlines
    if state is State.FENCED:
      if route != "/continue_generation":
        assert fake.version == "run:1"  # no version on doubtful weights or an old cache
      assert fake.paused  # it never answers
      with pytest.raises(PushError, match="recover"):
        await publisher.publish(at(weights, 3), 3)
      await publisher.recover()
    elif state is not State.COMMITTED:
      assert fake.answer() == before  # still serves version 1, unchanged
    assert (await publisher.publish(at(weights, 3), 3)).state is State.COMMITTED
    assert fake.answer()[0] == "run:3"
    assert list(tmp_path.iterdir()) == []

  published(tmp_path, test, deadline=SHORT if "hang" in faults else DEADLINE)


def test_silence_after_a_lost_answer_is_unknown_and_keeps_the_staging(tmp_path, weights):  # W27
  async def test(publisher, fakes):
    (fake,) = fakes
    await publisher.publish(at(weights, 1), 1)
    fake.faults = {DISK: ["hang"], "/weights_checker": ["hang", "hang"]}
    report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.UNKNOWN
    assert held(tmp_path) == ["run-2"]  # it may still be read
    with pytest.raises(PushError, match=r"not recovered: .*weights_checker did not answer within"):
      await publisher.recover()
    await publisher.recover()
    assert list(tmp_path.iterdir()) == []
    assert (await publisher.publish(at(weights, 2), 2)).state is State.COMMITTED

  published(tmp_path, test, deadline=SHORT)


def test_a_flipped_bit_is_found(tmp_path, weights):
  async def test(publisher, fakes):
    fakes[0].corrupt = True
    report = await publisher.publish(at(weights, 1), 1)
    assert report.state is State.FENCED
    assert "model.norm.weight of rank 0 differs (1 of 9 wrong)" in report.message
    assert fakes[0].version == "default"

  published(tmp_path, test)


def test_weights_that_are_not_finite_change_nothing(tmp_path, weights):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    before = fakes[0].answer()
    bad = weights.replace(final_norm=weights.final_norm.at[0].set(jnp.inf))
    report = await publisher.publish(bad, 2)
    assert report.state is State.ABORTED
    assert report.message == "stage: final_norm has a value that is not finite"
    assert fakes[0].answer() == before
    assert (await publisher.publish(at(weights, 2), 2)).state is State.COMMITTED

  published(tmp_path, test)


def test_a_full_disk_is_one_clear_line(tmp_path, weights, monkeypatch):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    before = fakes[0].answer()
    full = namedtuple("Statvfs", "f_bavail f_frsize")(0, 4096)
    with monkeypatch.context() as patch:
      patch.setattr(os, "statvfs", lambda _: full)
      report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.ABORTED
    assert report.message == f"stage: {tmp_path} has 0 MB free, the weights need 0 MB"
    assert list(tmp_path.iterdir()) == []
    assert fakes[0].answer() == before

  published(tmp_path, test)


def test_one_dead_replica_does_not_stop_the_others(tmp_path, weights):  # W20
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    await fakes[1].stop()
    report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.PARTIAL
    assert report.receivers == {
      fakes[0].url: State.COMMITTED, fakes[1].url: State.FENCED, fakes[2].url: State.COMMITTED,
    }  # fmt: skip
    with pytest.raises(PushError, match=f"not recovered: {fakes[1].url}"):
      await publisher.recover()
    await fakes[1].restart()
    await publisher.recover()
    report = await publisher.publish(at(weights, 2), 2)  # the others already hold it
    assert report.state is State.COMMITTED
    assert [f.directories[-1] == fakes[1].directories[-1] for f in fakes] == [True] * 3
    assert len({fake.answer() for fake in fakes}) == 1

  published(tmp_path, test, servers=3)


@pytest.mark.parametrize("label", ["other:claimed", "other:7"])
def test_a_server_that_another_run_took_meanwhile_is_left_as_it_is(tmp_path, weights, label):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    before, allocate = fakes[0].answer()[1], publisher.transport.allocate

    def late(plan, key):  # while the round is staged
      fakes[0].version = fakes[0].cached_by = label
      return allocate(plan, key)

    publisher.transport.allocate = late
    fakes[0].calls.clear()
    report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.ABORTED and not publisher.fenced
    assert "was taken by run 'other' while 'run' pushed to it: nothing of this" in report.message
    assert "/pause_generation" not in fakes[0].calls
    assert fakes[0].answer() == (label, before)

  published(tmp_path, test)


def test_a_server_that_another_run_took_during_the_writes_is_fenced(tmp_path, weights):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    send = publisher.transport.send

    async def late(staged, peer, ranks):
      await send(staged, peer, ranks)
      fakes[0].version = "other:claimed"

    publisher.transport.send = late
    report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.FENCED and publisher.fenced
    assert "was taken by run 'other' while 'run' pushed to it" in report.message
    assert (fakes[0].version, fakes[0].paused) == ("other:claimed", True)

  published(tmp_path, test)


@pytest.mark.parametrize("fault", ["lose", "refuse", "drop"])
@pytest.mark.parametrize("route", ["/model_info", "/server_info", "/pause_generation"])
def test_a_replica_that_missed_a_commit_is_fenced(tmp_path, weights, route, fault):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    fakes[0].faults[route] = [fault]
    report = await publisher.publish(at(weights, 2), 2)
    assert report.state is State.PARTIAL
    assert report.receivers[fakes[0].url] is State.FENCED
    assert fakes[0].paused  # it must not go on with version 1 beside version 2

  published(tmp_path, test, servers=2)


def test_an_interrupted_round_must_be_recovered_from(tmp_path, weights):
  async def test(publisher, fakes):
    await publisher.publish(at(weights, 1), 1)
    fakes[0].faults[DISK] = ["hang"]
    running = asyncio.create_task(publisher.publish(at(weights, 2), 2))
    while DISK not in fakes[0].calls[12:]:
      await asyncio.sleep(0.01)
    with pytest.raises(PushError, match="while another round runs"):
      await publisher.publish(at(weights, 2), 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
      await running
    with pytest.raises(PushError, match="run-2 was interrupted by CancelledError"):
      await publisher.publish(at(weights, 2), 2)
    await publisher.recover()
    assert (await publisher.publish(at(weights, 2), 2)).state is State.COMMITTED

  published(tmp_path, test)


def test_a_round_that_is_cancelled_while_it_stages_leaves_nothing(tmp_path, weights, monkeypatch):
  """Its thread goes on, and allocates only then."""
  begun, release = threading.Event(), threading.Event()

  async def test(publisher, fakes):
    allocate = publisher.transport.allocate

    def late(*arguments):
      begun.set()
      release.wait(20)
      return allocate(*arguments)

    monkeypatch.setattr(publisher.transport, "allocate", late)
    running = asyncio.create_task(publisher.publish(at(weights, 1), 1))
    await asyncio.to_thread(begun.wait, 20)
    running.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
      await running
    assert list(tmp_path.iterdir()) == []
    assert fakes[0].version == "default"
    await publisher.recover()
    assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED

  published(tmp_path, test)


def test_a_device_without_memory_changes_nothing(tmp_path, weights, monkeypatch):
  async def test(publisher, fakes):
    def full(*arguments):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(push, "stage", full)
    report = await publisher.publish(at(weights, 1), 1)
    assert (report.state, report.message) == (
      State.ABORTED, "stage: RESOURCE_EXHAUSTED: out of memory",
    )  # fmt: skip
    assert not fakes[0].paused and list(tmp_path.iterdir()) == []

  published(tmp_path, test)


def test_a_round_that_breaks_ends_before_it_says_so(tmp_path, weights, monkeypatch):
  """Of two servers one meets an error that nothing foresees: the other is not written to later."""

  async def test(publisher, fakes):
    send, ended = publisher.transport.send, []

    async def breaking(staged, peer, ranks):
      if peer.url == fakes[0].url:
        raise RuntimeError("a bug")
      await asyncio.sleep(0.1)
      await send(staged, peer, ranks)
      ended.append(peer.url)

    def slowly(*arguments, **options):
      time.sleep(0.5)
      ended.append("checksums")
      return expected_checksums(*arguments, **options)

    monkeypatch.setattr(publisher.transport, "send", breaking)
    monkeypatch.setattr(push, "expected_checksums", slowly)
    with pytest.raises(RuntimeError, match="a bug"):
      await publisher.publish(at(weights, 1), 1)
    assert ended == [fakes[1].url, "checksums"]  # both are with us
    monkeypatch.undo()
    await publisher.recover()
    assert (await publisher.publish(at(weights, 1), 1)).state is State.COMMITTED

  published(tmp_path, test, servers=2)


def test_fifty_rounds_with_random_faults(tmp_path, weights):  # W28
  rng = random.Random(0)
  routes = [
    "/model_info", "/pause_generation", DISK, "/weights_checker", "/flush_cache",
    "/update_weight_version", "/continue_generation",
  ]  # fmt: skip

  async def test(publisher, fakes):
    await publisher.publish(at(weights, 0), 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    survived = 0
    for version in range(1, 51):
      hurt = rng.choice(fakes)
      hurt.faults[rng.choice(routes)] = [rng.choice(["refuse", "drop", "lose"])]
      try:
        report = await publisher.publish(at(weights, version), version)
      except PushError:
        report = None
      for fake in fakes:
        fake.faults.clear()
      if publisher.blocked:
        await publisher.recover()
      if report is None or report.state is not State.COMMITTED:
        assert (await publisher.publish(at(weights, version), version)).state is State.COMMITTED
        survived += 1
      answers = {fake.answer() for fake in fakes}
      assert len(answers) == 1
      assert answers.pop()[0] == f"run:{version}"
    assert survived > 20
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # idle connections only

  published(tmp_path, test, servers=2)


@pytest.mark.parametrize("run_id", ["", "a:b", "a/b", "../x"])
def test_run_ids_that_could_not_be_stamped_are_refused(run_id):
  with pytest.raises(ValueError, match="run_id is"):
    sglang_publisher(MODEL, ["http://a"], transport=DiskTransport(), run_id=run_id)
