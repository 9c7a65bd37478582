"""The engine with a family whose rows are of use only whole: log-probs are the learner's, whatever
rows are copied, continued or begun anew.
"""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import hybrid_decoder, qwen3_5
from agentrl_jax.rollout.engine import SamplingParams
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.sampler.residency import Residency
from agentrl_jax.sampler.schedule import Buckets
from tests.models.test_deepseek_v4 import V4
from tests.models.test_dense import random_weights

CONTEXT = 64
HYBRID = qwen3_5.bind(
  hybrid_decoder.Config(
    vocab_size=29,
    embed=16,
    ffw=24,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    max_position=64,
    linear=(True, False),
    key_heads=2,
    value_heads=4,
    key_dim=4,
    value_dim=6,
    taps=4,
    rotary_dim=4,
    tied=True,
  )
)


def check(model, weights, streams):
  """Of each (prompt, generation): its log-probs are those of the model's forward pass."""

  @jax.jit
  def evaluate(tokens):
    position = jnp.arange(CONTEXT, dtype=jnp.int32)[None]
    hidden = model.forward(weights, tokens, jnp.zeros_like(tokens), position)
    return jax.nn.log_softmax(hidden[0] @ model.unembedding(weights), axis=-1)

  for prompt, generation in streams:
    stream = np.zeros((1, CONTEXT), np.int32)
    ids = [*prompt, *generation.ids.tolist()]
    stream[0, : len(ids)] = ids
    logp = np.asarray(evaluate(stream))
    expected = [logp[i - 1, ids[i]] for i in range(len(prompt), len(ids))]
    np.testing.assert_allclose(generation.logp, expected, atol=1e-5)


@pytest.mark.parametrize(
  "model",
  [
    pytest.param(HYBRID, id="qwen3_5"),
    pytest.param(V4, id="deepseek_v4", marks=pytest.mark.slow),
  ],
)
def test_rows_are_copied_and_continued_at_their_ends_only(model):
  weights = random_weights(model, 0)
  buckets = Buckets(rows=(4,), chunk=(16,), length=(CONTEXT,))
  engine = EmbeddedEngine(
    model, weights, slots=4, context=CONTEXT, seed=1, buckets=buckets, max_steps=4
  )
  rng = np.random.default_rng(1)
  first = rng.integers(0, 29, 24).tolist()
  other = [*first[:20], 3, 4, 5]  # shares what no row holds by itself
  prompts = [first, first, other, first, [7], first]

  async def run():
    async def one(name, prompt, seed):
      params = SamplingParams(9, (), 1.0, seed)
      return await engine.generate(name, prompt, params)

    made = await asyncio.gather(*(one(f"r{i}", p, i) for i, p in enumerate(prompts)))
    # Two wait for the first's chunk of 16 and go on from there; the other one has nothing to wait
    # for, and the last finds no row that ends where it could go on.
    reused, prefilled = engine.counters["reused_tokens"], engine.counters["prefilled_tokens"]
    assert (reused, prefilled) == (2 * 16, 23 + 2 * 7 + 22 + 23)
    turn = [*first, *made[3].ids.tolist(), 1, 2]
    return made, turn, await one("turn", turn, 11)

  made, turn, following = asyncio.run(run())
  check(model, weights, zip([*prompts, turn], [*made, following], strict=True))
  assert engine.counters["reused_tokens"] == 2 * 16 + 32
  assert engine.counters["prefilled_tokens"] == 82 + 2


def test_a_row_matches_whole_or_not_at_all():
  residency = Residency(3, 8, whole=True)
  residency.append(0, np.array([1, 2, 3]))
  residency.append(1, np.array([1, 2]))
  assert residency.matches(np.array([1, 2, 3, 4])).tolist() == [3, 2, 0]
  assert residency.matches(np.array([1, 2])).tolist() == [0, 2, 0]
