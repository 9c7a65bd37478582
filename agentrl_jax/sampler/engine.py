"""The embedded engine: continuous batching over a KV cache, behind the `Engine` protocol.

Device programs run inline on the event loop, and between two of them the loop is turned until no
task has anything to submit; what waits is then batched together. Nothing depends on the clock, so
the same calls give the same bits. (A task that waits for a thread or a socket brings its own timing
with it.)
"""

import asyncio
import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentrl_jax.models.model import Cache, Model, Weights
from agentrl_jax.rollout.engine import EngineError, Finish, Generation, SamplingParams
from agentrl_jax.sampler import schedule
from agentrl_jax.sampler.placement import NO_FP8, SamplerFp8, cache_dtype, cache_sharding, own_copy
from agentrl_jax.sampler.programs import NOTHING, RowState, make_programs
from agentrl_jax.sampler.residency import Residency
from agentrl_jax.sampler.sampling import request_key
from agentrl_jax.sampler.schedule import Buckets, Copy, Decode, Prefill, Request
from agentrl_jax.sampler.stops import StopTable

QUIET_TURNS = 16  # turns of the event loop without a submission before the device goes on
SETTLE_TURNS = 4096  # at most, however busy the submitters are


class Refused(EngineError):
  """What was asked for can never be answered; the message says what is wrong with it."""


