"""Engines as the loop sees them: something that samples, a way to give it weights, and a way back
to life.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from agentrl_jax.models.lora import Lora
from agentrl_jax.models.model import Model
from agentrl_jax.ops.quantize import OCP, Quantization
from agentrl_jax.rollout.engine import Engine
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.rollout.sglang_server import (
  PORTS,
  ServerOptions,
  SGLangServer,
  find_python,
  has_cuda,
)
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.sampler.placement import NO_FP8, SamplerFp8
from agentrl_jax.transfer.adapters import adapter_publisher, server_flags
from agentrl_jax.transfer.embedded import embedded_publisher
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import Publisher, PushError, PushReport, State
from agentrl_jax.transfer.sources import Sources
from agentrl_jax.transfer.transports.auto import Choose, Servers, Windows, fastest, only
from agentrl_jax.transfer.transports.broadcast import SENDER, BroadcastTransport
from agentrl_jax.transfer.transports.window import Opening, opening, server_lacks


@dataclasses.dataclass(frozen=True)
class EngineContext:
  """What an engine is opened with: the trainer's model, what is to be served of it now, and where
  things are. With `lora` that is the adapters alone, beside the frozen weights of `directory`;
  `differs` says that it is not what `directory` holds, also before the first step; `sources` are
  the processes that hold later weights, where they are several.
  """

  model: Model
  weights: Any
  version: int
  directory: Path  # of the model the run started from
  workdir: Path
  context_tokens: int
  seed: int
  say: Callable[[str], None] = print  # one line to a person
  lora: Lora | None = None
  differs: bool = False
  sources: Sources | None = None


class Host(Protocol):
  """An engine and what the loop needs around it. After `open` it serves the context's weights."""

  @property
  def engine(self) -> Engine: ...

  @property
  def publisher(self) -> Publisher: ...

  async def revive(self, weights: Any, version: int) -> None:
    """Brings a dead engine back, serving `weights`. Raises EngineError or PushError if not."""
    ...

  async def flush(self) -> None:
    """Drops what the engine remembers of earlier prompts, where samples are reproducible at all: a
    run that was resumed must not differ by what its engine had cached.
    """
    ...

  async def close(self) -> None:
    """Stops what was started for this run, and nothing else. Idempotent."""
    ...


OpenEngine = Callable[[EngineContext], Awaitable[Host]]


def embedded(*, slots: int = 32, dtype: str = "float32", fp8: SamplerFp8 = NO_FP8) -> OpenEngine:
  """The JAX sampler in this process: no server, bit-exact resume, the same log-probs as the
  learner.

  Args:
    slots: sequences decoded at once.
    dtype: what it computes in.
    fp8: what of it is in FP8 instead.
  """

  async def open_engine(context: EngineContext) -> Host:
    if context.lora is not None:
      raise ValueError(
        "adapters are pushed to a SGLang server, the engine is the embedded sampler: it is given "
        "merged weights, without a wire between"
      )
    engine = EmbeddedEngine(
      context.model,
      context.weights,
      slots=slots,
      context=context.context_tokens,
      seed=context.seed,
      dtype=jnp.dtype(dtype),
      fp8=fp8,
      version=context.version,
    )
    return _Embedded(engine, embedded_publisher(engine))

  return open_engine


def sglang(
  *,
  dtype: str = "float32",
  tensor_parallel: int = 1,
  port: int = 0,
  transport: Choose | None = None,
  quantization: Quantization | None = None,
  start_seconds: float = 300.0,
  call_seconds: float = 300.0,
  push_seconds: float = 120.0,
) -> OpenEngine:
  """A SGLang server on this machine, started for the run; weights are pushed to it after every
  step.

  Args:
    dtype: what it computes in.
    tensor_parallel: devices (on CPU: cores) it is cut over.
    port: 0 takes a free one.
    transport: chooses the way in which weights move, and what it took is said at the start; None:
      `transports.auto.fastest()`.
    quantization: `OCP` serves the matrices as FP8 and sends them so. The server then starts without
      weights and gets all of them by its first push; `dtype` must be bfloat16.
    start_seconds: deadline until it answers.
    call_seconds: deadline of one turn.
    push_seconds: deadline of each phase of a push.
  """

  if quantization not in (None, OCP):
    raise ValueError(f"quantization is {quantization}, expected none or {OCP}")
  if quantization is not None and dtype != "bfloat16":
    raise ValueError(f"dtype is {dtype!r}, a server of FP8 weights computes in bfloat16")

  async def open_engine(context: EngineContext) -> Host:
    directory, extra = context.directory, ()
    if context.lora is not None:
      if quantization is not None:
        raise ValueError("the server's weights are FP8, which adapters alone do not bring there")
      extra = server_flags(context.lora, cuda=has_cuda())
    require_pushable(context.model)
    if quantization is not None:
      directory = fp8_model(context.directory, context.workdir / "served-fp8")
      extra = ("--load-format", "dummy")
    choose = transport or fastest()
    window, lacking = None, {}
    if context.lora is None:
      window, lacking = await asyncio.to_thread(window_for, choose, tensor_parallel)
    server = SGLangServer(
      ServerOptions(
        directory,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        port=port,
        context_length=context.context_tokens,
        start_seconds=start_seconds,
        log=context.workdir / "sglang.log",
        extra=extra,
        environment=window.environment() if window else {},
      )
    )
    async with contextlib.AsyncExitStack() as opened:
      if window is not None:
        opened.callback(window.close)
      opened.push_async_callback(asyncio.to_thread, server.close)
      await asyncio.to_thread(server.start)
      vocab_size = context.model.config.vocab_size
      engine = SGLangEngine(server.url, vocab_size, server=server, call_seconds=call_seconds)
      run_id = run_id_of(context.workdir)
      if context.lora is not None:
        context.say("transport adapter: the model stays as the server loaded it")
        publisher: Publisher = adapter_publisher(
          context.model,
          context.lora,
          [server.url],
          requests=engine,
          run_id=run_id,
          deadline=push_seconds,
        )
      else:
        servers = Servers(
          [server.url],
          nbytes_of(context.weights, dtype),
          tensor_parallel,
          Windows({server.url: window.address}, window.token) if window else None,
          lacking,
        )
        choice = choose(servers)
        context.say(str(choice))
        publisher = sglang_publisher(
          context.model,
          servers.urls,
          transport=choice.transport,
          run_id=run_id,
          deadline=push_seconds,
          quantization=quantization,
          sources=context.sources,
        )
      opened.push_async_callback(publisher.close)
      starts_without = quantization is not None or context.lora is not None or context.differs
      host = _SGLang(server, engine, publisher, starts_without, window)
      if context.version or host.starts_without:
        await host.serve(context.weights, context.version)
      await engine.probe(tolerance=1e-3 if dtype == "float32" else 0.1)
      opened.pop_all()
    return host

  return open_engine


