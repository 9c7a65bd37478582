"""Plans carried out on a toy cache of token ids: whatever the requests, each row ends up right."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rollout.engine import SamplingParams
from agentrl_jax.sampler import schedule
from agentrl_jax.sampler.residency import Residency
from agentrl_jax.sampler.schedule import Buckets, Decode, Prefill, Request

CONTEXT = 96
BUCKETS = Buckets(rows=(1, 4), chunk=(4, 16, 64), length=(CONTEXT,))


def _request(prompt, new=2, name="r"):
  ids = np.array([*prompt, *[0] * new], np.int32)
  params = SamplingParams(new, ())
  future = asyncio.Future(loop=_LOOP)
  logp, version = np.zeros(new, np.float32), np.zeros(new, np.int32)
  return Request(name, params, ids, len(prompt), len(prompt), future, logp, version)


_LOOP = asyncio.new_event_loop()


class _Toy:
  """Rows of ids in place of keys and values, moved by plans as the engine moves arrays."""

  def __init__(self, rows):
    self.cache = np.full((rows, CONTEXT), -7, np.int32)
    self.residency = Residency(rows, CONTEXT)
    self.running, self.prefilled, self.calls = [], 0, 0

  def admit(self, requests):
    room = len(self.cache) - len(self.running)
    for request in schedule.admission_order(requests, self.residency)[:room]:
      request.row = self.residency.claim(request.context)
      requests.remove(request)
      self.running.append(request)

  def advance(self):
    plan = schedule.plan_copy(self.running, self.residency)
    rows = np.array([r.row for r in plan.requests], int)
    sources, lengths = np.array(plan.sources, int), np.array(plan.lengths, int)
    before = self.cache.copy()
    for row, source, length in zip(rows, sources, lengths, strict=True):
      self.cache[row, :length] = before[source, :length]
    self.residency.copy(sources, rows, lengths)
    for request in plan.requests:
      request.begun = True
    call = schedule.plan_compute(self.running, self.residency, BUCKETS, tokens=64, steps=3)
    self.calls += 1
    if isinstance(call, Prefill):
      assert len(call.requests) * call.chunk <= 64
      for request in call.requests:
        start = self.residency.length[request.row]
        ids = request.context[start : start + call.chunk]
        assert len(ids)
        self.cache[request.row, start : start + len(ids)] = ids
        self.residency.append(request.row, ids)
        self.prefilled += len(ids)
      return
    assert isinstance(call, Decode) and list(call.requests) == self.running
    for request in call.requests:
      context = request.context
      np.testing.assert_array_equal(self.cache[request.row, : len(context)], context)
      for _ in range(min(call.steps, request.remaining)):
        self.cache[request.row, request.length - 1] = request.ids[request.length - 1]
        self.residency.append(request.row, request.ids[request.length - 1 : request.length])
        request.ids[request.length] = (7 * request.length) % 5
        request.length += 1
    for request in [r for r in self.running if not r.remaining]:
      self.running.remove(request)
      self.residency.release(request.row)

  def run(self, waiting):
    while waiting or self.running:
      self.admit(waiting)
      self.advance()
      assert self.calls < 10_000
    np.testing.assert_array_equal(
      np.where(self.residency.tokens >= 0, self.cache, -1), self.residency.tokens
    )


tokens = st.integers(0, 1)
prompts = st.lists(st.lists(tokens, min_size=1, max_size=60), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.lists(prompts, min_size=1, max_size=4))
def test_every_row_holds_its_requests_context_whatever_the_requests(rows, waves):
  """Few distinct tokens, so that prefixes are shared at every length; waves reuse residents."""
  toy = _Toy(rows)
  for wave in waves:
    toy.run([_request(prompt, new=1 + len(prompt) % 5) for prompt in wave])


@settings(deadline=None, max_examples=30)
@given(st.lists(tokens, min_size=20, max_size=50), st.integers(2, 5))
def test_a_common_prefix_is_prefilled_once(prefix, count):
  toy = _Toy(5)
  toy.run([_request([*prefix, 2 + i, 9]) for i in range(count)])
  assert toy.prefilled == len(prefix) + count  # each request's own token; the last is not prefilled


@settings(deadline=None, max_examples=60)
@given(prompts, st.booleans())
def test_who_waits_is_who_can_copy_enough_of_an_earlier_request(wave, whole):
  """Against a count, request by request: fewer than WORTH_WAITING tokens are not waited for."""
  requests = [_request(prompt) for prompt in wave]
  residency = Residency(len(requests), CONTEXT, whole=whole)
  for request in requests:
    request.row = residency.claim(request.context)
  plan = schedule.plan_copy(requests, residency)
  begins = []
  for i, request in enumerate(requests):
    coming = [0]
    for earlier in (e.context for e in requests[:i]):
      pairs = list(zip(request.context, earlier, strict=False))
      shared = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
      coming.append(shared if not whole or shared == len(earlier) else 0)
    if len(request.context) and max(coming) < schedule.WORTH_WAITING:
      begins.append(request)
  assert [r for r in plan.requests if len(r.context)] == begins


def test_forgetting_mid_way_makes_rows_right_again():
  toy, waiting = _Toy(3), [_request([i, 1, 2, 3, 4, 5], new=9) for i in range(3)]
  for _ in range(3):
    toy.admit(waiting)
    toy.advance()
  toy.residency.clear()
  toy.cache[:] = -7
  for request in toy.running:
    request.begun = False
  toy.run(waiting)


def test_requests_that_go_on_are_admitted_before_new_ones():
  toy = _Toy(1)
  first = _request([1, 2, 3])
  toy.run([first])
  new, following = _request([9, 9]), _request([*first.ids.tolist(), 4, 4])
  assert schedule.admission_order([new, following], toy.residency) == [following, new]


def test_default_buckets():
  found = schedule.default_buckets(32, 256)
  assert (found.rows, found.chunk, found.length) == ((2, 8, 32), (16, 64, 256), (256,))
  long = schedule.default_buckets(64, 4096)
  assert (long.rows, long.chunk, long.length) == ((4, 16, 64), (16, 64, 256), (512, 2048, 4096))
  small = schedule.default_buckets(3, 40)
  assert (small.rows, small.chunk, small.length) == ((1, 3), (16, 40), (40,))


def test_fit_takes_the_smallest_bucket_that_holds():
  assert [schedule.fit((4, 16), n) for n in (1, 4, 5, 99)] == [4, 4, 16, 16]


@pytest.mark.parametrize("rows", [(), (4, 2), (0, 1)])
def test_buckets_increase(rows):
  with pytest.raises(ValueError, match="buckets of rows"):
    Buckets(rows=rows, chunk=(1,), length=(1,))
