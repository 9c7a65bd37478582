"""Fiddlers that change where rollouts come from, and how weights get there:
`--config=fiddler:use_sglang --transport=disk`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl

from agentrl_jax.ops.quantize import OCP
from agentrl_jax.orchestrate import engines, served
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.sampler.placement import SamplerFp8
from agentrl_jax.transfer import delta
from agentrl_jax.transfer.transports import auto
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.mooncake import Mooncake
from agentrl_jax.transfer.transports.nixl import Nixl
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport

TRANSPORTS: Mapping[str, Callable[[], fdl.Config[auto.Choose]]] = {
  "auto": lambda: fdl.Config(auto.fastest),
  "nixl": lambda: fdl.Config(auto.one_sided, make=Nixl),
  "disk": lambda: fdl.Config(auto.only, make=DiskTransport),
  "mooncake": lambda: fdl.Config(auto.one_sided, make=Mooncake),
  "bucket": lambda: fdl.Config(auto.only, make=TensorTransport),
  "tcp": lambda: fdl.Config(auto.tcp),
  "tcp-xor": lambda: fdl.Config(auto.tcp, delta=delta.xor),
  "tcp-overwrite": lambda: fdl.Config(auto.tcp, delta=delta.overwrite),
  "broadcast": lambda: fdl.Config(engines.broadcast),
  "direct": lambda: fdl.Config(auto.only, make=DirectTransport),
}


def use_sglang(config: fdl.Config[Experiment]) -> None:
  """Rollouts from a SGLang server that the run starts, watches and stops. One that is there already
  keeps its settings.

  Raises ValueError after `use_fp8_sampler`, whose FP8 and wide `max_mismatch` are not a server's.
  """
  engine = config.engine
  if _is(engine, engines.embedded) and engine.fp8 != SamplerFp8():
    raise ValueError(
      "the engine is the embedded sampler with FP8, and max_mismatch is as wide as that needs: "
      "for a SGLang server leave use_fp8_sampler out, use_fp8 after use_sglang is the server's"
    )
  _use(config, engines.sglang)


def use_embedded(config: fdl.Config[Experiment]) -> None:
  """Rollouts from the JAX sampler in the trainer's process, whose settings stay where it is
  there already.
  """
  _use(config, engines.embedded)


def use_server(config: fdl.Config[Experiment], url: str, receiver: str = "") -> None:
  """Rollouts from a server that is running already, here or on another machine, which the run
  neither starts nor stops: SGLang, or `launch.serve --engine=embedded`. `receiver` is HOST:PORT of
  `agentrl_jax.transfer.receive` beside it, which the embedded one says itself.
  """
  _use(config, served.served)
  config.engine.url, config.engine.receiver = url, receiver


def use_transport(config: fdl.Config[Experiment], name: str) -> None:
  """Weights go to the server by one of `TRANSPORTS`.

  Raises ValueError for another name, or where the engine is in the trainer's process.
  """
  if name not in TRANSPORTS:
    raise ValueError(f"no transport {name!r}; there are {', '.join(TRANSPORTS)}")
  _server(config, "a transport", engines.sglang, served.served).transport = TRANSPORTS[name]()


def use_fp8(config: fdl.Config[Experiment]) -> None:
  """The SGLang server computes in bfloat16 with matrices in FP8, and weights are sent so.

  Raises ValueError where the engine is no SGLang server.
  """
  engine = _server(config, "FP8", engines.sglang)
  engine.quantization, engine.dtype = OCP, "bfloat16"


def _use(config: fdl.Config[Experiment], made: Callable[..., engines.OpenEngine]) -> None:
  if not _is(config.engine, made):
    config.engine = fdl.Config(made)


def _is(engine: Any, made: Callable[..., engines.OpenEngine]) -> bool:
  return isinstance(engine, fdl.Config) and fdl.get_callable(engine) is made


def _server(
  config: fdl.Config[Experiment], what: str, *kinds: Callable[..., engines.OpenEngine]
) -> fdl.Config[engines.OpenEngine]:
  engine = config.engine
  if not any(_is(engine, kind) for kind in kinds):
    before = " or use_server" if served.served in kinds else ""
    raise ValueError(
      f"{what} is for a SGLang server, the engine is {engine}: use_sglang{before} before it"
    )
  return engine
