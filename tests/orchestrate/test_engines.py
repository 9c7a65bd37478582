"""How a run chooses the way of its weights, and a server that starts without any."""

import asyncio
import sys

import fiddle as fdl
import pytest
from fiddle.experimental import serialization

from agentrl_jax.models.hf import save_weights
from agentrl_jax.ops.quantize import FNUZ, OCP
from agentrl_jax.orchestrate import engines
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.rollout.engine import SamplingParams
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.transports import auto
from agentrl_jax.transfer.transports.auto import Servers, one_sided
from agentrl_jax.transfer.transports.mooncake import Mooncake
from agentrl_jax.transfer.transports.nixl import Nixl
from configs import (
  quickstart,
  tiny_rl,
  use_embedded,
  use_fp8,
  use_fp8_sampler,
  use_sglang,
  use_transport,
)
from configs.engines import TRANSPORTS
from tests.models.test_deepseek_v4 import V4
from tests.reference.plugins import write_plugin
from tests.sglang_fixture import REFERENCE
from tests.transfer.test_sglang_fp8 import MODEL, PROMPT, weights


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_is_part_of_the_configuration(name, sglang_python):
  config = quickstart()
  use_sglang(config)
  use_transport(config, name)
  again = serialization.load_json(serialization.dump_json(config))
  assert fdl.build(again).engine
  choose, servers = fdl.build(again.engine.transport), Servers(["http://127.0.0.1:1"], 1000)
  if name in ("nixl", "mooncake"):
    assert [library.name for library in choose.libraries] == [name]
    with pytest.raises(ValueError, match=f"{name} does not work: "):
      choose(servers)
    return
  choice = choose(servers)
  kind, _, delta = name.partition("-")
  assert choice.transport.name == ("disk" if kind == "auto" else kind)
  if kind == "tcp":
    assert getattr(choice.transport.delta, "__name__", "") == delta
  choice.transport.close()


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
def test_all_of_a_host_is_closed_whatever_one_part_raises(kind):
  closed = []

  class Part:
    def __init__(self, name, error=None):
      self.name, self.error = name, error

    async def close(self):
      closed.append(self.name)
      if self.error is not None:
        raise self.error

  class Server(Part):
    def close(self):
      closed.append(self.name)
      raise OSError("it does not end")

  first = kind("no answer")
  host = engines._SGLang(Server("server"), Part("engine"), Part("publisher", first), False)
  with pytest.raises(kind) as caught:
    asyncio.run(host.close())
  assert closed == ["publisher", "engine", "server"]
  assert caught.value is first or kind is asyncio.CancelledError  # which asyncio makes anew
  assert first.__notes__ == ["after it: OSError: it does not end"]


@pytest.mark.parametrize("library", [Nixl, Mooncake])
def test_a_library_that_is_missing_is_told_before_a_server_starts(library, tmp_path, monkeypatch):
  context = EngineContext(MODEL, {}, 0, tmp_path, tmp_path / "run", 64, 0)

  def opened():
    asyncio.run(engines.sglang(transport=one_sided(library))(context))

  monkeypatch.setattr(library, "why_not", lambda self: "not installed here")
  with pytest.raises(ValueError, match=f"{library.name} does not work: not installed here"):
    opened()
  monkeypatch.setattr(library, "why_not", lambda self: "")
  monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", sys.executable)  # which has no plug-in
  with pytest.raises(ValueError, match=r"has no plug-in .*pip install third_party/sglang/window"):
    opened()


def test_a_model_that_cannot_be_pushed_is_refused_before_a_server_starts(tmp_path):
  context = EngineContext(V4, {}, 0, tmp_path, tmp_path / "run", 64, 0)
  with pytest.raises(ValueError, match=r"deepseek_v4 is not pushed to a SGLang server, as .*tid2"):
    asyncio.run(engines.sglang()(context))


def test_what_cannot_be_is_refused_before_anything_starts():
  config = quickstart()
  with pytest.raises(
    ValueError, match=r"a transport is for a SGLang server, the engine is .*embed"
  ):
    use_transport(config, "disk")
  with pytest.raises(ValueError, match="FP8 is for a SGLang server"):
    use_fp8(config)
  use_sglang(config)
  with pytest.raises(ValueError, match="no transport 'pigeon'; there are auto, nixl, disk"):
    use_transport(config, "pigeon")
  with pytest.raises(ValueError, match=r"quantization is .*fnuz"):
    engines.sglang(quantization=FNUZ)
  with pytest.raises(ValueError, match="dtype is 'float32', a server of FP8 weights computes in"):
    engines.sglang(quantization=OCP)


def test_an_engine_that_is_asked_for_again_keeps_its_settings():
  config = tiny_rl()
  use_fp8_sampler(config)
  use_embedded(config)
  assert config.engine.fp8.weights and config.engine.slots == 128
  with pytest.raises(ValueError, match="max_mismatch is as wide as that needs"):
    use_sglang(config)
  config = tiny_rl()
  use_sglang(config)
  use_transport(config, "tcp")
  use_sglang(config)
  assert fdl.get_callable(config.engine.transport) is auto.tcp
  use_embedded(config)
  assert fdl.get_callable(config.engine) is engines.embedded


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_of_fp8_gets_all_weights_by_its_first_push(
  sglang_python, tmp_path, monkeypatch
):  # and its own checksums say so, as after every push
  plugins = tmp_path / "plugins"
  plugins.mkdir()
  write_plugin(plugins, REFERENCE / "sglang_fp8_cpu.py", "sglang_fp8_cpu:register")
  monkeypatch.setenv("PYTHONPATH", str(plugins))
  save_weights(MODEL, weights(0), tmp_path / "model")
  said = []
  context = EngineContext(
    MODEL, weights(1), 0, tmp_path / "model", tmp_path / "run", 64, 0, said.append
  )

  async def main():
    open_engine = engines.sglang(dtype="bfloat16", quantization=OCP, start_seconds=600)
    host = await open_engine(context)
    try:
      (line,) = said
      assert line == "transport nixl" or line.startswith("transport disk; nixl: ")
      assert await host.engine.version() == 0
      sampled = await host.engine.generate("a", PROMPT, SamplingParams(4, ()))
      assert list(sampled.version) == [0] * len(sampled.ids)
      report = await host.publisher.publish(weights(2), 1)
      assert report.state is State.COMMITTED, str(report)
      await host.revive(weights(2), 1)
      assert await host.engine.version() == 1
    finally:
      await host.close()

  asyncio.run(main())
