"""Pushes into the real server: it then answers as transformers does on the exported checkpoint."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import llama
from agentrl_jax.models.hf import load_model, load_weights, save_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
from agentrl_jax.transfer.delta import overwrite, xor
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import PushError, State
from agentrl_jax.transfer.transports.broadcast import SENDER, BroadcastTransport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport
from tests.sglang_fixture import transformers_logp
from tests.transfer.test_tcp import local

pytestmark = pytest.mark.sglang

PROMPT = [3, 17, 101, 9, 56, 200, 77, 31, 8, 90, 14, 250]


def changed(weights, seed):
  """The weights with noise of a tenth of their size."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda w: w * jnp.asarray(1 + 0.1 * rng.normal(size=w.shape), w.dtype), weights
  )


def publish(server, model, weights, version, transport):
  async def main():
    publisher = sglang_publisher(
      model, [server.url], transport=transport, run_id="test", deadline=120
    )
    try:
      return await publisher.publish(weights, version)
    finally:
      await publisher.close()

  report = asyncio.run(main())
  assert report.state is State.COMMITTED, str(report)
  return report


def generate(server, **options):
  body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0} | options
  answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
  answer.raise_for_status()
  return answer.json()


def score(server):
  """(log-probs of PROMPT[1:], meta) as the server computes them."""
  meta = generate(server, sampling_params={"max_new_tokens": 1, "temperature": 1.0})["meta_info"]
  return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta


def reference(python, model, weights, source, directory):
  save_weights(model, weights, directory, copy_from=source)
  (want,) = transformers_logp(python, directory, [(PROMPT[:1], PROMPT[1:], 1.0)])
  return want


@pytest.fixture(scope="module")
def broadcast(sglang_python, tmp_path_factory):
  """Its sender takes seconds to start, so it outlives the publishers that use it."""
  root = tmp_path_factory.mktemp("broadcast")
  transport = BroadcastTransport([sglang_python, SENDER], root=root, bucket_bytes=1 << 16)
  close, transport.close = transport.close, lambda: None
  yield transport
  close()
  assert list(root.iterdir()) == []


@pytest.fixture(params=["disk", "tcp", "broadcast", "bucket", "direct"])
def transport(request, tmp_path):
  # A bucket of 64 kB makes several requests of the tiny model.
  if request.param == "disk":
    return DiskTransport(tmp_path / "staging", bucket_bytes=1 << 16)
  if request.param == "broadcast":
    return request.getfixturevalue("broadcast")
  if request.param == "tcp":
    return local(tmp_path / "received", owned=False, connections=2, bucket_bytes=1 << 16)
  if request.param == "direct":
    return DirectTransport(bucket_bytes=1 << 16)
  return TensorTransport(bucket_bytes=1 << 16)


