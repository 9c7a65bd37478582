"""The embedded engine against the model it serves: values, reuse, versions, determinism, errors."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import llama
from agentrl_jax.models.model import is_spec
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.ops.logprobs import token_logprobs
from agentrl_jax.rollout.engine import EngineError, SamplingParams
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.sampler.placement import own_copy
from agentrl_jax.sampler.programs import make_programs
from agentrl_jax.sampler.schedule import Buckets

VOCAB, SLOTS, CONTEXT = 97, 8, 64
CONFIG = llama.Config(
  vocab_size=VOCAB,
  embed=32,
  ffw=64,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  max_position=128,
  tied=True,
)
MODEL = llama.bind(CONFIG)
BUCKETS = Buckets(rows=(2, SLOTS), chunk=(32,), length=(32, CONTEXT))
FEW_SHOT = list(range(20, 40))


def _weights(seed=0):
  """Random weights, the embedding wide enough that distributions are far from uniform."""
  rng = np.random.default_rng(seed)

  def draw(spec):
    scale = 0.4 if spec.axes[0] == "vocab" else spec.shape[-2] ** -0.5 if len(spec.shape) > 2 else 0
    noise = rng.standard_normal(spec.shape) if scale else np.ones(spec.shape)
    return jnp.asarray((scale or 1) * noise, jnp.float32)

  return jax.tree.map(draw, MODEL.abstract(), is_leaf=is_spec)


@pytest.fixture(scope="module")
def weights():
  return _weights()


def _engine(weights, **options):
  defaults = {"slots": SLOTS, "context": CONTEXT, "seed": 1, "buckets": BUCKETS, "max_steps": 4}
  return EmbeddedEngine(MODEL, weights, **(defaults | options))


def _params(seed=0, new=12, stop=(), temperature=1.0):
  return SamplingParams(new, tuple(stop), temperature, seed)


def _gather(engine, prompts, params, prefix="r"):
  async def main():
    calls = [
      engine.generate(f"{prefix}{i}", prompt, p)
      for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    return await asyncio.gather(*calls)

  return asyncio.run(main())


def _generate(engine, prompt, params):
  return _gather(engine, [prompt], [params])[0]


def _prompts(count, seed=0, low=3, high=24):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def _learner_logp(weights, prompt, ids, temperature=1.0):
  """What the learner computes for the sampled tokens: packed forward pass and `ops.logprobs`."""
  stream = np.array([[*prompt, *ids]], np.int32)
  padded = np.pad(stream, ((0, 0), (0, CONTEXT - stream.shape[1])))
  position = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), padded.shape)
  sample = np.where(position < stream.shape[1], 0, -1).astype(np.int32)
  mask = (position >= len(prompt)) & (sample == 0)
  logp = _LEARNER[temperature](weights, padded, sample, position, mask)
  return np.asarray(logp)[0, len(prompt) : stream.shape[1]]


def _learner(temperature):
  @jax.jit
  def evaluate(weights, tokens, sample, position, mask):
    hidden = MODEL.forward(weights, tokens, sample, position)
    head = MODEL.unembedding(weights)
    return token_logprobs(hidden, head, tokens, sample, mask, temperature=temperature)[0]

  return evaluate


_LEARNER = {t: _learner(t) for t in (0.7, 1.0)}


def _same(a, b):
  """Bitwise equality of two lists of generations."""
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x.ids, y.ids)
    np.testing.assert_array_equal(x.logp, y.logp)
    assert x.finish == y.finish


def _close(a, b):
  """The same tokens; log-probs to what another order of summation may change."""
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x.ids, y.ids)
    np.testing.assert_allclose(x.logp, y.logp, atol=5e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logp_equals_the_learners(weights, temperature):
  prompts = _prompts(11, high=50)  # more than slots, of ragged lengths, some prefilled in two calls
  params = [_params(seed=i, temperature=temperature) for i in range(11)]
  for prompt, g in zip(prompts, _gather(_engine(weights), prompts, params), strict=True):
    expected = _learner_logp(weights, prompt, g.ids, temperature)
    np.testing.assert_allclose(g.logp, expected, atol=1e-5)
    assert g.finish == "length" and len(g.ids) == 12


def test_greedy_is_the_argmax_chain_of_forward(weights):
  @jax.jit
  def step(tokens, length):
    position = jnp.arange(CONTEXT)[None]
    sample = jnp.where(position < length, 0, -1)
    hidden = MODEL.forward(weights, tokens, sample, position)
    return jnp.argmax(hidden[0, length - 1] @ MODEL.unembedding(weights))

  prompts = _prompts(3, seed=5)
  found = _gather(_engine(weights), prompts, [_params(temperature=0.0, new=9)] * 3)
  for prompt, g in zip(prompts, found, strict=True):
    stream = np.zeros((1, CONTEXT), np.int32)
    stream[0, : len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + 9):
      stream[0, length] = step(stream, length)
    assert g.ids.tolist() == stream[0, len(prompt) : len(prompt) + 9].tolist()


def test_tokens_do_not_depend_on_company_slot_or_order(weights):
  prompts, params = _prompts(20, seed=7), [_params(seed=100 + i) for i in range(20)]
  together = _gather(_engine(weights), prompts, params)
  alone = _engine(weights)
  _close(together, [_generate(alone, p, q) for p, q in zip(prompts, params, strict=True)])
  backwards = _gather(_engine(weights), prompts[::-1], params[::-1])
  _close(together, backwards[::-1])


def test_seeds_of_engine_and_request_both_matter(weights):
  prompt = _prompts(1)[0]
  first = _generate(_engine(weights), prompt, _params(seed=5))
  assert first.ids.tolist() == _generate(_engine(weights), prompt, _params(seed=5)).ids.tolist()
  assert first.ids.tolist() != _generate(_engine(weights), prompt, _params(seed=6)).ids.tolist()
  other = _engine(weights, seed=2)
  assert first.ids.tolist() != _generate(other, prompt, _params(seed=5)).ids.tolist()
  wide = _generate(_engine(weights), prompt, _params(seed=5 + (1 << 40)))
  assert first.ids.tolist() != wide.ids.tolist()


def test_the_sampled_distribution_is_the_models(weights):
  """First tokens of 600 requests against exp(log-prob) of every id: Pearson, five deviations."""
  prompt, count = FEW_SHOT[:5], 600
  engine = _engine(weights)
  found = _gather(engine, [prompt] * count, [_params(seed=i, new=1) for i in range(count)])
  seen = np.bincount([int(g.ids[0]) for g in found], minlength=VOCAB)
  p = np.exp([_learner_logp(weights, prompt, [token])[0] for token in range(VOCAB)])
  assert abs(p.sum() - 1) < 1e-5
  common = p * count >= 5
  bins = np.append(p[common], p[~common].sum()) * count
  counts = np.append(seen[common], seen[~common].sum())
  statistic = ((counts - bins) ** 2 / np.maximum(bins, 1e-9)).sum()
  freedom = len(bins) - 1
  assert freedom >= 5 and statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_the_next_turn_prefills_its_new_tokens_only_and_equals_a_cold_engine(weights):
  engine, prompt = _engine(weights), _prompts(1, seed=3, low=18)[0]
  first = _generate(engine, prompt, _params(seed=1, new=7))
  following = [*prompt, *first.ids.tolist(), 4, 5, 6]
  before = engine.counters["prefilled_tokens"]
  second = _generate(engine, following, _params(seed=2))
  # The last sampled token, and the observation but its last token: the first input of decoding.
  assert engine.counters["prefilled_tokens"] - before == 3
  cold = _engine(weights)
  _close([second], [_generate(cold, following, _params(seed=2))])


def test_a_turn_cut_in_two_is_the_same_turn(weights):
  prompt = _prompts(1, seed=4)[0]
  whole = _generate(_engine(weights), prompt, _params(seed=3, new=10))
  for cut in (1, 4, 9):
    head = whole.ids[:cut].tolist()
    tail = _generate(_engine(weights), prompt + head, _params(seed=3, new=10 - cut))
    assert head + tail.ids.tolist() == whole.ids.tolist()


def test_a_shared_prefix_is_computed_once(weights):
  prompts = [[*FEW_SHOT, 50 + i, 60 + i, 61] for i in range(SLOTS)]
  params = [_params(seed=i) for i in range(SLOTS)]
  engine = _engine(weights)
  together = _gather(engine, prompts, params)
  # The first prompt but its last token, and two tokens of each of the others.
  assert engine.counters["prefilled_tokens"] == len(FEW_SHOT) + 2 + 2 * (SLOTS - 1)
  assert engine.counters["reused_tokens"] == len(FEW_SHOT) * (SLOTS - 1)
  _close(
    together, [_generate(_engine(weights), p, q) for p, q in zip(prompts, params, strict=True)]
  )


def test_identical_prompts_are_prefilled_once(weights):
  engine = _engine(weights)
  _gather(engine, [FEW_SHOT] * 5, [_params(seed=i) for i in range(5)])
  assert engine.counters["prefilled_tokens"] == len(FEW_SHOT) - 1


def test_after_a_load_nothing_of_the_old_weights_answers(weights):
  prompts, params = [FEW_SHOT, FEW_SHOT[:9]], [_params(seed=1), _params(seed=2)]
  engine, fresh = _engine(weights), _weights(seed=9)
  old = _gather(engine, prompts, params)
  asyncio.run(engine.load(fresh, 3))
  new = _gather(engine, prompts, params)
  assert [g.ids.tolist() for g in new] != [g.ids.tolist() for g in old]
  _same(new, _gather(_engine(fresh, version=3), prompts, params))
  assert all((g.version == 3).all() for g in new) and all((g.version == 0).all() for g in old)
  assert asyncio.run(engine.version()) == 3


def test_one_changed_weight_changes_the_answer(weights):
  engine, params = _engine(weights), _params(seed=1)
  before = _generate(engine, FEW_SHOT, params)
  changed = weights.replace(final_norm=weights.final_norm.at[0].add(1.0))
  asyncio.run(engine.load(changed, 1))
  after = _generate(engine, FEW_SHOT, params)
  assert not np.array_equal(before.logp, after.logp)


def test_the_callers_weights_may_be_donated_after_construction_and_load():
  mine = _weights(seed=11)
  engine = _engine(mine)
  jax.tree.map(lambda w: w.delete(), mine)
  again = _weights(seed=12)
  asyncio.run(engine.load(again, 1))
  jax.tree.map(lambda w: w.delete(), again)
  assert len(_generate(engine, FEW_SHOT, _params()).ids) == 12


def test_a_load_in_flight_goes_on_with_recomputed_keys_and_values(weights):
  fresh, engine = _weights(seed=9), _engine(weights)
  prompt = _prompts(1, seed=2)[0]

  async def main():
    task = asyncio.create_task(engine.generate("a", prompt, _params(seed=1)))
    while engine.counters["sampled_tokens"] < 4:
      await asyncio.sleep(0)
    await engine.load(fresh, 7)
    return await task

  g = asyncio.run(main())
  assert g.version.tolist() == [0] * 4 + [7] * 8
  np.testing.assert_allclose(g.logp[:4], _learner_logp(weights, prompt, g.ids)[:4], atol=1e-5)
  np.testing.assert_allclose(g.logp[4:], _learner_logp(fresh, prompt, g.ids)[4:], atol=1e-5)


def test_versions_must_increase_and_shapes_must_agree(weights):
  engine = _engine(weights, version=4)
  for version in (4, 3):
    with pytest.raises(EngineError, match=f"version {version} does not follow 4"):
      asyncio.run(engine.load(weights, version))
  short = weights.replace(embedding=weights.embedding[:-1])
  with pytest.raises(EngineError, match="other shapes"):
    asyncio.run(engine.load(short, 5))
  assert asyncio.run(engine.version()) == 4


def test_a_sampled_stop_token_is_the_last_id_with_its_logp(weights):
  prompt, engine = _prompts(1, seed=6)[0], _engine(weights)
  free = _generate(engine, prompt, _params(seed=8))
  stop = int(free.ids[5])
  first = free.ids.tolist().index(stop)
  many = (stop, *(token for token in range(VOCAB) if token not in free.ids))
  stopped = _generate(engine, prompt, _params(seed=8, stop=many))
  assert stopped.finish == "stop" and stopped.ids.tolist() == free.ids[: first + 1].tolist()
  np.testing.assert_allclose(stopped.logp, free.logp[: first + 1], atol=5e-6)
  last = _generate(engine, prompt, _params(seed=8, stop=(stop,), new=first + 1))
  assert last.finish == "stop"  # also when it is the last token allowed


def test_abort_returns_what_there_is_and_frees_the_row(weights):
  engine = _engine(weights)

  async def main():
    calls = [
      asyncio.create_task(engine.generate(f"a{i}", FEW_SHOT[: 3 + i], _params(seed=i, new=20)))
      for i in range(SLOTS + 2)
    ]
    while engine.counters["sampled_tokens"] < 4 * SLOTS:
      await asyncio.sleep(0)
    await engine.abort("a0")
    await engine.abort(f"a{SLOTS + 1}")  # still waiting for a row
    await engine.abort("unknown")
    calls[1].cancel()
    return await asyncio.gather(*calls, return_exceptions=True)

  found = asyncio.run(main())
  assert found[0].finish == "abort" and 0 < len(found[0].ids) < 20
  assert len(found[0].logp) == len(found[0].version) == len(found[0].ids)
  assert isinstance(found[1], asyncio.CancelledError)
  assert found[-1].finish == "abort" and not len(found[-1].ids)
  assert all(g.finish == "length" for g in found[2:-1])
  assert not engine._residency.busy.any() and not engine._running and not engine._waiting


def test_programs_compiled_are_bounded_by_the_buckets(weights):
  """Other tests of this module run the same programs with the same buckets, so they count too."""
  engine = _engine(weights)
  for count in (1, 2, 3, 5, 8, 13):
    for high in (4, 10, 20, 40):
      prompts = _prompts(count, seed=count, high=high)
      _gather(engine, prompts, [_params(seed=i, new=1 + i) for i in range(count)])
  programs, views = engine._programs, len(BUCKETS.rows) * len(BUCKETS.length)
  assert 1 < programs.decode._cache_size() <= views
  assert 1 < programs.prefill._cache_size() <= views * len(BUCKETS.chunk)
  assert 1 <= programs.copy._cache_size() <= views


def test_twenty_runs_of_tasks_that_think_between_turns_are_bitwise_equal(weights):
  async def episode(engine, i):
    stream, turns = FEW_SHOT[: 6 + i], []
    for turn in range(3):
      g = await engine.generate(f"{i}/{turn}", stream, _params(seed=10 * i + turn, new=4))
      turns.append(g)
      for _ in range(i):
        await asyncio.sleep(0)
      stream = [*stream, *g.ids.tolist(), 2 + turn]
    return turns

  def run():
    engine = _engine(weights)

    async def main():
      return await asyncio.gather(*[episode(engine, i) for i in range(5)])

    return [g for turns in asyncio.run(main()) for g in turns], dict(engine.counters)

  first, counters = run()
  for _ in range(19):
    again, same_counters = run()
    _same(first, again)
    assert counters == same_counters


def test_eight_devices_equal_one(weights):
  mesh = make_mesh(data=4, tensor=2)
  spread = jax.device_put(weights, shardings(MODEL, mesh))
  prompts = np.random.default_rng(8).integers(0, VOCAB, (SLOTS, 9)).tolist()
  params = [_params(seed=i) for i in range(SLOTS)]
  engine = _engine(spread)
  keys = jax.tree.leaves(engine._cache)[0]
  assert keys.sharding.shard_shape(keys.shape)[:2] == (SLOTS // 4, CONFIG.kv_heads // 2)
  _close(_gather(_engine(weights), prompts, params), _gather(engine, prompts, params))
  asyncio.run(engine.load(spread, 1))
  _close(_gather(engine, prompts, params), _gather(_engine(weights), prompts, params))


def test_bfloat16_is_close_to_float32(weights):
  engine = _engine(weights, dtype=jnp.bfloat16)
  g = _generate(engine, FEW_SHOT, _params(seed=1))
  assert g.logp.dtype == np.float32
  assert np.abs(g.logp - _learner_logp(weights, FEW_SHOT, g.ids)).max() < 0.3
  assert jax.tree.leaves(engine._cache)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("prompt", "new", "reason"),
  [
    (list(range(60)), 5, "prompt of 60 tokens and max_new_tokens 5 make 65, more than .* of 64"),
    ([], 1, "the prompt is empty"),
    ([1, VOCAB], 1, rf"prompt has id {VOCAB}, outside \[0, {VOCAB}\)"),
  ],
)
def test_what_cannot_be_served_is_refused_by_name(weights, prompt, new, reason):
  with pytest.raises(EngineError, match=f"engine embedded, request r0: {reason}"):
    _generate(_engine(weights), prompt, _params(new=new))


def test_a_stream_may_fill_the_context_to_the_last_token(weights):
  g = _generate(_engine(weights), FEW_SHOT, _params(new=CONTEXT - len(FEW_SHOT)))
  expected = _learner_logp(weights, FEW_SHOT, g.ids)
  np.testing.assert_allclose(g.logp, expected, atol=1e-5)


def test_a_running_id_is_not_taken_twice(weights):
  engine = _engine(weights)

  async def main():
    calls = [engine.generate("twin", FEW_SHOT, _params(seed=i)) for i in range(2)]
    return await asyncio.gather(*calls, return_exceptions=True)

  first, second = asyncio.run(main())
  assert len(first.ids) == 12
  assert isinstance(second, EngineError) and "twin" in str(second)


def test_a_deadline_names_what_it_waited_for(weights):
  engine = _engine(weights, deadline=0.0)
  with pytest.raises(EngineError, match=r"request r0: no answer within 0.0 s"):
    _generate(engine, FEW_SHOT, _params())
  assert not engine._running and not engine._waiting and not engine._residency.busy.any()


def test_close_fails_what_runs_and_what_comes_after(weights):
  engine = _engine(weights)

  async def main():
    task = asyncio.create_task(engine.generate("a", FEW_SHOT, _params()))
    await asyncio.sleep(0)
    assert await engine.healthy()
    await engine.close()
    await engine.close()
    assert not await engine.healthy()
    with pytest.raises(EngineError, match="request a: the engine was closed"):
      await task
    with pytest.raises(EngineError, match="request b: the engine is closed"):
      await engine.generate("b", FEW_SHOT, _params())

  asyncio.run(main())


def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace(weights):
  with jax.debug_nans(False):
    broken = weights.replace(final_norm=weights.final_norm * jnp.nan)
    engine = _engine(weights)
    asyncio.run(engine.load(broken, 1))
    with pytest.raises(EngineError, match="log-prob nan of sampled token 0 is not finite"):
      _generate(engine, FEW_SHOT, _params())
    asyncio.run(engine.load(weights, 2))
    g = _generate(engine, FEW_SHOT, _params(seed=3))
  np.testing.assert_allclose(g.logp, _learner_logp(weights, FEW_SHOT, g.ids), atol=1e-5)


def test_programs_of_equal_engines_are_shared(weights):
  assert _engine(weights)._programs is _engine(weights, seed=4)._programs
  assert make_programs.cache_info().hits > 0


def test_own_copy_shares_no_buffer(weights):
  copied = own_copy(weights, jnp.float32)
  assert copied.embedding.unsafe_buffer_pointer() != weights.embedding.unsafe_buffer_pointer()
  np.testing.assert_array_equal(copied.embedding, weights.embedding)
