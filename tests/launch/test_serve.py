"""`launch.serve --engine=embedded`, a real process, with our own client and our own publisher."""

import asyncio
import contextlib
import importlib
import os
import pathlib
import signal
import sys
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax.models import llama
from agentrl_jax.models.hf import save_weights
from agentrl_jax.rollout.engine import EngineDead, SamplingParams
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.sampler import server as server_module
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import PushError, State
from agentrl_jax.transfer.transports.disk import DiskTransport, load_files
from agentrl_jax.transfer.transports.tcp import TcpTransport
from tests.launch.commands import run_refused
from tests.launch.served import SECRET, Served, received
from tests.reference.transfer import random_weights
from tests.transfer.test_soak import at
from tests.transfer.test_tcp import Tap

VOCAB, SLOTS, CONTEXT = 97, 4, 128  # a vocabulary that SGLang would pad
MODEL = llama.bind(
  llama.Config(
    vocab_size=VOCAB, embed=32, ffw=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_position=128
  )
)
PROMPTS = [[5, 6, 7], list(range(40)), [96]]
OPTIONS = (f"--slots={SLOTS}", f"--context_length={CONTEXT}", "--seed=3")


def weights(seed):
  return jax.tree.map(lambda w: jnp.float32(0.2) * w, random_weights(MODEL, seed))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("served") / "model"
  save_weights(MODEL, weights(0), path)
  return path


@pytest.fixture(scope="module")
def running(directory):
  served = Served(directory, *OPTIONS).wait()
  yield served
  served.process.kill()


@pytest.fixture
def server(running, directory):
  """The running server at the weights of its directory, in nobody's name."""
  post(running, "/pause_generation", {"mode": "abort"})
  post(running, "/update_weights_from_disk", {"model_path": str(directory)})
  post(running, "/update_weight_version", {"new_version": "default"})
  post(running, "/continue_generation", {})
  return running


def post(server, route, body, status=200):
  answer = httpx.post(server.url + route, json=body, timeout=60, trust_env=False)
  assert answer.status_code == status, answer.text
  return answer.json()


def get(server, route):
  return httpx.get(server.url + route, timeout=60, trust_env=False).json()


@contextlib.asynccontextmanager
async def publishing(server, transport, deadline=30.0):
  publisher = sglang_publisher(
    MODEL, [server.url], transport=transport, run_id="run", deadline=deadline
  )
  try:
    yield publisher
  finally:
    await publisher.close()


def transport(way, server, root, address=None):
  if way == "disk":
    return DiskTransport(root)
  return TcpTransport({server.url: address or server.receiver}, SECRET, connections=2)


@pytest.mark.parametrize("way", ["disk", "tcp"])
def test_a_server_samples_what_the_engine_in_process_does_before_and_after_a_push(
  way, server, tmp_path
):
  async def main():
    here = EmbeddedEngine(MODEL, weights(0), slots=SLOTS, context=CONTEXT, seed=3)
    there = SGLangEngine(server.url, VOCAB)
    async with publishing(server, transport(way, server, tmp_path)) as publisher:
      for version in (0, 1, 2):
        if version:
          await here.load(weights(version), version)
          report = await publisher.publish(weights(version), version)
          assert report.state is State.COMMITTED, str(report)
        for k, prompt in enumerate(PROMPTS):
          params = SamplingParams(20, (11, 12), 0.9, seed=k)
          ours = await here.generate(f"{k}", prompt, params)
          theirs = await there.generate(f"{k}", prompt, params)
          assert theirs.finish == ours.finish
          np.testing.assert_array_equal(theirs.ids, ours.ids)
          np.testing.assert_array_equal(theirs.logp, ours.logp)
          np.testing.assert_array_equal(theirs.version, ours.version)
        assert await there.version() == version
        # Last: what it leaves in the cache would change how a prompt that shares it is computed.
        assert await there.probe() < 1e-5 and there.seeded
    await here.close()
    await there.close()

  asyncio.run(main())
  assert received() == []


