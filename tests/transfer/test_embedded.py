"""The embedded sampler as a receiver of the same rounds."""

import asyncio

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.models import llama
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.transfer.embedded import embedded_publisher
from agentrl_jax.transfer.report import PushError, State
from tests.reference.transfer import random_weights

MODEL = llama.bind(
  llama.Config(
    vocab_size=64, embed=8, ffw=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_position=64
  )
)


def test_a_push_is_served_and_survives_donation():
  weights = random_weights(MODEL)

  async def main():
    engine = EmbeddedEngine(MODEL, weights, slots=1, context=16, seed=0)
    publisher = embedded_publisher(engine)
    new = jax.tree.map(lambda w: w + jnp.float32(1), weights)
    report = await publisher.publish(new, 3)
    assert report.state is State.COMMITTED
    assert await engine.version() == 3
    assert report.phases["send"].nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    expected = weights.final_norm + jnp.float32(1)
    for leaf in jax.tree.leaves(new):  # as the learner's next step does
      leaf.delete()
    assert (engine._weights.final_norm == expected).all()
    assert (await publisher.publish(new, 3)).state is State.COMMITTED  # a repeat: a no-op
    with pytest.raises(PushError, match="holds version 3, refusing to publish 2"):
      await publisher.publish(weights, 2)
    await engine.close()

  asyncio.run(main())


class Slow:
  """An engine whose load does not end in time."""

  name = "slow"

  def __init__(self):
    self.served = 0

  async def version(self):
    return self.served

  async def load(self, weights, version):
    await asyncio.sleep(0.3)
    self.served = version


def test_a_load_past_the_deadline_is_unknown_until_recovered():
  async def main():
    engine = Slow()
    publisher = embedded_publisher(engine, deadline=0.05)
    report = await publisher.publish({}, 1)
    assert report.state is State.UNKNOWN
    assert "slow did not answer within 0.05 s, waited for load of version 1" in report.message
    with pytest.raises(PushError, match="recover"):
      await publisher.publish({}, 1)
    await publisher.recover()
    patient = embedded_publisher(engine, deadline=5)
    assert (await patient.publish({}, 1)).state is State.COMMITTED

  asyncio.run(main())
