"""Weights, products and cache in FP8 in the embedded engine, against the model in float32."""

import asyncio
import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import attention, llama, precision
from agentrl_jax.models.precision import Fp8
from agentrl_jax.ops.quantize import OCP
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.sampler.placement import SamplerFp8, own_copy
from configs import tiny_rl, use_fp8_products, use_fp8_sampler, use_sglang
from tests.reference import quantize as reference
from tests.sampler.test_engine import (
  CONFIG,
  FEW_SHOT,
  MODEL,
  _engine,
  _gather,
  _generate,
  _params,
  _weights,
)


def test_cached_keys_and_values_have_a_scale_a_position_and_head():
  rng = np.random.default_rng(0)
  keys, values = (rng.normal(size=(2, 3, 2, 8)) * 10.0 ** rng.integers(-3, 3, (2, 3, 2, 1))
                  for _ in range(2))  # fmt: skip
  values[0, 1, 0] = 0.0
  keys[1, 0, 1, 3] = np.inf
  empty = attention.empty_cache((2, 2, 8, 4), (2, 2, 4, 8), jnp.float8_e4m3fn)
  position = jnp.asarray([[0, 1, -1], [2, 0, 1]])
  kept = attention.write_keys(empty[0], jnp.asarray(keys, jnp.bfloat16), position)
  other = attention.write_values(empty[1], jnp.asarray(values, jnp.bfloat16), position)
  table = reference.TABLES["float8_e4m3fn"]
  largest = float(jnp.finfo(jnp.bfloat16).max)
  for row, place, head in np.ndindex(2, 3, 2):
    index = int(position[row, place])
    if index < 0:
      continue
    for given, cache, slot in (
      (keys, kept, (row, head, slice(None), index)),
      (values, other, (row, head, index)),
    ):
      exact = np.asarray(jnp.asarray(given[row, place, head], jnp.bfloat16), np.float32)
      exact = np.clip(exact, -largest, largest)[None]
      coded, scale = reference.quantize(exact, "float8_e4m3fn", (1, 8), "float32", 448.0)
      np.testing.assert_array_equal(np.asarray(cache.values[slot]).view(np.uint8), coded[0])
      assert cache.scale[row, head, index] == scale[0, 0]
  assert np.isfinite(np.asarray(kept.values, np.float32)).all()
  assert (np.asarray(kept.values, np.float32)[0, :, :, 2:] == 0).all()  # nothing written
  assert np.isfinite(table[coded]).all()


@pytest.mark.parametrize(
  "fp8",
  [
    SamplerFp8(weights=True, cache=True),
    pytest.param(SamplerFp8(products=Fp8(), cache=True), marks=pytest.mark.slow),
  ],
)
def test_an_engine_in_fp8_samples_from_nearly_the_same_policy(fp8):
  """Log-probs of what they sampled, by the float32 model: off by rounding, and no more."""
  weights = _weights()
  exact = _score(weights)
  plain = _generate(_engine(weights), FEW_SHOT, _params(seed=3))
  assert np.abs(exact(plain.ids) - plain.logp).max() < 1e-5
  made = _generate(engine := _engine(weights, fp8=fp8), FEW_SHOT, _params(seed=3))
  error = np.abs(exact(made.ids) - made.logp)
  assert 1e-4 < error.max() < 0.8 and error.mean() < 0.3
  asyncio.run(engine.load(_weights(1), 1))
  again = _generate(engine, FEW_SHOT, _params(seed=3))
  assert set(again.version) == {1}


def test_reuse_copies_and_loads_of_long_streams_give_what_a_new_engine_does():
  """Cached in FP8, several chunks long: one stream continued, then four copies of it, and the last
  goes on with other weights. A sum in another order may move a cached number to its neighbour.
  """
  model = llama.bind(dataclasses.replace(CONFIG, max_position=1024))
  options = {"slots": 4, "context": 1024, "seed": 1, "prefill_tokens": 256}

  def engine(weights):
    return EmbeddedEngine(model, weights, **options, fp8=SamplerFp8(cache=True))

  weights, prompt = _weights(), np.random.default_rng(0).integers(0, 97, 600).tolist()
  used = engine(weights)
  prompt += _generate(used, prompt, _params(new=64)).ids.tolist()
  made = _gather(used, [prompt] * 4, [_params(seed=i, new=64) for i in range(4)])
  assert used.counters["reused_tokens"] > 4 * 600
  for seed in (0, 3):
    _assert_near(made[seed], _generate(engine(weights), prompt, _params(seed=seed, new=64)))

  async def load_in_the_middle():
    call = asyncio.ensure_future(used.generate("last", prompt, _params(seed=5, new=100)))
    while used.counters["sampled_tokens"] < before + 40:
      await asyncio.sleep(0)
    await used.load(_weights(1), 1)
    return await call

  before = used.counters["sampled_tokens"]
  last = asyncio.run(load_in_the_middle())
  first = int((last.version == 0).sum())
  assert 40 <= first < 100
  rest = [*prompt, *last.ids[:first].tolist()]
  fresh = _generate(engine(_weights(1)), rest, _params(seed=5, new=100 - first))
  _assert_near(last, fresh, first)


def _assert_near(made, expected, first=0):
  np.testing.assert_array_equal(made.ids[first:], expected.ids)
  np.testing.assert_allclose(made.logp[first:], expected.logp, atol=2e-3)


def _score(weights):
  def score(ids):
    stream = jnp.asarray([[*FEW_SHOT, *(int(i) for i in ids)]], jnp.int32)
    position = jnp.arange(stream.shape[1])[None]
    hidden = MODEL.forward(weights, stream, jnp.zeros_like(stream), position)
    logp = jax.nn.log_softmax(hidden[0, :-1] @ MODEL.unembedding(weights))
    return np.asarray(logp)[np.arange(stream.shape[1] - 1), np.asarray(stream)[0, 1:]][
      len(FEW_SHOT) - 1 :
    ]

  return score


def test_the_sampler_holds_what_a_push_would_send():
  weights = _weights()
  held = own_copy(weights, jnp.dtype(jnp.bfloat16), SamplerFp8(weights=True))
  own = held.layers[1].mlp.down
  exact = np.asarray(weights.layers.mlp.down[1].astype(jnp.bfloat16), np.float32)
  coded, scales = reference.quantize(exact, *OCP)
  np.testing.assert_array_equal(np.asarray(own.values).view(np.uint8), coded)
  np.testing.assert_array_equal(own.scales, scales)
  assert isinstance(held.layers[0].attention.query, precision.Stored)
  assert held.embedding.dtype == jnp.bfloat16


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match=r"products.history is 4, expected 0"):
    SamplerFp8(products=Fp8(blocks=False, history=4))
  config = tiny_rl()
  with pytest.raises(ValueError, match="whose fp8 is None: expected that of use_fp8_products"):
    use_fp8_sampler(config, products=True)
  with pytest.raises(ValueError, match="no scaling 'rows'; there are blocks, tensor, delayed"):
    use_fp8_products(config, scaling="rows")
  with pytest.raises(ValueError, match="weights, cache and products are False, expected one"):
    use_fp8_sampler(config, weights=False, cache=False)
  use_fp8_products(config)
  use_fp8_sampler(config, products=True)
  assert fdl.build(config.engine.fp8) == SamplerFp8(weights=True, cache=True, products=Fp8())
  config = tiny_rl()
  use_sglang(config)
  with pytest.raises(ValueError, match="this FP8 is of the embedded sampler, the engine is"):
    use_fp8_sampler(config)