@pytest.mark.parametrize("way", ["disk", "tcp"])
def test_every_token_has_the_version_that_made_it_while_pushes_are_in_flight(way, server, tmp_path):
  base, pushes = weights(0), 6

  async def main():
    engine, made, ended = SGLangEngine(server.url, VOCAB), [], asyncio.Event()

    async def sample(number):
      while not ended.is_set():
        prompt = [number, len(made) % VOCAB]
        made.append(
          await engine.generate(f"{number}-{len(made)}", prompt, SamplingParams(120, (), 0.0))
        )

    async with publishing(server, transport(way, server, tmp_path)) as publisher:
      samplers = []
      for version in range(pushes):
        report = await publisher.publish(at(base, version), version)
        assert report.state is State.COMMITTED, str(report)
        samplers = samplers or [asyncio.create_task(sample(n)) for n in range(SLOTS + 2)]
        async with asyncio.timeout(60):
          while not any(version in generation.version for generation in made):
            await asyncio.sleep(0.01)
      ended.set()
      await asyncio.gather(*samplers)
    await engine.close()
    return made

  made = asyncio.run(main())
  for generation in made:
    np.testing.assert_array_equal((generation.ids - 4) // 2, generation.version)
  assert any(len(set(generation.version.tolist())) > 1 for generation in made)


@pytest.mark.parametrize(
  ("devices", "said"),
  [
    (2, ""),
    (3, "4 heads and 2 kv_heads are no multiple of tensor_parallel 3: whole on each device"),
  ],
)
def test_a_model_cut_over_devices_and_in_bfloat16_is_pushed_whole(
  devices, said, directory, tmp_path
):
  flags = (f"--tensor_parallel={devices}", "--dtype=bfloat16", "--host=0.0.0.0")
  served = Served(directory, *OPTIONS, *flags).wait()
  assert [line for line in served.lines if "no multiple" in line] == ([said] if said else [])
  assert served.url.startswith("http://0.0.0.0:") and served.receiver.startswith("0.0.0.0:")
  served.url = f"http://127.0.0.1:{served.port}"
  served.receiver = f"127.0.0.1:{served.receiver_port}"

  async def main():
    engine = SGLangEngine(served.url, VOCAB)
    async with publishing(served, transport("tcp", served, tmp_path)) as publisher:
      report = await publisher.publish(weights(1), 1)
      assert report.state is State.COMMITTED, str(report)  # by checksums of what its devices hold
    assert await engine.probe(tolerance=0.1) < 0.1
    assert await engine.version() == 1
    await engine.close()

  asyncio.run(main())
  assert served.stop(signal.SIGINT)[0] == 0


class Flipping(DiskTransport):
  """The server reads other files than those that were staged, of which one bit differs."""

  flips = True

  async def send(self, staged, peer, ranks):
    if not self.flips:
      return await super().send(staged, peer, ranks)
    (path,) = self.files(staged.key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    copy = self.root / "flipped"
    copy.mkdir()
    (copy / path.name).write_bytes(data)
    await load_files(peer, str(copy))


def test_weights_with_another_digest_sample_nothing_until_they_are_replaced(server, tmp_path):
  async def main():
    engine, flipping = SGLangEngine(server.url, VOCAB), Flipping(tmp_path)
    async with publishing(server, flipping) as publisher:
      report = await publisher.publish(weights(1), 1)
      assert report.state is State.FENCED
      assert "failed verification" in report.message and "(1 of " in report.message
      waiting = asyncio.create_task(engine.generate("a", [1], SamplingParams(4, ())))
      with pytest.raises(CallError, match="have no version yet: they sample nothing before"):
        await publisher._peers[0].control.resume()
      await asyncio.sleep(0.3)
      assert not waiting.done()
      flipping.flips = False
      with pytest.raises(PushError, match="recover"):
        await publisher.publish(weights(1), 1)
      await publisher.recover()
      assert (await publisher.publish(weights(1), 1)).state is State.COMMITTED
      assert (await waiting).version.tolist() == [1] * 4
    await engine.close()

  asyncio.run(main())


def test_a_bucket_with_another_digest_changes_nothing(server, tmp_path):
  tap = Tap(server.receiver)

  async def main():
    async with publishing(server, transport("tcp", server, tmp_path, tap.address)) as publisher:
      tap.arm("flip", 2)
      report = await publisher.publish(weights(1), 1)
      assert report.state is State.ABORTED, str(report)
    assert get(server, "/model_info")["weight_version"] == "default"
    assert post(server, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})

  asyncio.run(main())
  tap.listener.close()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"input_ids": [1, VOCAB]}, "prompt has id 97, outside"),
    ({"input_ids": []}, "the prompt is empty"),
    ({"input_ids": "text"}, "input_ids is text, expected a list"),
    ({"input_ids": [[1]]}, "input_ids[0] is [1], expected a whole number"),
    ({"input_ids": [1] * CONTEXT}, "more than the context of 128"),
    ({"sampling_params": {"top_p": 0.9}}, "sampling_params.top_p is 0.9"),
    ({"sampling_params": {"temperature": -1}}, "temperature is -1.0"),
    ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids[0] is -1"),
    ({"sampling_params": {"regex": "a"}}, "sampling_params.regex is not taken here"),
    ({"text": "hello"}, "text is not taken here"),
    ({"top_logprobs_num": 2}, "top_logprobs_num is 2 for 4 tokens"),
    ({"stream": True}, "stream is set"),
    ({"lora_path": "a"}, "lora_path is 'a'"),
    ({"sampling_params": {"temperature": 10**400}}, "temperature is 1000"),
  ],
)
def test_a_bad_request_is_told_its_value(change, message, server):
  body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
  for name, value in change.items():
    body[name] = {**body.get(name, {}), **value} if isinstance(value, dict) else value
  assert message in post(server, "/generate", body, 400)["message"]


