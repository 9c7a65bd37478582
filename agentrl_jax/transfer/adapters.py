"""Pushes of a LoRA adapter alone: the servers keep the frozen model, each version is an adapter
with a name of its own.

prepare → stage → send → verify → commit. The old adapter stays loaded beside the new one, so
nothing pauses and nothing is in doubt: until the commit, from which on requests name the new one, a
failure changes nothing. A request ends on the adapter that it began with, and that is unloaded
after its last request.
"""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from agentrl_jax.models import lora
from agentrl_jax.models.lora import Adapters, Lora
from agentrl_jax.models.model import Model
from agentrl_jax.transfer.control import CallError, Control, make_client
from agentrl_jax.transfer.report import Clock, PushError, PushReport, State
from agentrl_jax.transfer.round import process_of
from agentrl_jax.transfer.stage import check_replicas, fingerprint_of, leaves
from agentrl_jax.transfer.transports.pickled import flattened_bucket
from agentrl_jax.transfer.wire import ALIGN, Entry

PROMPT_TOKENS = 16  # of a probe
TRIAL_CHANGE = 1e-3  # nats: the least that a large adapter must change


class Requests(Protocol):
  """Who sends requests to the servers, and says in each which adapter is to answer it."""

  def use_adapter(self, name: str, version: int) -> None:
    """Every request that begins from now on names it."""
    ...

  async def adapter_ended(self, name: str) -> None:
    """Returns once no request that names it runs, and none will begin."""
    ...


def adapter_publisher(
  model: Model,
  how: Lora,
  urls: Sequence[str],
  *,
  requests: Requests,
  run_id: str,
  deadline: float = 120.0,
) -> "AdapterPublisher":
  """A publisher of the adapters of `how` for servers that hold the frozen `model`.

  The servers run with `server_flags` or more.

  Args:
    urls: one for each replica; each may be tensor parallel.
    run_id: letters, digits, "-", "_" and "."; a server with adapters of another run is refused.
    deadline: seconds for each call to a server.
  """
  if not re.fullmatch(r"[\w.-]+", run_id):
    raise ValueError(f"run_id is {run_id!r}, expected letters, digits, '-', '_' and '.'")
  if not urls or len(set(urls)) != len(urls):
    raise ValueError(f"urls are {list(urls)}, expected one or more different ones")
  return AdapterPublisher(model, how, urls, requests, run_id, deadline)


def server_flags(how: Lora, *, cuda: bool) -> tuple[str, ...]:
  """What a SGLang server must be started with to serve such adapters. Strict: an adapter with a
  name that the server does not know is refused, not ignored.

  Raises ValueError for targets that SGLang cannot fuse: it loads no part of query, key and value
  without the query's and the value's, and no `up_proj` without `gate_proj`.
  """
  if {"q_proj", "k_proj", "v_proj"} & set(how.targets) and not {"q_proj", "v_proj"} <= set(
    how.targets
  ):
    raise ValueError(
      f"targets are {how.targets}: SGLang fuses q_proj, k_proj and v_proj and needs the first and "
      "the last where there is one of them; add them, or push merged weights"
    )
  if "up_proj" in how.targets and "gate_proj" not in how.targets:
    raise ValueError(
      f"targets are {how.targets}: SGLang fuses gate_proj and up_proj and needs the first where "
      "there is the second; add it, or push merged weights"
    )
  targets, backend = sorted(how.targets), () if cuda else ("--lora-backend", "torch_native")
  return (
    *backend, "--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(how.rank),
    "--lora-target-modules", *targets,
  )  # fmt: skip


class Packed(NamedTuple):
  """An adapter as a server takes it: the body of a load but for its name."""

  body: Mapping[str, Any]  # `serialized_named_tensors` holds one text, to be repeated for each rank
  nbytes: int
  fingerprint: str


def pack(model: Model, adapters: Adapters, how: Lora) -> Packed:
  """Brings an adapter to the host.

  Raises:
    ValueError: naming the tensor: replicas differ, or a value is not finite.
  """
  held = {name: leaf for name, leaf in leaves(adapters).items() if isinstance(leaf, jax.Array)}
  check_replicas(held)
  adapters = jax.tree.map(np.asarray, adapters)
  entries: list[Entry] = []
  data = bytearray()
  checksums: dict[str, str] = {}
  for found in lora.entries(model, adapters, how):
    array = np.ascontiguousarray(found.read())
    if not np.isfinite(array).all():
      raise ValueError(f"{found.name} has a value that is not finite")
    index = tuple((0, n) for n in array.shape)
    checksums[found.name] = hashlib.sha256(array.data).hexdigest()
    entries.append(
      Entry(found.name, (0, 1), "float32", array.shape, index, len(data), array.nbytes, "")
    )
    data += array.tobytes()
    data += bytes(-len(data) % ALIGN)
  payload = flattened_bucket(entries, len(data))
  body = {
    "config_dict": lora.settings(how),
    "serialized_named_tensors": [
      base64.b64encode(b"".join((payload.head, data, payload.tail))).decode()
    ],
    "load_format": "flattened_bucket",
    "expected_checksums": checksums,
  }
  rows = [(0, e.name, e.part, e.shape, e.dtype, checksums[e.name]) for e in entries]
  return Packed(body, sum(e.nbytes for e in entries), fingerprint_of(rows))


