"""Adapter pushes: every version has its own adapter, requests name it, and nothing is in doubt."""

import asyncio
import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import lora
from agentrl_jax.models.lora import Lora
from agentrl_jax.transfer.adapters import adapter_publisher, pack, server_flags
from agentrl_jax.transfer.report import PushError, State
from tests.transfer.fake_server import FakeServer
from tests.transfer.test_push import MODEL

HOW = Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "down_proj"))
LOAD, UNLOAD, GENERATE = "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/generate"
NAMES = [
  f"base_model.model.model.layers.0.{module}.lora_{part}.weight"
  for module in ("mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj")
  for part in "AB"
]


def drawn(seed):
  """Adapters from numpy, which compiles nothing."""
  rng = np.random.default_rng(seed)
  specs, tree = jax.tree.flatten(lora.abstract(MODEL, HOW), is_leaf=lambda n: hasattr(n, "axes"))
  return tree.unflatten([jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in specs])


class Client:
  """Who sends requests: `running` holds how many name each adapter."""

  def __init__(self):
    self.named, self.running = [], collections.Counter()

  def use_adapter(self, name, version):
    self.named.append((name, version))

  async def adapter_ended(self, name):
    while self.running[name] or self.named[-1][0] == name:
      await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def rig(servers=1, deadline=30.0, run_id="run"):
  client = Client()
  async with contextlib.AsyncExitStack() as stack:
    fakes = [await stack.enter_async_context(FakeServer()) for _ in range(servers)]
    publisher = adapter_publisher(
      MODEL, HOW, [f.url for f in fakes], requests=client, run_id=run_id, deadline=deadline
    )
    stack.push_async_callback(publisher.close)
    yield publisher, client, fakes


def published(test, **options):
  async def main():
    async with rig(**options) as (publisher, client, fakes):
      await test(publisher, client, fakes)

  asyncio.run(main())


def test_a_server_is_given_the_adapter_and_requests_its_name():
  async def test(publisher, client, fakes):
    adapters = drawn(1)
    report = await publisher.publish(adapters, 1)
    assert report.state is State.COMMITTED, str(report)
    assert client.named == [("run:1", 1)]
    held = fakes[0].adapters["run:1"]
    assert sorted(held) == sorted(NAMES)
    query = adapters["layers.attention.query"]
    np.testing.assert_array_equal(held[NAMES[2]], np.asarray(query.a[0]).T)
    np.testing.assert_array_equal(held[NAMES[3]], np.asarray(query.b[0]).T)
    assert report.phases["send"].nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(adapters))
    assert list(report.phases) == ["prepare", "stage", "send", "verify", "commit"]
    assert report.idle_seconds == 0.0
    assert not {"/pause_generation", "/flush_cache"} & set(fakes[0].calls)
    assert str(report).startswith("push v1 committed by adapter: 0 MB in ")
    fakes[0].calls.clear()
    assert (await publisher.publish(adapters, 1)).state is State.COMMITTED  # again: a no-op
    assert LOAD not in fakes[0].calls
    with pytest.raises(PushError, match="version 1 was committed with other adapters"):
      await publisher.publish(drawn(2), 1)

  published(test)


def test_the_old_adapter_goes_after_its_last_request():
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    client.running["run:1"] = 2
    fakes[0].answering = ["run:1", "run:1"]
    for version in (2, 3):  # a load does not wait for it
      assert (await publisher.publish(drawn(version), version)).state is State.COMMITTED
    await asyncio.sleep(0.05)
    assert sorted(fakes[0].adapters) == ["run:1", "run:3"]
    client.running["run:1"], fakes[0].answering = 0, []
    await publisher.retired()
    assert list(fakes[0].adapters) == ["run:3"]
    assert [version for _, version in client.named] == [1, 2, 3]

  published(test)


def test_an_unload_that_fails_is_made_up_for():
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    fakes[0].faults[UNLOAD] = ["drop"]
    await publisher.publish(drawn(2), 2)
    await publisher.retired()
    assert sorted(fakes[0].adapters) == ["run:1", "run:2"]
    await publisher.publish(drawn(3), 3)
    await publisher.retired()
    assert list(fakes[0].adapters) == ["run:3"]

  published(test)