def test_a_bad_control_call_is_told_its_value_and_changes_nothing(server, directory, tmp_path):
  good = load_file(directory / "model.safetensors")
  name = "model.norm.weight"
  lacking = {n: a for n, a in good.items() if n != name}
  wrong = {"lacking": lacking, "nan": good | {name: good[name] * np.nan}, "none": {}}
  for folder, tensors in wrong.items():
    (tmp_path / folder).mkdir()
    if tensors:
      save_file(tensors, tmp_path / folder / "model.safetensors")
  (tmp_path / "twice").mkdir()
  save_file(good, tmp_path / "twice" / "a.safetensors")
  save_file({name: good[name]}, tmp_path / "twice" / "b.safetensors")
  before = post(server, "/weights_checker", {"action": "checksum"})
  here = {"model_path": str(directory)}
  refusals = [
    ("/update_weights_from_disk", here, "while generation is paused"),
    ("/pause_generation", {"mode": "nap"}, "mode is 'nap'"),
    ("/update_weight_version", {}, "new_version is None"),
    ("/weights_checker", {"action": "reset"}, "action is 'reset'"),
    ("/abort_request", {}, "rid is None"),
  ]
  paused = [
    ("lacking", f"1 missing tensors: {name}"),
    ("nan", f"{name}: numbers that are not finite"),
    ("none", "no safetensors files"),
    ("twice", f"b.safetensors: {name} is in another file, too"),
    ("nowhere", "no safetensors files"),
  ]
  for route, body, message in refusals:
    assert message in post(server, route, body, 400)["message"]
  post(server, "/pause_generation", {"mode": "retract"})
  for folder, message in paused:
    body = {"model_path": str(tmp_path / folder)}
    assert message in post(server, "/update_weights_from_disk", body, 400)["message"]
  body = here | {"load_format": "gguf"}
  assert "load_format is 'gguf'" in post(server, "/update_weights_from_disk", body, 400)["message"]
  post(server, "/continue_generation", {})
  assert post(server, "/weights_checker", {"action": "checksum"}) == before
  for content, message in [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    (r'{"\ud800": 1}', r"\ud800 is not taken here"),
  ]:
    answer = httpx.post(f"{server.url}/generate", content=content, timeout=60, trust_env=False)
    assert (answer.status_code, message in answer.text) == (400, True)
  answer = httpx.post(f"{server.url}/update_weights_from_tensor", timeout=60, trust_env=False)
  assert (answer.status_code, "is not served by the embedded" in answer.text) == (404, True)


def test_a_client_that_leaves_ends_its_request_and_an_abort_gives_what_there_is(server):
  def sampled():
    return get(server, "/server_info")["counters"]["sampled_tokens"]

  async def main():
    engine = SGLangEngine(server.url, VOCAB)
    await engine.generate("first", [1], SamplingParams(1, ()))
    before = sampled()
    post(server, "/pause_generation", {"mode": "retract"})
    leaving = asyncio.create_task(engine.generate("a", [1], SamplingParams(50, ())))
    body = {"rid": "b", "input_ids": [2], "sampling_params": {"max_new_tokens": 50}}
    with pytest.raises(httpx.ReadTimeout):
      await asyncio.to_thread(httpx.post, f"{server.url}/generate", json=body, timeout=0.5)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    staying = asyncio.create_task(engine.generate("c", [3], SamplingParams(50, ())))
    await asyncio.sleep(0.3)
    await engine.abort("c")
    await engine.abort("unknown")
    assert ((await staying).finish, len((await staying).ids)) == ("abort", 0)
    post(server, "/continue_generation", {})
    await engine.generate("b", [2], SamplingParams(3, ()))  # its name is free again
    assert sampled() == before + 3
    await engine.close()

  asyncio.run(main())


def test_a_version_is_not_renamed_under_running_requests(server):
  async def main():
    engine = SGLangEngine(server.url, VOCAB)
    post(server, "/pause_generation", {"mode": "retract"})
    running = asyncio.create_task(engine.generate("a", [1], SamplingParams(4, ())))
    await asyncio.sleep(0.3)
    body = {"new_version": "run:7", "abort_all_requests": False}
    refused = post(server, "/update_weight_version", body, 400)
    assert "requests run under 'default'" in refused["message"]
    post(server, "/continue_generation", {})
    assert (await running).version.tolist() == [0] * 4
    post(server, "/update_weight_version", body)
    assert (await engine.generate("a", [1], SamplingParams(2, ()))).version.tolist() == [7, 7]
    await engine.close()

  asyncio.run(main())