def trial(model: Model, how: Lora) -> Packed:
  """A random adapter that changes every answer by a lot."""
  rng = np.random.default_rng(0)

  def one(spec: Any, scale: float) -> np.ndarray:
    return (scale * rng.normal(size=spec.shape)).astype(np.float32)

  specs = lora.abstract(model, how).items()
  drawn = {
    path: lora.Adapter(a=one(s.a, s.a.shape[-2] ** -0.5), b=one(s.b, how.rank**-0.5))  # pyright: ignore
    for path, s in specs
  }
  return pack(model, drawn, how)


@dataclasses.dataclass(eq=False)
class _Server:
  control: Control
  ranks: int = 0
  process: tuple[Any, ...] = ()  # that the trial was made with
  listed: frozenset[str] = frozenset()
  holds: tuple[str, str] = ("", "")  # name and fingerprint of what was verified


class AdapterPublisher:
  """Publishes adapters. Not for concurrent use; versions strictly increase."""

  def __init__(
    self,
    model: Model,
    how: Lora,
    urls: Sequence[str],
    requests: Requests,
    run_id: str,
    deadline: float,
  ):
    self.model, self.how, self.requests = model, how, requests
    self.run_id, self.deadline = run_id, deadline
    self.blocked = ""  # why new rounds are refused
    self._client = make_client()
    self._servers = [_Server(Control(url, self._client, deadline)) for url in urls]
    self._named = ("", "")  # what requests name, and its fingerprint
    self._retiring: dict[str, asyncio.Task[None]] = {}
    self._running = False

  async def publish(self, weights: Adapters, version: int) -> PushReport:
    """See `Publisher.publish`. A server that holds this very adapter is not sent it again."""
    if self._running:
      raise PushError(f"publish of version {version} while another round runs")
    if self.blocked:
      raise PushError(f"an earlier round ended badly, recover() first: {self.blocked}")
    self._running = True
    try:
      return await self._round(weights, version)
    finally:
      self._running = False

  async def recover(self) -> None:
    """See `Publisher.recover`: each server answers, in order, what adapters it holds."""
    for server in self._servers:
      try:
        await server.control.adapters()
      except CallError as error:
        raise PushError(f"not recovered: {error}") from error
    self.blocked = ""

  async def retired(self) -> None:
    """Waits until what requests no longer name is unloaded, where its last request has ended."""
    await asyncio.gather(*self._retiring.values())

  async def close(self) -> None:
    """See `Publisher.close`. Adapters stay with the servers."""
    tasks, self._retiring = list(self._retiring.values()), {}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._client.aclose()

  async def _round(self, adapters: Adapters, version: int) -> PushReport:
    clock, name = Clock(), f"{self.run_id}:{version}"
    ended: dict[_Server, tuple[State, str]] = {}

    async def each(act: Callable[[_Server], Awaitable[None]]) -> None:
      """Acts on every server that is still in the round, and lets those go that fail."""

      async def one(server: _Server) -> None:
        try:
          await act(server)
        except _Unknown as error:
          ended[server] = (State.UNKNOWN, str(error))
        except CallError as error:
          ended[server] = (State.ABORTED, str(error))

      live = [one(server) for server in self._servers if server not in ended]
      for result in await asyncio.gather(*live, return_exceptions=True):
        if result is not None:  # the round must not start, or ends here
          raise result

    with clock.phase("prepare"):
      await each(lambda server: self._meet(server, version))
    if len(ended) == len(self._servers):
      raise PushError("no server answers: " + "; ".join(why for _, why in ended.values()))
    with clock.phase("stage"):
      try:
        packed = await asyncio.to_thread(pack, self.model, adapters, self.how)
      except ValueError as error:
        why = f"stage: {error}"
        ended = {server: (State.ABORTED, why) for server in self._servers}
        return self._report(version, clock, ended, "")
    held = (name, packed.fingerprint)
    if name == self._named[0] and self._named != held:
      raise PushError(f"version {version} was committed with other adapters")
    clock.count("stage", packed.nbytes)
    with clock.phase("send"):
      await each(lambda server: self._load(server, name, packed, clock))
    with clock.phase("verify"):
      await each(lambda server: self._probe_named(server, name))
    with clock.phase("commit"):
      if len(ended) < len(self._servers):
        for server in self._servers:
          if server not in ended:
            server.holds = held
        self.requests.use_adapter(name, version)
        self._named = held
        self._retire_others(name)
    return self._report(version, clock, ended, packed.fingerprint)

  async def _meet(self, server: _Server, version: int) -> None:
    """Reads what it is and holds; a process that is new to us is tried.

    Raises PushError when the round must not start.
    """
    control = server.control
    facts = await control.facts()
    if not facts.get("enable_lora"):
      raise PushError(f"{control.url} serves no adapters: start it with --enable-lora")
    try:
      server.ranks = int(facts["tp_size"])
    except (KeyError, ValueError) as error:
      raise CallError("refused", f"{control.url}/server_info lacks {error}") from error
    server.listed = frozenset(await control.adapters())
    for name in server.listed:
      run_id, number = _read_name(name)
      if number is None:
        continue
      if run_id != self.run_id:
        raise PushError(f"{control.url} serves run {run_id!r}, this is {self.run_id!r}")
      if number > version:
        raise PushError(
          f"{control.url} holds version {number}, refusing to publish {version}: restart it, or "
          "resume from its version"
        )
    if process_of(facts) != server.process:
      server.holds = ("", "")
      await self._try(server)
      server.process = process_of(facts)

  async def _try(self, server: _Server) -> None:
    """Raises PushError when the server takes an adapter and answers as if it had none."""
    control, name = server.control, f"{self.run_id}:trial"
    if name in server.listed:
      await control.unload_adapter(name)
    packed = await asyncio.to_thread(trial, self.model, self.how)
    await control.load_adapter(name, packed.body, server.ranks)
    plain, adapted = await self._score(control, None), await self._score(control, name)
    await control.unload_adapter(name)
    change = max(abs(a - b) for a, b in zip(plain, adapted, strict=True))
    if not change > TRIAL_CHANGE:
      raise PushError(
        f"{control.url} took an adapter of random numbers, and no log-prob changed by more than "
        f"{change:g} nats, expected more than {TRIAL_CHANGE:g}: it does not apply adapters"
      )

  async def _load(self, server: _Server, name: str, packed: Packed, clock: Clock) -> None:
    """Has it load the adapter, whose bytes every rank compares with their checksums."""
    control = server.control
    if name in server.listed:
      if server.holds == (name, packed.fingerprint):
        return
      await control.unload_adapter(name)  # of a round that failed, or of an earlier trainer
    server.holds = ("", "")
    try:
      await control.load_adapter(name, packed.body, server.ranks)
    except CallError as error:
      if error.failure != "lost":
        raise
      try:  # ask before deciding
        listed = await control.adapters()
      except CallError as silence:
        raise _Unknown("lost", f"{error}; {silence}") from silence
      if name not in listed:
        raise
    clock.count("send", packed.nbytes)

  async def _probe_named(self, server: _Server, name: str) -> None:
    """It lists the adapter and answers by it."""
    control = server.control
    if name not in await control.adapters():
      raise CallError("refused", f"{control.url} does not list {name}: restarted")
    await self._score(control, name)

  async def _score(self, control: Control, name: str | None) -> list[float]:
    """Log-probs of a short prompt. Raises CallError when one is not finite."""
    ids = [i % self.model.config.vocab_size for i in range(PROMPT_TOKENS)]
    scores = await control.prompt_logp(ids, adapter=name)
    if len(scores) != len(ids) - 1 or not all(map(math.isfinite, scores)):
      raise CallError("refused", f"{control.url} answers by {name} with log-probs {scores}")
    return scores

  def _retire_others(self, name: str) -> None:
    """Unloads every other adapter of this run, each after its last request."""
    listed = {n for server in self._servers for n in server.listed}
    others = {n for n in listed if _read_name(n)[0] == self.run_id} - {name}
    for other in others - set(self._retiring):
      task = asyncio.create_task(self._retire(other))
      self._retiring[other] = task
      task.add_done_callback(lambda _, other=other: self._retiring.pop(other, None))

  async def _retire(self, name: str) -> None:
    """What fails here is listed at the next round, and tried again then."""
    await self.requests.adapter_ended(name)
    for server in self._servers:
      with contextlib.suppress(CallError):
        if name in await server.control.adapters():
          await server.control.unload_adapter(name)

  def _report(
    self,
    version: int,
    clock: Clock,
    ended: Mapping[_Server, tuple[State, str]],
    fingerprint: str,
  ) -> PushReport:
    """Beside a commit, a server that has not got the version does not serve it: FENCED."""
    committed = len(ended) < len(self._servers)
    receivers = {}
    for server in self._servers:
      state, _ = ended.get(server, (State.COMMITTED, ""))
      fenced = committed and state is State.ABORTED
      receivers[server.control.url] = State.FENCED if fenced else state
    states = set(receivers.values())
    if len(states) == 1:
      (state,) = states
    else:
      state = State.PARTIAL if committed else State.UNKNOWN
    message = "; ".join(why for _, why in ended.values())
    if state not in (State.COMMITTED, State.ABORTED):
      self.blocked = message
    return PushReport(version, state, "adapter", clock.phases, fingerprint, 0.0, receivers, message)


class _Unknown(CallError):
  """A load got no answer, and nothing says whether it happens yet."""


def _read_name(name: str) -> tuple[str, int | None]:
  """(run, version) of a name that a publisher gave; no version for any other."""
  run_id, _, number = name.rpartition(":")
  return run_id, int(number) if run_id and number.isdecimal() else None
