"""Adapter pushes into the real server: requests answer as transformers does on merged weights.

On CPU the server has `third_party/sglang/cpu_adapter` beside it, without which torch refuses the
pinned memory that SGLang keeps adapters in; everything else is SGLang's own.
"""

import asyncio
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.models import lora
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.lora import Lora
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.rollout.engine import SamplingParams
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer, has_cuda
from agentrl_jax.transfer.adapters import adapter_publisher, server_flags
from agentrl_jax.transfer.report import State
from tests.reference.plugins import write_plugin
from tests.transfer.test_sglang import PROMPT, generate, reference, score

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HOW = Lora(rank=4, alpha=8.0)
ADAPTER = Path(__file__).parents[2] / "third_party/sglang/cpu_adapter/agentrl_sglang_cpu"


@pytest.fixture(scope="module", params=[1, 2], ids="tensor_parallel={}".format)
def server(request, sglang_python, tiny_llama, tmp_path_factory):
  """Of two ranks, each has a part of every adapter."""
  log = tmp_path_factory.mktemp("log") / "server.log"
  with pytest.MonkeyPatch.context() as patch:
    plugins = tmp_path_factory.mktemp("plugins")
    write_plugin(plugins, ADAPTER, "agentrl_sglang_cpu.adapters:register")
    patch.setenv("PYTHONPATH", str(plugins))
    options = ServerOptions(
      tiny_llama,
      tensor_parallel=request.param,
      python=sglang_python,
      log=log,
      extra=server_flags(HOW, cuda=has_cuda()),
    )
    with SGLangServer(options) as server:
      yield server


def drawn(model, seed):
  """Adapters that change log-probs by tenths of nats."""
  rng = np.random.default_rng(seed)
  specs, tree = jax.tree.flatten(lora.abstract(model, HOW), is_leaf=lambda n: hasattr(n, "axes"))
  return tree.unflatten([jnp.asarray(0.1 * rng.normal(size=s.shape), jnp.float32) for s in specs])


def spread(adapters):
  """Replicated over eight devices."""
  return jax.device_put(adapters, NamedSharding(make_mesh(fsdp=8), PartitionSpec()))


def scored(server, name):
  """(log-probs of PROMPT[1:], cached tokens) by an adapter."""
  answer = generate(
    server, lora_path=name, sampling_params={"max_new_tokens": 1, "temperature": 1.0}
  )["meta_info"]
  return [entry[0] for entry in answer["input_token_logprobs"][1:]], answer["cached_tokens"]


def test_requests_are_answered_by_the_adapter_that_they_name(
  server, sglang_python, tiny_llama, tmp_path
):  # W22, W12
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  versions = {1: drawn(model, 1), 2: drawn(model, 2)}
  engine = SGLangEngine(server.url, model.config.vocab_size, server=server)
  publisher = adapter_publisher(model, HOW, [server.url], requests=engine, run_id="test")
  long = SamplingParams(300, (), temperature=1.0)

  def want(version):
    tree = lora.merged(weights, versions[version], HOW)
    return reference(sglang_python, model, tree, tiny_llama, tmp_path / f"export{version}")

  async def main():
    report = await publisher.publish(spread(versions[1]), 1)
    assert report.state is State.COMMITTED, str(report)
    first, _ = await asyncio.to_thread(scored, server, "test:1")
    np.testing.assert_allclose(first, await asyncio.to_thread(want, 1), rtol=0, atol=1e-5)
    running = asyncio.create_task(engine.generate("long", PROMPT, long))
    await asyncio.sleep(0.5)
    report = await publisher.publish(versions[2], 2)
    assert report.state is State.COMMITTED, str(report)
    assert not running.done()  # nothing paused, nothing waited
    second, cached = await asyncio.to_thread(scored, server, "test:2")
    assert cached == 0  # the prompt was in the prefix cache, of the other adapter
    np.testing.assert_allclose(second, await asyncio.to_thread(want, 2), rtol=0, atol=1e-5)
    still, _ = await asyncio.to_thread(scored, server, "test:1")
    np.testing.assert_allclose(still, first, rtol=0, atol=1e-5)
    next_ = await engine.generate("next", PROMPT, SamplingParams(4, (), temperature=1.0))
    assert set(next_.version.tolist()) == {2}
    made = await running
    assert set(made.version.tolist()) == {1}
    await asyncio.wait_for(publisher.retired(), 30)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed if card["parent"]] == ["test:2"]
    with pytest.raises(httpx.HTTPStatusError):
      await asyncio.to_thread(scored, server, "test:1")
    assert (await publisher.publish(versions[2], 2)).state is State.COMMITTED
    await publisher.close()
    await engine.close()
    return first, second

  first, second = asyncio.run(main())
  plain, _ = score(server)
  exact = reference(sglang_python, model, weights, tiny_llama, tmp_path / "base")
  np.testing.assert_allclose(plain, exact, rtol=0, atol=1e-5)  # the model is as it was
  for a, b in ((plain, first), (plain, second), (first, second)):
    assert np.abs(np.subtract(a, b)).max() > 1e-2
