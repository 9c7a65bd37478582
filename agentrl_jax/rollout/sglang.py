"""The client of a SGLang server: tokens in; sampled ids, their log-probs and versions out, or an
error.

Nothing that the server answers is believed unchecked: ids, log-probs and version spans must agree
in length, log-probs are looked up by the sampled id, and `probe` measures what distribution they
belong to.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from jaxtyping import Int

from agentrl_jax.rollout.engine import EngineDead, EngineError, Finish, Generation, SamplingParams
from agentrl_jax.rollout.sglang_server import SGLangServer

POLL_SECONDS = 0.2  # how often the launcher is asked whether the process still runs
KEEP_SECONDS = 2.0  # that a connection may rest and be used again
FULL_SUPPORT: Mapping[
  str, Any
] = {  # stated, since a model's generation_config changes the defaults
  "top_p": 1.0,
  "top_k": -1,
  "min_p": 0.0,
  "frequency_penalty": 0.0,
  "presence_penalty": 0.0,
  "repetition_penalty": 1.0,
}


class SGLangEngine:
  """Implements `Engine` over HTTP.

  A call ends within `call_seconds`, or within about `heartbeat_seconds * (misses + 1)` when the
  server stops answering, or at once when `server` (the launcher, if we started it) sees its process
  end. The heartbeat runs only while calls are in flight, so an engine may be used from several
  event loops, one after the other.

  Token ids outside [0, vocab_size) are refused here, because they would end the server. The model's
  own end-of-sequence ids stop a turn as the given stop ids do, and are then its last token. `seed`
  is honoured by servers started with --enable-deterministic-inference (not available on CPU) and
  ignored by others: `seeded` says which, after `probe`. At temperature 0 the log-probs are those of
  softmax(logits).

  With `run_id` only that run's versions ("RUN_ID:V") are believed: a server that bears another
  stamp, or none, was restarted or is another run's by now, and counts as dead.

  After `use_adapter` requests name a LoRA adapter that the server has loaded, and the version of
  what they sample is that adapter's, from the first token to the last.
  """

  def __init__(
    self,
    url: str,
    vocab_size: int,
    *,
    server: SGLangServer | None = None,
    name: str = "sglang",
    call_seconds: float = 300.0,
    heartbeat_seconds: float = 5.0,
    misses: int = 3,
    run_id: str | None = None,
  ):
    self.url = url.rstrip("/")
    self.vocab_size = vocab_size
    self.name = name
    self.seeded: bool | None = None
    self._server = server
    self._call_seconds = call_seconds
    self._heartbeat_seconds = heartbeat_seconds
    self._misses = misses
    self._run_id = run_id
    self._loop: asyncio.AbstractEventLoop | None = None
    self._http: httpx.AsyncClient | None = None
    self._death: asyncio.Task[str] | None = None
    self._in_flight = 0
    self._adapter: tuple[str, int] | None = None  # its name and version
    self._naming: collections.Counter[str] = collections.Counter()  # requests in flight by adapter

  def use_adapter(self, name: str, version: int) -> None:
    """Requests that begin from now on are answered by the adapter of that name."""
    self._adapter = (name, version)

  async def adapter_ended(self, name: str) -> None:
    """Returns once no request that names the adapter is in flight, and none will be."""
    while self._naming[name] or (self._adapter is not None and self._adapter[0] == name):
      await asyncio.sleep(POLL_SECONDS)
    del self._naming[name]

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation:
    """Samples one turn after `prompt`.

    Raises:
      ValueError: an id of the prompt or a stop id is outside the vocabulary, or the prompt is
        empty.
      EngineError: the server refused, answered something malformed, or missed the deadline.
      EngineDead: the server is gone.
    """
    prompt = [int(i) for i in prompt]
    if not prompt:
      raise ValueError(f"request {request_id}: the prompt is empty")
    for what, ids in (("prompt", prompt), ("stop", params.stop_token_ids)):
      bad = [(k, i) for k, i in enumerate(ids) if not 0 <= i < self.vocab_size]
      if bad:
        raise ValueError(
          f"request {request_id}: {what} id {bad[0][1]} at {bad[0][0]} is outside "
          f"[0, {self.vocab_size})"
        )
    body = {
      "rid": request_id,
      "input_ids": prompt,
      "sampling_params": sampling_fields(params),
      "return_logprob": True,
    }
    adapter = self._adapter
    if adapter is None:
      return await self._generation(request_id, body, params)
    self._naming[adapter[0]] += 1
    try:
      made = await self._generation(request_id, body | {"lora_path": adapter[0]}, params)
    finally:
      self._naming[adapter[0]] -= 1
    return dataclasses.replace(made, version=np.full(len(made.ids), adapter[1], np.int32))

  async def _generation(
    self, request_id: str, body: Mapping[str, Any], params: SamplingParams
  ) -> Generation:
    try:
      answer = await self._call("POST", "/generate", body, what=f"/generate {request_id}")
    except (EngineError, asyncio.CancelledError) as error:
      if not isinstance(error, EngineDead):  # the server may still be sampling for nobody
        await asyncio.shield(self.abort(request_id))
      raise
    where = f"{self.name}, request {request_id}"
    made = read_generation(answer, params, self.vocab_size, where)
    meta = answer["meta_info"]
    for span in meta.get("weight_versions") or [{"version": meta.get("weight_version")}]:
      if reason := self._foreign(span["version"]):
        raise EngineDead(f"{where}: {reason}")
    return made

  def _foreign(self, version: Any) -> str:
    """Why what bears this version is not what this run gave the server, or ""."""
    if self._run_id is None or str(version).startswith(f"{self._run_id}:"):
      return ""
    return f"it serves {version!r}, not run {self._run_id!r}: restarted, or another's by now"

  async def version(self) -> int:
    """The weight version it serves now; 0 before the first push."""
    if self._adapter is not None:
      return self._adapter[1]
    answer = await self._call("GET", "/model_info")
    return read_version(answer.get("weight_version"), self.name)

  async def healthy(self) -> bool:
    """Whether it answers within one heartbeat; never raises."""
    try:
      answer = await self._client().get("/health", timeout=self._heartbeat_seconds)
    except httpx.HTTPError:
      return False
    return answer.status_code == 200

  async def abort(self, request_id: str) -> None:
    """Cancels a request if it is still running; unknown ids and a dead server are ignored."""
    with contextlib.suppress(httpx.HTTPError):
      await self._client().post(
        "/abort_request", json={"rid": request_id}, timeout=self._heartbeat_seconds
      )

  async def probe(self, prompt: Sequence[int] = (0, 1, 2), *, tolerance: float = 1e-3) -> float:
    """Verifies the log-prob contract on the next-token distribution after `prompt`; returns the
    error.

    The whole distribution at temperature 1 must sum to one, and the value returned for a token
    sampled at temperature 0.7 must be that of log_softmax(logits / 0.7) at its id. Bfloat16 servers
    recompute the logits a little differently each time and need a `tolerance` of about 0.1. Sets
    `seeded`.

    Raises:
      EngineError: with both numbers, when either differs by more than `tolerance`.
    """
    temperature = 0.7

    async def sample(fields: Mapping[str, Any], **options: Any) -> Mapping[str, Any]:
      params = SamplingParams(1, (), **fields)
      body = {"input_ids": list(prompt), "sampling_params": sampling_fields(params), **options}
      return await self._call("POST", "/generate", body | {"return_logprob": True})

    whole = await sample({"temperature": 1.0}, top_logprobs_num=self.vocab_size)
    logp = np.full(self.vocab_size, -np.inf)
    try:
      for value, token, *_ in whole["meta_info"]["output_top_logprobs"][0]:
        logp[token] = value
    except (KeyError, IndexError, TypeError, ValueError) as error:
      raise EngineError(f"{self.name}: the probe got no distribution back: {error!r}") from error
    where = f"{self.name}, probe at temperature {temperature}"
    answer = await sample({"temperature": temperature})
    got = read_generation(answer, SamplingParams(1, (), temperature), self.vocab_size, where)
    mass = float(np.exp(logp).sum())
    expected = float(logp[got.ids[0]] / temperature - np.log(np.exp(logp / temperature).sum()))
    error = max(abs(mass - 1), abs(float(got.logp[0]) - expected))
    if not error <= tolerance:
      raise EngineError(
        f"{where}: token {got.ids[0]} came with log-prob {got.logp[0]:.6f}, the scaled full "
        f"distribution gives {expected:.6f}; the mass at temperature 1 is {mass:.6f} "
        f"(tolerance {tolerance:g})"
      )
    info = await self._call("GET", "/server_info")
    self.seeded = bool(info.get("enable_deterministic_inference", False))
    return error

  async def close(self) -> None:
    """Closes the connections; the server belongs to whoever started it. Idempotent."""
    client, self._http = self._http, None
    if client is not None and self._loop is asyncio.get_running_loop():
      await client.aclose()

  def _client(self) -> httpx.AsyncClient:
    """This event loop's connections; a pool cannot outlive the loop that opened it."""
    loop = asyncio.get_running_loop()
    if self._http is None or self._loop is not loop:
      # The server ends what has rested for 5 s: what is sent into that moment is lost.
      limits = httpx.Limits(max_keepalive_connections=64, keepalive_expiry=KEEP_SECONDS)
      # trust_env off: a proxy set for the outside world must not see requests to our own servers.
      self._http = httpx.AsyncClient(
        base_url=self.url, timeout=None, limits=limits, trust_env=False
      )
      self._loop, self._death, self._in_flight = loop, None, 0
    return self._http

  async def _call(
    self, method: str, route: str, body: Any = None, *, what: str | None = None
  ) -> Mapping[str, Any]:
    """One HTTP call that ends by its deadline or with the server; what names it in errors."""
    what = f"{self.name} ({self.url}): {what or route}"
    client = self._client()
    async with self._watched() as death:
      call = asyncio.ensure_future(client.request(method, route, json=body))
      try:
        await asyncio.wait(
          {call, death}, timeout=self._call_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not call.done():
          if death.done():
            raise EngineDead(f"{what}: {death.result()}")
          raise EngineError(f"{what}: no answer within {self._call_seconds:g} s")
        answer = call.result()
        if answer.status_code == 503:  # it is ending
          answer.raise_for_status()
      except httpx.HTTPError as error:
        raise await self._explain(error, what, death) from error
      finally:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
          await call
    if answer.status_code != 200:
      raise EngineError(f"{what}: HTTP {answer.status_code}: {answer.text[:500]}")
    try:
      decoded = answer.json()
    except ValueError as error:
      raise EngineError(f"{what}: not JSON: {answer.text[:200]!r}") from error
    if not isinstance(decoded, dict):
      raise EngineError(f"{what}: expected a JSON object, got {str(decoded)[:200]!r}")
    return decoded

  async def _explain(
    self, error: httpx.HTTPError, what: str, death: asyncio.Task[str]
  ) -> EngineError:
    """A broken connection is the server's end, or not: in bounded time the heartbeat decides, or
    what it serves once it answers again.
    """
    ends = time.monotonic() + 2 * self._heartbeat_seconds * (self._misses + 1)
    await asyncio.wait({death}, timeout=2 * POLL_SECONDS)
    while not death.done() and not await self.healthy() and time.monotonic() < ends:
      await asyncio.wait({death}, timeout=self._heartbeat_seconds)
    if death.done():
      return EngineDead(f"{what}: {death.result()}")
    with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
      answer = await self._client().get("/model_info", timeout=self._heartbeat_seconds)
      if reason := self._foreign(answer.json().get("weight_version")):
        return EngineDead(f"{what}: {reason}")
    return EngineError(f"{what}: connection lost: {error!r}")

  @contextlib.asynccontextmanager
  async def _watched(self) -> AsyncIterator[asyncio.Task[str]]:
    """The heartbeat, shared by all calls in flight; it completes with how the server died."""
    if self._death is None:
      self._death = asyncio.create_task(self._heartbeat())
    self._in_flight += 1
    death = self._death
    try:
      yield death
    finally:
      self._in_flight -= 1
      if not self._in_flight and self._death is not None:
        self._death.cancel()
        self._death = None

  async def _heartbeat(self) -> str:
    log = f"; its log is {self._server.log}" if self._server else ""
    missed, beat = 0, time.monotonic() + self._heartbeat_seconds
    while True:
      if self._server is not None and not self._server.alive():
        return f"the server's process ended{log}"
      if time.monotonic() >= beat:
        missed = 0 if await self.healthy() else missed + 1
        beat = time.monotonic() + self._heartbeat_seconds
        if missed >= self._misses:
          return f"the server missed {missed} heartbeats of {self._heartbeat_seconds:g} s{log}"
      await asyncio.sleep(POLL_SECONDS)


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
  """SGLang's sampling_params: full support, no penalties, whatever the model's defaults say."""
  return {
    **FULL_SUPPORT,
    "temperature": params.temperature,
    "max_new_tokens": params.max_new_tokens,
    "stop_token_ids": list(params.stop_token_ids),
    "sampling_seed": params.seed % 2**31,
  }


def read_generation(
  answer: Mapping[str, Any], params: SamplingParams, vocab_size: int, where: str
) -> Generation:
  """What `/generate` answered, checked.

  Raises:
    EngineError: starting with `where`, when a field is missing, lengths disagree, an id is outside
      the vocabulary, a log-prob is missing, non-finite or above zero (with its position), the spans
      of versions do not cover the tokens, or a stop is not the last token.
  """
  try:
    ids, meta = answer["output_ids"], answer["meta_info"]
    reason = meta["finish_reason"]
    finish, entries = reason["type"], meta["output_token_logprobs"] or []
  except (KeyError, TypeError) as error:
    raise EngineError(f"{where}: malformed answer, {error!r}: {str(answer)[:300]}") from error
  if finish not in ("stop", "length", "abort"):
    raise EngineError(f"{where}: finish reason {finish!r}, expected stop, length or abort")
  if len(entries) != len(ids):
    raise EngineError(f"{where}: {len(ids)} output ids but {len(entries)} log-probs")
  if len(ids) > params.max_new_tokens:
    raise EngineError(f"{where}: {len(ids)} output ids, asked for {params.max_new_tokens}")
  logp = np.zeros(len(ids), np.float32)
  for k, (token, entry) in enumerate(zip(ids, entries, strict=True)):
    if not isinstance(token, int) or not 0 <= token < vocab_size:
      raise EngineError(f"{where}: output id {token!r} at {k} is outside [0, {vocab_size})")
    logp[k] = _logp_of(token, entry, f"{where}, position {k}")
  if finish == "stop" and not ids:
    raise EngineError(f"{where}: stopped without a token")
  matched = reason.get("matched")
  if finish == "stop" and ids[-1] != matched:
    raise EngineError(f"{where}: stopped by {matched!r}, but the last output id is {ids[-1]}")
  return Generation(
    ids=np.asarray(ids, np.int32),
    logp=logp,
    version=read_version_spans(meta, len(ids), where),
    finish=_FINISH[finish],
  )


_FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


def _logp_of(token: int, entry: Any, where: str) -> float:
  try:
    value, sampled = entry[0], entry[1]
  except (KeyError, IndexError, TypeError) as error:
    raise EngineError(f"{where}: log-prob entry {entry!r}, expected [logp, id, text]") from error
  if sampled != token:
    raise EngineError(f"{where}: the log-prob is of id {sampled!r}, the sampled id is {token}")
  if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-6:
    raise EngineError(f"{where}: log-prob of id {token} is {value!r}, expected finite and <= 0")
  return min(float(value), 0.0)


def read_version_spans(meta: Mapping[str, Any], tokens: int, where: str) -> Int[np.ndarray, "n"]:
  """int32 [tokens]: the version that sampled each token.

  Newer servers report contiguous half-open spans over the output tokens; older ones one version,
  which is then every token's.
  """
  spans = meta.get("weight_versions")
  if spans is None:
    return np.full(tokens, read_version(meta.get("weight_version"), where), np.int32)
  version, at = np.zeros(tokens, np.int32), 0
  for span in spans:
    try:
      start, end, text = span["start"], span["end"], span["version"]
    except (KeyError, TypeError) as error:
      raise EngineError(f"{where}: malformed version span {span!r}") from error
    if start != at or not at <= end <= tokens:
      raise EngineError(f"{where}: version span {span!r} after {at} of {tokens} tokens")
    version[start:end] = read_version(text, where)
    at = end
  if at != tokens:
    raise EngineError(f"{where}: version spans cover {at} of {tokens} tokens")
  return version


def read_version(text: Any, where: str) -> int:
  """ "RUN:V" or "V" -> V; SGLang's "default", before any push, -> 0."""
  if text == "default":
    return 0
  try:
    version = int(str(text).rpartition(":")[2])
  except ValueError:
    version = -1
  if version < 0:
    raise EngineError(f"{where}: weight version {text!r}, expected RUN:V, V or default")
  return version