@pytest.mark.parametrize(
  "mesh", [pytest.param({"fsdp": 8}, marks=pytest.mark.slow), {"fsdp": 4, "tensor": 2}], ids=str
)
def test_the_server_then_equals_transformers_on_the_export(
  sglang_server, sglang_python, tiny_llama, tmp_path, transport, mesh
):  # W23
  model = load_model(tiny_llama)
  weights = changed(load_weights(model, tiny_llama), seed=1)
  spread = jax.device_put(weights, shardings(model, make_mesh(**mesh)))
  report = publish(sglang_server, model, spread, 4, transport)
  got, meta = score(sglang_server)
  want = reference(sglang_python, model, weights, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  assert meta["weight_version"] == "test:4"
  assert report.phases["send"].nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


def test_a_layer_that_the_model_lacks_is_named_and_nothing_pauses(
  sglang_server, tiny_llama, tmp_path
):  # W7: the server has two layers, the pushed model one
  whole = load_model(tiny_llama)
  model = llama.bind(dataclasses.replace(whole.config, layers=1))
  weights = load_weights(whole, tiny_llama)
  first = weights.replace(layers=jax.tree.map(lambda w: w[:1], weights.layers))
  before, _ = score(sglang_server)
  with pytest.raises(PushError, match=r"holds model\.layers\.1\.\S+, .* old \(6 of 15 such\)"):
    publish(sglang_server, model, first, 1, DiskTransport(tmp_path / "staging"))
  after, meta = score(sglang_server)  # it was never paused
  assert (after, meta["weight_version"]) == (before, "default")


def test_one_weight_and_the_prefix_cache(
  sglang_server, sglang_python, tiny_llama, tmp_path, transport
):  # W12
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  publish(sglang_server, model, weights, 1, transport)
  score(sglang_server)
  generate(sglang_server, sampling_params={"max_new_tokens": 4, "temperature": 0.0})
  before, _ = score(sglang_server)  # the prompt is in the prefix cache now
  perturbed = weights.replace(
    layers=weights.layers.replace(
      attention=jax.tree.map(lambda w: w.at[0, 0, 0].add(1.0), weights.layers.attention)
    )
  )
  publish(sglang_server, model, perturbed, 2, transport)
  reply = generate(
    sglang_server, sampling_params={"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=-1
  )
  assert reply["meta_info"]["cached_tokens"] == 0
  after, _ = score(sglang_server)
  assert np.abs(np.subtract(after, before)).max() > 1e-3
  want = reference(sglang_python, model, perturbed, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(after, want, rtol=0, atol=1e-5)


def test_a_push_while_generating_marks_each_token(sglang_server, tiny_llama, transport):  # W8
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  publish(sglang_server, model, weights, 1, transport)

  async def main():
    publisher = sglang_publisher(
      model, [sglang_server.url], transport=transport, run_id="test", deadline=120
    )
    async with httpx.AsyncClient(timeout=120) as client:
      options = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
      running = asyncio.create_task(
        client.post(
          f"{sglang_server.url}/generate", json={"input_ids": PROMPT, "sampling_params": options}
        )
      )
      await asyncio.sleep(0.2)
      report = await publisher.publish(changed(weights, seed=2), 2)
      assert report.state is State.COMMITTED, str(report)
      reply = (await running).json()
    await publisher.close()
    return reply

  reply = asyncio.run(main())
  spans = reply["meta_info"]["weight_versions"]
  assert len(reply["output_ids"]) == 400  # retracted, not lost
  assert {span["version"] for span in spans} <= {"test:1", "test:2"}
  assert spans[0]["start"] == 0
  assert spans[-1]["end"] == 400


@pytest.mark.parametrize("how", [xor, overwrite], ids=lambda how: how.__name__)
def test_deltas_make_what_full_pushes_make(
  sglang_server, sglang_python, tiny_llama, tmp_path, how
):  # W26
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  last = jax.tree.map(lambda w: w + jnp.asarray(1e-3, w.dtype), weights)
  step = weights.replace(final_norm=weights.final_norm.at[0].add(0.5))
  transport = local(tmp_path / "received", delta=how, connections=2, bucket_bytes=1 << 16)

  async def main():
    publisher = sglang_publisher(
      model, [sglang_server.url], transport=transport, run_id="test", deadline=120
    )
    reports = [
      await publisher.publish(tree, version)
      for version, tree in enumerate([weights, step, step, last], start=1)
    ]
    await publisher.close()
    return reports

  reports = asyncio.run(main())
  assert [report.state for report in reports] == [State.COMMITTED] * 4
  assert reports[1].delivered == (f"{how.__name__} from version 1",)
  shares = [report.delivered_share for report in reports]
  assert shares[0] == 1.0 and shares[1] < 0.01 and shares[2] == 0.0 and shares[3] <= 1.0
  got, _ = score(sglang_server)
  want = reference(sglang_python, model, last, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_sender_that_is_killed_fences_the_server_and_is_replaced(
  sglang_server, sglang_python, tiny_llama, tmp_path, broadcast
):  # W9, W28: SGLang gives the broken group up, and takes part in the next
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  last = changed(weights, seed=3)
  publish(sglang_server, model, weights, 1, broadcast)
  sender, sent = broadcast._senders[sglang_server.url], []
  ask = sender.ask

  def dying(**request):
    sent.append(request)
    if len(sent) == 2:
      sender._process.kill()
    ask(**request)

  sender.ask = dying

  async def main():
    publisher = sglang_publisher(
      model, [sglang_server.url], transport=broadcast, run_id="test", deadline=60
    )
    report = await publisher.publish(changed(weights, seed=2), 2)
    assert report.state is State.FENCED, str(report)
    assert f"{sglang_server.url}/update_weights_from_distributed" in report.message
    await publisher.recover()
    report = await publisher.publish(last, 3)
    assert report.state is State.COMMITTED, str(report)
    await publisher.close()

  asyncio.run(main())
  assert len(sent) == 2
  got, _ = score(sglang_server)
  want = reference(sglang_python, model, last, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def pair_server(sglang_python, tiny_llama, tmp_path_factory) -> Iterator[SGLangServer]:
  """The same model over two tensor-parallel ranks."""
  options = ServerOptions(
    Path(tiny_llama),
    tensor_parallel=2,
    python=sglang_python,
    log=tmp_path_factory.mktemp("pair") / "server.log",
  )
  with SGLangServer(options) as server:
    yield server


@pytest.mark.slow
@pytest.mark.timeout(900)  # two ranks start slowly where the cores are busy, and six pushes follow
def test_two_tensor_parallel_ranks(pair_server, sglang_python, tiny_llama, broadcast, tmp_path):
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)
  transports = [
    DirectTransport(bucket_bytes=1 << 16),
    DiskTransport(tmp_path / "staging"),
    local(tmp_path / "received"),
    broadcast,
    TensorTransport(bucket_bytes=1 << 16),
    DirectTransport(),
  ]
  for version, transport in enumerate(transports, start=1):
    weights = changed(original, seed=version)
    spread = jax.device_put(weights, shardings(model, make_mesh(fsdp=4, tensor=2)))
    publish(pair_server, model, spread, version, transport)
    got, meta = score(pair_server)
    want = reference(sglang_python, model, weights, tiny_llama, tmp_path / f"export{version}")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert meta["weight_version"] == f"test:{version}"
