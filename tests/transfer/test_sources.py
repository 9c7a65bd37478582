"""What the first process hears of the others and tells them, without any: their words are put into
a store.
"""

import asyncio
import threading
import types

import jax
import pytest
from jax._src import distributed

from agentrl_jax.transfer import push
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.sources import Sources
from agentrl_jax.transfer.stage import stage
from agentrl_jax.transfer.transports.tcp import Joining
from tests.reference.transfer import random_weights
from tests.transfer.test_push import MODEL, rig
from tests.transfer.test_tcp import local


class Store(dict):
  """The calls of `jax.distributed`'s key-value store that a round makes; nothing comes later."""

  key_value_set_bytes = dict.__setitem__

  def blocking_key_value_get_bytes(self, key, milliseconds):
    if key not in self:
      raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} in {milliseconds} ms")
    return self[key]


@pytest.fixture
def store(monkeypatch):
  jax.devices()  # made before: it would ask the store for other things
  store = Store()
  monkeypatch.setattr(distributed, "global_state", types.SimpleNamespace(client=store))
  return store


def test_an_answer_is_to_the_question_that_was_asked(store):
  """One process is late with the first receiver: what the other said to it is not taken as its
  answer about the second.
  """
  sources = Sources("weights", seconds=3.0)
  sources.count = 3
  sources._open_round()
  joining = Joining("first", "host:1", 3.0, 1, 7, "token", 1)
  store["weights/1/2/0"] = b"="
  with pytest.raises(CallError, match="first: process 1 gave no word within 3 s"):
    sources._have_join(joining)
  store["weights/1/1/0"] = b"="  # late
  store["weights/1/1/1"] = b"="
  store["weights/1/2/1"] = b"=no room there"
  with pytest.raises(CallError, match="second, from another process: no room there"):
    sources._have_join(joining._replace(where="second"))


class Together:
  """The other processes: they have no weights, and take their time until `go`."""

  def __init__(self):
    self.told, self.threads = [], []
    self.staged, self.go = threading.Event(), threading.Event()

  def stage(self, task, plan, weights, transport):
    made = stage(plan, weights, transport.allocate(plan, task.key), task.key)
    self.staged.set()
    assert self.go.wait(20)
    return made._replace(join=self.join)

  def join(self, joining):
    self.told.append(joining and joining.address)
    self.threads.append(threading.current_thread())


def test_others_are_told_that_a_round_was_cancelled_while_it_staged(tmp_path, monkeypatch):
  """They wait for what is to be delivered; without a word they would for hours."""
  monkeypatch.setattr(push, "_all_here", lambda weights: False)
  others, weights = Together(), random_weights(MODEL)

  async def main():
    transport = local(tmp_path / "received")
    async with rig(tmp_path, 1, 20.0, transport, others) as (publisher, (fake,)):
      running = asyncio.create_task(publisher.publish(weights, 1))
      await asyncio.to_thread(others.staged.wait, 20)
      running.cancel()
      others.go.set()
      with pytest.raises(asyncio.CancelledError):
        await running
      assert others.told == [None] and fake.calls.count("/pause_generation") == 0
      await publisher.recover()
      assert (await publisher.publish(weights, 1)).state is State.COMMITTED
      assert others.told == [None, transport.receivers.address, None]
      assert threading.main_thread() not in others.threads[1:]  # they may have work to end first

  asyncio.run(main())