def test_a_receiver_that_dies_alone_is_started_again(directory, tmp_path):
  served = Served(directory, *OPTIONS).wait()
  (receiver,) = [
    int(process)
    for process in os.listdir("/proc")
    if process.isdecimal() and parent(int(process)) == served.process.pid
  ]

  way = transport("tcp", served, tmp_path)
  deliver = way.deliver

  async def killing(*arguments):
    way.deliver = deliver
    os.kill(receiver, signal.SIGKILL)
    return await deliver(*arguments)

  async def main():
    async with publishing(served, way) as publisher:
      assert (await publisher.publish(weights(1), 1)).state is State.COMMITTED
      way.deliver = killing
      report = await publisher.publish(weights(2), 2)
      assert report.state is State.ABORTED, str(report)  # it serves what it did
      assert f"receiver {served.receiver}" in report.message
      assert get(served, "/model_info")["weight_version"] == "run:1"
      async with asyncio.timeout(60):
        while not any("died" in line for line in served.lines):
          await asyncio.sleep(0.1)
      report = await publisher.publish(weights(2), 2)
      assert report.state is State.COMMITTED, str(report)

  asyncio.run(main())
  said = f"the receiver of weights at {served.receiver} died and was started again"
  code, lines = served.stop(signal.SIGTERM)
  assert code == 0 and said in lines
  with pytest.raises(httpx.ConnectError):
    httpx.get(f"http://{served.receiver}", trust_env=False)
  assert received() == []


def parent(process):
  """Its parent's id, 0 where it is gone."""
  with contextlib.suppress(OSError):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
  return 0


def test_a_stamp_says_whose_the_server_is_and_names_no_weights(server, directory):
  only = {"abort_all_requests": False, "names_weights": False}

  def stamp(text, old, status=200):
    body = only | {"new_version": text, "old_version": old}
    return post(server, "/update_weight_version", body, status)

  stamp("a:claimed", "default")
  assert "bears 'a:claimed', not 'default'" in stamp("b:claimed", "default", 400)["message"]
  assert get(server, "/model_info")["weight_version"] == "a:claimed"
  body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
  assert post(server, "/generate", body)["meta_info"]["weight_version"] == "default"
  post(server, "/pause_generation", {"mode": "abort"})
  post(server, "/update_weights_from_disk", {"model_path": str(directory)})
  stamp("a:fenced", "a:claimed")
  assert "have no version yet" in post(server, "/continue_generation", {}, 400)["message"]


def test_a_signal_ends_it_with_what_it_was_doing(directory):
  served = Served(directory, *OPTIONS).wait()

  async def main():
    engine = SGLangEngine(served.url, VOCAB, heartbeat_seconds=1.0)
    post(served, "/pause_generation", {"mode": "retract"})
    waiting = asyncio.create_task(engine.generate("a", [1], SamplingParams(4, ())))
    await asyncio.sleep(0.3)
    start = time.monotonic()
    code, lines = await asyncio.to_thread(served.stop, signal.SIGTERM)
    assert time.monotonic() - start < 20
    with pytest.raises(EngineDead):  # it is told so before it misses three heartbeats
      await waiting
    await engine.close()
    return code, lines

  code, lines = asyncio.run(main())
  assert (code, lines[-1]) == (0, "stopped")
  assert not any("Traceback" in line for line in lines)
  with pytest.raises(httpx.ConnectError):
    httpx.get(f"http://{served.receiver}", trust_env=False)


def test_a_missing_library_is_told_with_its_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  with pytest.raises(ImportError, match=r"needs starlette and uvicorn .*pip install -e '.\[serve"):
    importlib.reload(server_module)


def test_what_cannot_be_served_is_one_line(directory, tmp_path):
  command = ["launch.serve", "--engine=embedded", f"--model={directory}"]
  refusals = [
    ([f"--model={tmp_path}/no"], "expected a Hugging Face model directory"),
    (["--context_length=500"], "context 500 exceeds the model's 128 positions"),
    (["--receive_port=0"], "$AGENTRL_TRANSFER_TOKEN is empty"),
    (["--tensor_parallel=64"], "needs 64 devices"),
    (["--", "--mem-fraction-static"], "what follows -- goes to SGLang"),
    (["--tensor_parallel=0"], "--tensor_parallel=0: 0 is not a positive integer"),
    (["--port=65536"], "--port=65536: 65536 is not an integer in the range [0, 65535]"),
  ]
  answers = run_refused([[*command, *more] for more, _ in refusals], AGENTRL_TRANSFER_TOKEN="")
  for (code, output), (_, message) in zip(answers, refusals, strict=True):
    assert code == 1 and message in output, output
    assert output.splitlines()[-1].startswith(("cannot serve: ", "Pass --help")), output
