"""An engine that is somebody else's: a server that runs already, here or on another machine."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax.numpy as jnp

from agentrl_jax.models.hf import load_model
from agentrl_jax.models.model import Model
from agentrl_jax.orchestrate.engines import (
  EngineContext,
  Host,
  OpenEngine,
  nbytes_of,
  require_committed,
  require_pushable,
  run_id_of,
)
from agentrl_jax.rollout.engine import EngineError
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.transfer.control import CLAIMED, FENCED, CallError, Control, make_client
from agentrl_jax.transfer.push import SGLangPublisher, sglang_publisher
from agentrl_jax.transfer.transports.auto import Choice, Choose, Servers, away_from_here, fastest
from agentrl_jax.transfer.transports.disk import shared_memory

_POLL_SECONDS = 0.5
_ASK_SECONDS = 10.0  # for a server to say what it is
_CLAIM_SECONDS = 1.0  # for the stamp of another run that found the server free, too
_ON_THIS_MACHINE = ("disk", "broadcast")  # transports that write shared memory, or listen on it


def served(
  *,
  url: str,
  receiver: str = "",
  transport: Choose | None = None,
  start_seconds: float = 120.0,
  call_seconds: float = 300.0,
  push_seconds: float = 120.0,
  heartbeat_seconds: float = 5.0,
) -> OpenEngine:
  """A SGLang server, or the embedded sampler's (`launch.serve --engine=embedded`), that is running
  already. The run gives it its weights, also at its start, and neither starts nor stops it.

  Args:
    url: of the server.
    receiver: HOST:PORT of a receiver of weights beside it; "" takes what the server says.
    transport: as of `sglang`.
    start_seconds: deadline until it answers, at the start and after its death.
    call_seconds: deadline of one turn.
    push_seconds: deadline of each phase of a push.
    heartbeat_seconds: between questions whether it lives, while turns are under way.

  Raises ValueError for a URL without its scheme, which no waiting would bring up.
  """
  if not url.startswith(("http://", "https://")):
    raise ValueError(f"the server's url is {url!r}, expected http://HOST:PORT")

  async def open_engine(context: EngineContext) -> Host:
    if context.lora is not None:
      raise ValueError("adapters are pushed to a SGLang server that the run starts: use_sglang")
    require_pushable(context.model)
    run_id = run_id_of(context.workdir)
    async with contextlib.AsyncExitStack() as opened:
      client = make_client()
      opened.push_async_callback(client.aclose)
      control = Control(url, client, _ASK_SECONDS)

      async def ready() -> Mapping[str, Any]:
        facts = await answering(control, start_seconds, context.say)
        require_model(url, facts, context.model, context.context_tokens)
        return facts

      async def claimed(facts: Mapping[str, Any]) -> None:
        seconds = 0.0 if facts.get("engine") == "embedded" else _CLAIM_SECONDS
        await claim(control, run_id, seconds, context.say)

      facts = await ready()
      choice = await asyncio.to_thread(
        chosen, transport or fastest(), control.url, facts, receiver, context
      )
      context.say(str(choice))
      publisher = sglang_publisher(
        context.model,
        [control.url],
        transport=choice.transport,
        run_id=run_id,
        deadline=push_seconds,
        sources=context.sources,
      )
      opened.push_async_callback(publisher.close)
      engine = SGLangEngine(
        url,
        context.model.config.vocab_size,
        name=f"server {url}",
        call_seconds=call_seconds,
        heartbeat_seconds=heartbeat_seconds,
        run_id=run_id,
      )
      opened.push_async_callback(engine.close)

      async def leave() -> None:
        with contextlib.suppress(CallError):  # it may be gone
          await release(control, run_id, fenced=publisher.fenced)

      opened.push_async_callback(leave)
      # A killed trainer may have pushed more than its last checkpoint has: this run begins again.
      await claimed(facts)
      require_committed(await publisher.publish(context.weights, context.version))
      await engine.probe(tolerance=1e-3 if facts["dtype"] == "float32" else 0.1)

      async def back() -> None:
        await claimed(await ready())

      return _Served(engine, publisher, back, opened.pop_all())

  return open_engine


@dataclasses.dataclass
class _Served:
  engine: SGLangEngine
  publisher: SGLangPublisher
  back: Callable[[], Awaitable[None]]  # once it answers again, and is this run's
  opened: contextlib.AsyncExitStack

  async def revive(self, weights: Any, version: int) -> None:
    """Waits until whoever runs the server has brought it back."""
    await self.back()
    await self.publisher.recover()
    require_committed(await self.publisher.publish(weights, version))

  async def flush(self) -> None:
    """Nothing: what is batched together depends on timing, so no two runs are equal anyway."""

  async def close(self) -> None:
    """Leaves the server to another run."""
    await self.opened.aclose()


async def claim(control: Control, run_id: str, seconds: float, say: Callable[[str], None]) -> None:
  """Makes a server this run's, before anything is sent to it.

  The embedded server compares and stamps in one step. SGLang does not: who stamped it waits
  `seconds`, in which others that found it free stamp it, too, and the last of them has it (as in
  Fischer's mutual exclusion). One that is later still is seen before the first byte is written, by
  `SGLangPublisher`.

  Raises EngineError, naming the run that has it.
  """
  held = await control.held()
  if held.run_id not in (None, run_id) and not held.fenced:
    raise EngineError(
      f"{control.url} serves run {held.run_id!r}, this is {run_id!r}: let that one end, or, where "
      "it is gone, take its stamp off (docs/transfer.md)"
    )
  refused = ""
  try:
    await control.stamp(f"{run_id}:{CLAIMED}", held.text)
  except CallError as error:
    refused = str(error)
  await asyncio.sleep(seconds)
  now = await control.held()
  if now.run_id not in (None, held.run_id, run_id):
    raise EngineError(
      f"{control.url} was taken by run {now.run_id!r}, which began at the same moment as this one, "
      f"{run_id!r}: nothing was sent to it"
    )
  if refused or now.run_id != run_id:
    raise EngineError(f"{control.url} did not become this run's: {refused or now.text}")
  if held.fenced:
    say(
      f"{control.url} was left paused by run {held.run_id!r} after a push that failed: this run's "
      "weights replace what it holds"
    )


async def release(control: Control, run_id: str, *, fenced: bool) -> None:
  """Leaves a server that bears this run's stamp to the next: as it serves, or paused, which its
  stamp then says. Raises CallError.
  """
  held = await control.held()
  if held.run_id != run_id:
    return
  if fenced:
    await control.pause("abort")
    await control.stamp(f"{run_id}:{FENCED}", held.text)
  else:
    await control.set_version("default")


async def answering(
  control: Control, seconds: float, say: Callable[[str], None]
) -> Mapping[str, Any]:
  """What the server says that it is, once it says so. Raises EngineError after so many seconds."""
  ends, told = time.monotonic() + seconds, False
  while True:
    try:
      return await control.facts()
    except CallError as error:
      if time.monotonic() > ends:
        raise EngineError(f"no server at {control.url} within {seconds:g} s: {error}") from error
      if not told:
        say(f"waiting up to {seconds:g} s for a server at {control.url}: {error}")
      told = True
      await asyncio.sleep(_POLL_SECONDS)


def require_model(url: str, facts: Mapping[str, Any], model: Model, context_tokens: int) -> None:
  """Raises EngineError where a server cannot be one for this model, naming what differs.

  SGLang tells its directory alone, which is looked into where it is on this machine, too.
  """
  ours, fields = _written(model), facts.get("model_config")
  if fields is None and (Path(facts.get("model_path", "")) / "config.json").is_file():
    fields = _written(load_model(facts["model_path"]))
  fields = ours if fields is None else fields
  for name in sorted(ours.keys() | fields.keys()):
    if ours.get(name) != fields.get(name):
      raise EngineError(
        f"{url} serves another model: its {name} is {fields.get(name)}, this run's {ours.get(name)}"
      )
  length = facts.get("context_length") or context_tokens
  if length < context_tokens:
    raise EngineError(
      f"{url} takes {length} tokens, the run's limits.context_tokens are {context_tokens}"
    )
  if (quantization := facts.get("quantization")) is not None:
    raise EngineError(f"{url} serves {quantization} weights, which only a run's own server gets")
  if facts.get("dtype") not in ("float32", "bfloat16", "float16"):
    raise EngineError(f"{url} computes in {facts.get('dtype')!r}: start it with --dtype")


def _written(model: Model) -> dict[str, Any]:
  return json.loads(json.dumps(model.functions.to_hf(model.config)))


def chosen(
  choose: Choose, url: str, facts: Mapping[str, Any], receiver: str, context: EngineContext
) -> Choice:
  """The way of the weights. Raises ValueError where the server cannot be reached that way."""
  port = facts.get("receiver_port")
  address = receiver or (f"{urlsplit(url).hostname}:{port}" if port else "")
  here = None
  if "shared_memory" in facts:
    here = bool(facts["shared_memory"]) and facts["shared_memory"] == shared_memory()
  servers = Servers(
    [url],
    nbytes_of(context.weights, str(jnp.dtype(facts["dtype"]))),
    int(facts["tp_size"]),
    receivers={url: address} if address else {},
    here=here,
  )
  choice = choose(servers)
  name, taken = choice.transport.name, facts.get("transports")
  reason = ""
  if taken is not None and name not in taken:
    reason = f"takes weights by {' or '.join(taken)}, not by {name}"
  elif name in _ON_THIS_MACHINE and away_from_here(servers):
    reason = f"does not share this machine's memory, which {name} needs: --transport=tcp"
  if reason:
    choice.transport.close()
    raise ValueError("; ".join([f"{url} {reason}", *choice.passed_over]))
  return choice