def broadcast() -> Choose:
  """Process groups whose senders run in SGLang's environment on this machine."""
  return only(lambda: BroadcastTransport([str(find_python()), str(SENDER)]))


def require_pushable(model: Model) -> None:
  """Raises ValueError for a model that no push brings to a SGLang server, before one starts."""
  if whole := [rule.name for rule in model.rules if rule.whole]:
    raise ValueError(
      f"{model.family} is not pushed to a SGLang server, as {whole[0]} holds whole numbers: "
      "use_embedded"
    )


def window_for(choose: Choose, ranks: int) -> tuple[Opening | None, Mapping[str, str]]:
  """How a server of so many ranks is started so that one-sided writes work, and by library why they
  do not.

  Raises ValueError where they do not and nothing else is to be taken.
  """
  lacking = {library.name: library.why_not() for library in choose.libraries}
  if names := [name for name, reason in lacking.items() if not reason]:
    lacking |= server_lacks(find_python(), names)
  if not all(lacking.values()):
    return opening(ranks, PORTS), lacking
  if not choose.otherwise:
    raise ValueError("; ".join(f"{name} does not work: {why}" for name, why in lacking.items()))
  return None, lacking


@dataclasses.dataclass
class _Embedded:
  engine: EmbeddedEngine
  publisher: Publisher

  async def revive(self, weights: Any, version: int) -> None:
    await self.publisher.publish(weights, version)

  async def flush(self) -> None:
    await self.engine.flush()

  async def close(self) -> None:
    await close_all(self.publisher.close, self.engine.close)


@dataclasses.dataclass
class _SGLang:
  server: SGLangServer
  engine: SGLangEngine
  publisher: Publisher
  starts_without: bool  # the server has no weights, others, or no adapter, until the first push
  window: Opening | None = None

  async def serve(self, weights: Any, version: int) -> None:
    require_committed(await self.publisher.publish(weights, version))

  async def revive(self, weights: Any, version: int) -> None:
    await asyncio.to_thread(self.server.restart)
    await self.publisher.recover()
    if version or self.starts_without:
      await self.serve(weights, version)

  async def flush(self) -> None:
    """Nothing: SGLang's samples depend on timing, so no two runs of it are equal anyway."""

  async def close(self) -> None:
    owned = [self.server] if self.window is None else [self.server, self.window]
    ends = [functools.partial(asyncio.to_thread, part.close) for part in owned]
    await close_all(self.publisher.close, self.engine.close, *ends)


async def close_all(*closes: Callable[[], Awaitable[None]]) -> None:
  """Calls all, in order, then raises the first error, which tells of the others."""
  errors: list[BaseException] = []
  for close in closes:
    try:
      await close()
    except BaseException as error:  # also where this is cancelled: a server must not stay behind
      errors.append(error)
  if errors:
    for later in errors[1:]:
      errors[0].add_note(f"after it: {type(later).__name__}: {later}")
    raise errors[0]


def run_id_of(workdir: Path) -> str:
  """The same for every start of one run, different for two runs whose folders share a name."""
  path = workdir.resolve()
  digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
  return re.sub(r"[^\w.-]", "_", f"{path.name}-{digest}")


def nbytes_of(weights: Any, dtype: str) -> int:
  """Of a weight tree in `dtype`."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)) * jnp.dtype(dtype).itemsize


def fp8_model(source: Path, directory: Path) -> Path:
  """A model directory without weights that has a server hold `source` as `OCP` would send it."""
  config = json.loads((source / "config.json").read_text())
  how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": OCP.block}
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
  return directory


def require_committed(report: PushReport) -> PushReport:
  """The report of a push that ended well. Raises PushError with its story otherwise."""
  if report.state is not State.COMMITTED:
    raise PushError(str(report))
  return report