def test_what_must_not_start():  # W8, W33
  async def test(publisher, client, fakes):
    (fake,) = fakes
    await publisher.publish(drawn(5), 5)
    with pytest.raises(PushError, match="holds version 5, refusing to publish 4"):
      await publisher.publish(drawn(4), 4)
    fake.takes_adapters = False
    with pytest.raises(PushError, match=f"{fake.url} serves no adapters: start it with --enable-l"):
      await publisher.publish(drawn(6), 6)
    fake.takes_adapters = True
    fake.adapters = {"other:1": {}, "by hand": {}}
    with pytest.raises(PushError, match="serves run 'other', this is 'run'"):
      await publisher.publish(drawn(6), 6)
    del fake.adapters["other:1"]
    assert (await publisher.publish(drawn(6), 6)).state is State.COMMITTED
    await publisher.retired()
    assert sorted(fake.adapters) == ["by hand", "run:6"]  # which is not ours to unload
    await fake.stop()
    with pytest.raises(PushError, match=f"no server answers: {fake.url}"):
      await publisher.publish(drawn(7), 7)
    assert client.named[-1] == ("run:6", 6)

  published(test)


def test_a_server_that_does_not_apply_adapters_is_found_at_once():  # W22
  async def test(publisher, client, fakes):
    fakes[0].applies_adapters = False
    with pytest.raises(
      PushError, match=r"no log-prob changed by more than 0 nats, .* does not app"
    ):
      await publisher.publish(drawn(1), 1)
    assert client.named == []
    fakes[0].applies_adapters = True
    assert (await publisher.publish(drawn(1), 1)).state is State.COMMITTED
    await publisher.retired()
    assert list(fakes[0].adapters) == ["run:1"]  # nothing of the trial

  published(test)


def test_a_value_that_is_not_finite_is_not_sent():
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    bad = drawn(2)
    query = bad["layers.attention.query"]
    bad["layers.attention.query"] = query.replace(b=query.b.at[0, 0, 0].set(jnp.float32("nan")))
    fakes[0].calls.clear()
    report = await publisher.publish(bad, 2)
    assert report.state is State.ABORTED
    assert "self_attn.q_proj.lora_B.weight has a value that is not finite" in report.message
    assert LOAD not in fakes[0].calls
    assert client.named == [("run:1", 1)]
    assert (await publisher.publish(drawn(2), 2)).state is State.COMMITTED

  with jax.debug_nans(False):
    published(test)


FAULTS = {
  (LOAD, "refuse"): State.ABORTED,
  (LOAD, "drop"): State.ABORTED,
  (LOAD, "lose"): State.COMMITTED,  # it is listed: the answer alone was lost
  (LOAD, "restart"): State.ABORTED,
  (LOAD, "hang"): State.ABORTED,
  ("/server_info", "drop"): None,
  ("/v1/models", "refuse"): None,
  (GENERATE, "refuse"): State.ABORTED,
  (GENERATE, "lose"): State.ABORTED,
}


@pytest.mark.parametrize(("route", "fault"), FAULTS, ids=str)
def test_a_fault_leaves_requests_with_the_old_adapter(route, fault):  # W9
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    fakes[0].faults[route] = [fault]
    want = FAULTS[route, fault]
    if want is None:
      with pytest.raises(PushError, match=f"no server answers: .*{route}"):
        await publisher.publish(drawn(2), 2)
    else:
      report = await publisher.publish(drawn(2), 2)
      assert report.state is want, str(report)
      assert want is State.COMMITTED or f"{fakes[0].url}{route}" in report.message
    assert client.named[-1] == (("run:2", 2) if want is State.COMMITTED else ("run:1", 1))
    assert fault == "restart" or client.named[-1][0] in fakes[0].adapters
    other = drawn(3)  # a version that failed may come with other weights
    if want is not State.COMMITTED:
      assert (await publisher.publish(other, 2)).state is State.COMMITTED
      held = fakes[0].adapters["run:2"][NAMES[3]]
      np.testing.assert_array_equal(held, np.asarray(other["layers.attention.query"].b[0]).T)
    await publisher.retired()
    assert list(fakes[0].adapters) == ["run:2"]

  published(test, deadline=2.0 if fault == "hang" else 30.0)