class EmbeddedEngine:
  """Samples from `model` in this process. Implements `rollout.engine.Engine`, and `load`.

  Log-probs are `log_softmax(logits / temperature)` of the sampled ids in float32, over the whole
  vocabulary. The draw of a token is a function of the engine's seed, the request's seed and the
  token's index in its stream: neither the row, nor the company in the batch, nor timing enters.
  Temperature 0 takes the largest logit and reports log-probs at temperature 1.

  Args:
    weights: copied, so the caller may donate them; where they are sharded, so is the cache.
    slots: rows of the cache: how many requests run at once.
    context: tokens of a stream at most, sampled ones included.
    seed: of all random draws, any integer.
    version: of `weights`.
    dtype: of activations, and of weights and cache where `fp8` does not say otherwise.
    fp8: what is held or computed in FP8.
    deadline: seconds a call of `generate` may take, waiting for a row included.
    max_steps: tokens a decode call samples for a row at most; an abort or a load waits that long.
    prefill_tokens: rows times chunk of one prefill call at most.
    buckets: shapes to compile for, derived from slots and context by default.
  """

  def __init__(
    self,
    model: Model,
    weights: Weights,
    *,
    slots: int,
    context: int,
    seed: int,
    version: int = 0,
    dtype: Any = jnp.float32,
    fp8: SamplerFp8 = NO_FP8,
    deadline: float = 600.0,
    max_steps: int = 32,
    prefill_tokens: int = 4096,
    buckets: Buckets | None = None,
    name: str = "embedded",
  ):
    for what, value in (("slots", slots), ("max_steps", max_steps), ("context", context - 1)):
      if value < 1:
        raise ValueError(f"{what} is {value + (what == 'context')}, too small to sample anything")
    if context > model.config.max_position:
      raise ValueError(
        f"context {context} exceeds the model's {model.config.max_position} positions"
      )
    self.name = name
    self._model, self._slots, self._context = model, slots, context
    self._seed, self._dtype, self._deadline = seed, dtype, deadline
    self._fp8 = fp8
    self._max_steps, self._prefill_tokens = max_steps, prefill_tokens
    self._buckets = buckets or schedule.default_buckets(slots, context)
    if self._buckets.rows[-1] != slots or self._buckets.length[-1] != context:
      raise ValueError(f"{self._buckets} must end with {slots} rows and length {context}")
    self._weights, self._version = own_copy(weights, dtype, fp8), version
    self._sharding = cache_sharding(weights, jax.eval_shape(self._empty_cache))
    self._cache = self._new_cache()
    self._programs = make_programs(
      model, dtype=dtype, max_steps=max_steps, sharding=self._sharding, fp8=fp8
    )
    self._residency = Residency(slots, context, whole=model.functions.whole_prefixes)
    self._stops = StopTable(model.config.vocab_size)
    self._waiting: list[Request] = []
    self._running: list[Request] = []  # in order of admission
    self._submitted = 0
    self._driver: asyncio.Task[None] | None = None
    self._closed = self._paused = False
    self.counters = collections.Counter[str]()

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation:
    """Samples one turn. Raises EngineError naming engine, request and reason: Refused where it
    was not begun.
    """
    request = self._request(request_id, prompt, params)
    self._waiting.append(request)
    self._submitted += 1
    self._start()
    try:
      async with asyncio.timeout(self._deadline):
        return await request.result
    except TimeoutError as error:
      where = (
        f"after {request.length - request.prompt} tokens" if request.row >= 0 else "in the queue"
      )
      raise self._error(request_id, f"no answer within {self._deadline} s, {where}") from error
    finally:
      self._drop(request)

  async def version(self) -> int:
    return self._version

  async def healthy(self) -> bool:
    return not self._closed

  async def abort(self, request_id: str) -> None:
    """Ends a request with what it has sampled so far; its `finish` is "abort"."""
    for request in [*self._running, *self._waiting]:
      if request.request_id == request_id:
        self._finish(request, "abort")

  async def abort_all(self) -> None:
    """`abort` of every request."""
    for request in [*self._running, *self._waiting]:
      self._finish(request, "abort")

  async def pause(self) -> None:
    """From here to `resume` nothing is sampled; requests wait, within their deadlines."""
    self._paused = True

  async def resume(self) -> None:
    """Goes on where `pause` stopped."""
    self._paused = False
    self._start()

  @property
  def idle(self) -> bool:
    """Whether no request is under way."""
    return not (self._running or self._waiting)

  @property
  def weights(self) -> Weights:
    """What is served, in the engine's dtype, a tree a layer. Never donated."""
    return self._weights

  async def next_logp(self, prompt: Sequence[int]) -> Float[np.ndarray, "V"]:
    """Log-probs at temperature 1 of every token after `prompt`, by a pass beside the cache."""
    self._check_open("next_logp")
    tokens = jnp.asarray([self._checked("next_logp", "prompt", prompt)])
    return np.asarray(self._programs.distribution(self._weights, tokens))

  async def load(self, weights: Weights, version: int) -> None:
    """Installs new weights; requests under way go on with them, their cache recomputed.

    Each token's version is recorded. Raises EngineError when `version` does not increase or the
    weights' shapes differ from those that are served.
    """
    self._check_open("load")
    if version <= self._version:
      raise self._error("load", f"version {version} does not follow {self._version}")
    fresh = own_copy(weights, self._dtype, self._fp8)
    shapes = jax.tree.map(lambda w: w.shape, fresh), jax.tree.map(lambda w: w.shape, self._weights)
    if shapes[0] != shapes[1]:
      raise self._error(
        "load", f"weights of version {version} have other shapes than {self._version}"
      )
    self._weights, self._version = fresh, version
    self._forget()

  async def flush(self) -> None:
    """Drops all kept prefixes: what follows is bit for bit what a new engine would give."""
    self._forget()

  async def close(self) -> None:
    """Fails what is under way and frees the cache. Idempotent."""
    self._closed = True
    self._fail_all("the engine was closed")
    self._cache = self._weights = None
    if self._driver is not None and self._driver.get_loop() is asyncio.get_running_loop():
      await asyncio.wait({self._driver}, timeout=self._deadline)  # it sees `_closed` and returns

  def _request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
    self._check_open(request_id)
    if any(r.request_id == request_id for r in (*self._waiting, *self._running)):
      raise self._refused(request_id, "a request with this id is still running")
    given = self._checked(request_id, "prompt", prompt)
    total = len(given) + params.max_new_tokens
    if not len(given):
      raise self._refused(request_id, "the prompt is empty")
    if total > self._context:
      raise self._refused(
        request_id,
        f"prompt of {len(given)} tokens and max_new_tokens {params.max_new_tokens} make {total}, "
        f"more than the context of {self._context}",
      )
    self._checked(request_id, "stop_token_ids", params.stop_token_ids)
    return Request(
      request_id=request_id,
      params=params,
      ids=np.concatenate([given, np.zeros(params.max_new_tokens, np.int32)]),
      prompt=len(given),
      length=len(given),
      result=asyncio.get_running_loop().create_future(),
      logp=np.zeros(params.max_new_tokens, np.float32),
      version=np.zeros(params.max_new_tokens, np.int32),
    )

  def _checked(self, request_id: str, what: str, given: Sequence[int]) -> Int[np.ndarray, "N"]:
    """The ids, all of them tokens of the model."""
    ids, vocab = np.asarray(given, int), self._model.config.vocab_size
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if bad.size:
      raise self._refused(request_id, f"{what} has id {ids[bad[0]]}, outside [0, {vocab})")
    return ids.astype(np.int32)

  def _start(self) -> None:
    if self._driver is None or self._driver.done():
      self._driver = asyncio.get_running_loop().create_task(self._drive())

  async def _drive(self) -> None:
    """Lets tasks submit, then runs one device program, as long as there is work."""
    try:
      while True:
        await self._settle()
        if self._closed or self._paused or self.idle:
          return
        self._admit()
        self._advance()
    except asyncio.CancelledError:
      self._fail_all("the event loop cancelled the engine")
      raise
    except Exception as error:
      # A failed program may have consumed the donated cache.
      self._fail_all(f"the device program failed: {error!r}", error)
      self._reset_cache()

  async def _settle(self) -> None:
    quiet, seen = 0, self._submitted
    for _ in range(SETTLE_TURNS):
      await asyncio.sleep(0)
      quiet, seen = (quiet + 1 if seen == self._submitted else 0), self._submitted
      if quiet == QUIET_TURNS:
        return

  def _admit(self) -> None:
    room = self._slots - len(self._running)
    if not (room and self._waiting):
      return
    for request in schedule.admission_order(self._waiting, self._residency)[:room]:
      request.row = self._residency.claim(request.context)
      self._waiting.remove(request)
      self._running.append(request)

  def _advance(self) -> None:
    self._copy(schedule.plan_copy(self._running, self._residency))
    call = schedule.plan_compute(
      self._running,
      self._residency,
      self._buckets,
      tokens=self._prefill_tokens,
      steps=self._max_steps,
    )
    if isinstance(call, Prefill):
      self._prefill(call)
    else:
      self._decode(call)

  def _copy(self, call: Copy) -> None:
    if not call.requests:
      return
    target = np.array([r.row for r in call.requests])
    source, length = np.array(call.sources), np.array(call.lengths)
    moved = np.flatnonzero((source != target) & (length > 0))
    if moved.size:
      rows, whole = self._rows(target[moved])
      origin = rows.copy()  # padding rows are copied onto themselves
      origin[target[moved] if whole else slice(moved.size)] = source[moved]
      extent = schedule.fit(self._buckets.length, int(length[moved].max()))
      self._cache = self._programs.copy(self._cache, origin, rows, length=extent)
    self._residency.copy(source, target, length)
    for request in call.requests:
      request.begun = True
    self.counters["reused_tokens"] += int(length.sum())

  def _prefill(self, call: Prefill) -> None:
    rows, whole = self._rows([r.row for r in call.requests])
    tokens = np.zeros((len(rows), call.chunk), np.int32)
    position = np.full((len(rows), call.chunk), -1, np.int32)
    end = 0
    for request, place in zip(call.requests, self._places(call.requests, whole), strict=True):
      start = int(self._residency.length[request.row])
      ids = request.context[start : start + call.chunk]
      tokens[place, : len(ids)] = ids
      position[place, : len(ids)] = np.arange(start, start + len(ids))
      end = max(end, start + len(ids))
      self._residency.append(request.row, ids)
      self.counters["prefilled_tokens"] += len(ids)
    extent = schedule.fit(self._buckets.length, end)
    self._cache = self._programs.prefill(
      self._weights, self._cache, rows, tokens, position, length=extent, whole=whole
    )
    self.counters["prefill_calls"] += 1

  def _decode(self, call: Decode) -> None:
    rows, whole = self._rows([r.row for r in call.requests])
    places = self._places(call.requests, whole)
    state, end = self._row_state(call, len(rows), places)
    extent = schedule.fit(self._buckets.length, end)
    self._cache, ids, logp = self._programs.decode(
      self._weights,
      self._cache,
      rows,
      state,
      self._stops.table,
      np.int32(call.steps),
      np.int32(call.quota),
      length=extent,
      whole=whole,
    )
    ids, logp = np.asarray(ids), np.asarray(logp)
    self.counters["decode_calls"] += 1
    self.counters["decode_steps"] += int((ids != NOTHING).any(axis=0).sum())
    for request, place in zip(call.requests, places, strict=True):
      self._record(request, ids[place], logp[place])
    if not np.isfinite(logp).all():
      # Attention multiplies what lies past a row's end by zero, and zero times NaN is NaN.
      self._reset_cache()

  def _row_state(self, call: Decode, size: int, places: Sequence[int]) -> tuple[RowState, int]:
    """The rows' state and how many cache indices the call may reach."""
    token, position, remaining, stop = np.zeros((4, size), np.int32)
    temperature, key = np.ones(size, np.float32), np.zeros((size, 2), np.uint32)
    sets = self._stops.indices([r.params.stop_token_ids for r in call.requests])
    end = 0
    for request, place, stop_set in zip(call.requests, places, sets, strict=True):
      token[place] = request.ids[request.length - 1]
      position[place] = request.length - 1
      remaining[place] = request.remaining
      stop[place] = stop_set
      temperature[place] = request.params.temperature
      key[place] = request_key(self._seed, request.params.seed)
      end = max(end, request.length - 1 + min(call.steps, request.remaining))
    fields = token, position, remaining, temperature, key, stop
    return RowState(*(jnp.asarray(field) for field in fields)), end

  def _record(self, request: Request, ids: np.ndarray, logp: np.ndarray) -> None:
    """Appends what one call sampled for a request, and finishes it where it stopped."""
    count = int((ids != NOTHING).sum())
    ids, logp = ids[:count], logp[:count]
    sampled = request.length - request.prompt
    bad = np.flatnonzero(~np.isfinite(logp))
    if bad.size:
      reason = f"log-prob {logp[bad[0]]} of sampled token {sampled + bad[0]} is not finite"
      self._fail(request, reason)
      return
    request.logp[sampled : sampled + count] = np.minimum(logp, 0.0)
    request.version[sampled : sampled + count] = self._version
    # The inputs of the call's steps are now in the cache: the token before it and all but the last.
    self._residency.append(request.row, np.append(request.ids[request.length - 1], ids[:-1]))
    request.ids[request.length : request.length + count] = ids
    request.length += count
    self.counters["sampled_tokens"] += count
    if self._stops.stops(request.params.stop_token_ids, int(ids[-1])):
      self._finish(request, "stop")
    elif not request.remaining:
      self._finish(request, "length")

  def _rows(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, bool]:
    """Rows padded to a bucket with rows that nothing is written to; whether they are all rows."""
    size = schedule.fit(self._buckets.rows, len(rows))
    if size == self._slots:
      return np.arange(size, dtype=np.int32), True
    others = np.setdiff1d(np.arange(self._slots), rows)
    return np.concatenate([rows, others[: size - len(rows)]]).astype(np.int32), False

  def _places(self, requests: Sequence[Request], whole: bool) -> list[int]:
    """Where in the view each request's row is."""
    return [r.row for r in requests] if whole else list(range(len(requests)))

  def _finish(self, request: Request, finish: Finish) -> None:
    if not request.result.done():
      count = request.length - request.prompt
      ids = request.ids[request.prompt : request.length].copy()
      version = request.version[:count].copy()
      request.result.set_result(Generation(ids, request.logp[:count].copy(), version, finish))
    self._drop(request)

  def _fail(self, request: Request, reason: str, cause: Exception | None = None) -> None:
    if not request.result.done():
      error = self._error(request.request_id, reason)
      error.__cause__ = cause
      request.result.set_exception(error)
    self._drop(request)

  def _fail_all(self, reason: str, cause: Exception | None = None) -> None:
    for request in [*self._running, *self._waiting]:
      self._fail(request, reason, cause)

  def _drop(self, request: Request) -> None:
    """Forgets a request, wherever it is; its row is free and what it holds stays resident."""
    if request in self._running:
      self._running.remove(request)
      self._residency.release(request.row)
    elif request in self._waiting:
      self._waiting.remove(request)

  def _forget(self) -> None:
    """The one place where kept keys and values are dropped, with the weights that made them."""
    self._residency.clear()
    for request in self._running:
      request.begun = False

  def _reset_cache(self) -> None:
    self._forget()
    self._cache = self._new_cache()

  def _empty_cache(self) -> Cache:
    return self._model.init_cache(self._slots, self._context, cache_dtype(self._dtype, self._fp8))

  def _new_cache(self) -> Cache:
    return jax.jit(self._empty_cache, out_shardings=self._sharding)()

  def _check_open(self, what: str) -> None:
    if self._closed:
      raise self._error(what, "the engine is closed")

  def _refused(self, request_id: str, reason: str) -> Refused:
    return Refused(str(self._error(request_id, reason)))

  def _error(self, request_id: str, reason: str) -> EngineError:
    return EngineError(f"engine {self.name}, request {request_id}: {reason}")
