"""Senders of broadcasts: who is silent or gone is named, and no process or file stays behind."""

import asyncio
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.stage import source_layout
from agentrl_jax.transfer.transports.broadcast import BroadcastTransport
from tests.reference.transfer import random_weights
from tests.sglang_fixture import REFERENCE
from tests.transfer.test_push import MODEL, rig

SOCKET_SENDER = [sys.executable, str(REFERENCE / "socket_sender.py")]


def at(weights, version):
  return jax.tree.map(lambda w: w + jnp.float32(version), weights)


def test_a_group_is_made_once_and_anew_after_a_restart(tmp_path):
  weights = random_weights(MODEL)

  async def main():
    transport = BroadcastTransport(SOCKET_SENDER, root=tmp_path, bucket_bytes=1 << 10)
    async with rig(tmp_path, 2, 30.0, transport=transport) as (publisher, fakes):
      for version in (1, 2):
        report = await publisher.publish(at(weights, version), version)
        assert report.state is State.COMMITTED, str(report)
        assert list(report.phases)[2] == "deliver"
      joins = [fake.calls.count("/init_weights_update_group") for fake in fakes]
      assert joins == [1, 1]
      await fakes[0].restart()
      report = await publisher.publish(at(weights, 3), 3)
      assert report.state is State.COMMITTED, str(report)
      joins = [fake.calls.count("/init_weights_update_group") for fake in fakes]
      assert joins == [2, 1]
      assert len({fake.answer() for fake in fakes}) == 1
      senders = [sender._process for sender in transport._senders.values()]
    assert all(process.poll() is not None for process in senders)
    assert list(tmp_path.iterdir()) == []

  asyncio.run(main())


@pytest.mark.parametrize(
  ("program", "message"),
  [
    ("raise SystemExit('no torch here')", "the sender: it ended: no torch here"),
    ("import time; time.sleep(60)", "the sender said nothing for 1 s"),
    ('print(\'{"error": "no port"}\')', "the sender: no port"),
  ],
)
def test_a_sender_that_does_not_start_changes_nothing(tmp_path, program, message):
  weights = random_weights(MODEL)

  async def main():
    transport = BroadcastTransport([sys.executable, "-c", program], root=tmp_path)
    deadline = 1.0 if "nothing" in message else 30.0
    async with rig(tmp_path, 1, deadline, transport=transport) as (publisher, (fake,)):
      start = time.monotonic()
      report = await publisher.publish(weights, 1)
      assert time.monotonic() - start < 20
      assert report.state is State.ABORTED
      assert f"{fake.url}: {message}" in report.message
      assert not fake.paused
      assert transport._senders == {}

  asyncio.run(main())


def test_what_a_server_could_not_view_is_refused_by_name(tmp_path):
  weights = {"a": jnp.zeros((3,), jnp.bfloat16), "b": jnp.zeros((2,), jnp.float32)}
  rules = [assembly(name, f"['{name}']", array.shape) for name, array in weights.items()]
  target = [
    tensor._replace(dtype=dtype)
    for tensor, dtype in zip(whole(rules, "float32"), ("bfloat16", "float32"), strict=True)
  ]
  made = plan(source_layout(weights), target, rules, bucket_bytes=64, align=1, split=False)
  with pytest.raises(ValueError, match="b of float32 would start at byte 6 of its broadcast"):
    BroadcastTransport([], root=tmp_path).allocate(made, "run-1")
