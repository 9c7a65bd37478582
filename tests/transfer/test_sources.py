"""What the first process hears of the others, without any: their words are put into a store."""

import types

import jax
import pytest
from jax._src import distributed

from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.sources import Sources
from agentrl_jax.transfer.transports.tcp import Joining


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