def test_a_load_without_an_answer_is_unknown_until_the_server_answers():
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    calls, real = [], publisher._servers[0].control.adapters

    async def silent_after_the_load():
      calls.append(1)
      if len(calls) == 2:
        fakes[0].faults["/v1/models"] = ["drop"]
      return await real()

    publisher._servers[0].control.adapters = silent_after_the_load
    fakes[0].faults[LOAD] = ["lose"]
    report = await publisher.publish(drawn(2), 2)
    assert report.state is State.UNKNOWN
    assert client.named == [("run:1", 1)]
    with pytest.raises(PushError, match="an earlier round ended badly"):
      await publisher.publish(drawn(2), 2)
    await publisher.recover()
    assert (await publisher.publish(drawn(2), 2)).state is State.COMMITTED

  published(test)


def test_a_dead_replica_does_not_stop_the_other():  # W20
  async def test(publisher, client, fakes):
    assert (await publisher.publish(drawn(1), 1)).state is State.COMMITTED
    fakes[1].faults[LOAD] = ["refuse"]
    report = await publisher.publish(drawn(2), 2)
    assert report.state is State.PARTIAL
    assert report.receivers == {fakes[0].url: State.COMMITTED, fakes[1].url: State.FENCED}
    assert "run:2" not in fakes[1].adapters  # it refuses the requests that name it
    await publisher.recover()
    fakes[0].calls.clear()
    assert (await publisher.publish(drawn(2), 2)).state is State.COMMITTED
    assert LOAD not in fakes[0].calls  # only who was behind
    await publisher.retired()
    assert [list(fake.adapters) for fake in fakes] == [["run:2"], ["run:2"]]
    await fakes[1].restart()
    assert (await publisher.publish(drawn(2), 2)).state is State.COMMITTED  # it had lost them
    assert [list(fake.adapters) for fake in fakes] == [["run:2"], ["run:2"]]

  published(test, servers=2)


def test_a_trainer_that_came_back_replaces_what_it_cannot_prove():
  async def test(publisher, client, fakes):
    await publisher.publish(drawn(1), 1)
    again, other = Client(), drawn(9)
    second = adapter_publisher(MODEL, HOW, [fakes[0].url], requests=again, run_id="run")
    assert (await second.publish(other, 1)).state is State.COMMITTED
    held = fakes[0].adapters["run:1"][NAMES[3]]
    np.testing.assert_array_equal(held, np.asarray(other["layers.attention.query"].b[0]).T)
    await second.close()

  published(test)


def test_flags_and_bodies_say_what_the_adapter_is():
  assert server_flags(HOW, cuda=True)[-6:] == (
    "--max-lora-rank", "2", "--lora-target-modules", "down_proj", "q_proj", "v_proj",
  )  # fmt: skip
  packed, same, other = (
    pack(MODEL, drawn(1), HOW),
    pack(MODEL, drawn(1), HOW),
    pack(MODEL, drawn(2), HOW),
  )
  assert packed == same
  assert packed.fingerprint != other.fingerprint
  assert packed.body["config_dict"]["lora_alpha"] == 4.0
  with pytest.raises(ValueError, match="SGLang fuses q_proj, k_proj and v_proj"):
    server_flags(Lora(targets=("q_proj",)), cuda=True)
  with pytest.raises(ValueError, match="SGLang fuses gate_proj and up_proj"):
    server_flags(Lora(targets=("o_proj", "up_proj")), cuda=True)
  assert server_flags(Lora(targets=("gate_proj",)), cuda=True)[-1] == "gate_proj"
  with pytest.raises(ValueError, match="run_id is 'a:b'"):
    adapter_publisher(MODEL, HOW, ["http://x"], requests=Client(), run_id="a:b")
  with pytest.raises(ValueError, match="expected one or more different ones"):
    adapter_publisher(MODEL, HOW, [], requests=Client(), run_id="a")
