"""Runs whose engine is a server that was there before them and stays when they end."""

import asyncio
import dataclasses
import json
import os
import signal

import fiddle as fdl
import httpx
import pytest
from fiddle.experimental import serialization
from rich.console import Console

from agentrl_jax.models import llama
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.orchestrate import served, tiny
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.served import chosen, require_model
from agentrl_jax.orchestrate.sync_loop import train
from agentrl_jax.rollout.engine import EngineError, SamplingParams
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.transfer.control import Control, make_client
from agentrl_jax.transfer.receive import TOKEN
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.transports import auto
from agentrl_jax.transfer.transports.disk import DiskTransport, shared_memory
from agentrl_jax.transfer.transports.tcp import TcpTransport
from agentrl_jax.transfer.transports.tensor import TensorTransport
from configs import tiny_rl, use_server, use_transport
from tests.launch.served import SECRET, Served, received
from tests.launch.test_serve import Flipping
from tests.reference.transfer import random_weights
from tests.transfer.fake_server import FakeServer

CONTEXT = 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("tiny") / "model"
  path.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64)(path)
  return path


@pytest.fixture(scope="module")
def server(directory):
  running = Served(directory, "--slots=16", f"--context_length={CONTEXT}").wait()
  yield running
  running.process.kill()


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
  monkeypatch.setenv(TOKEN, SECRET)


def experiment(directory, url, way, steps=2):
  config = tiny_rl()
  config.model = str(directory)
  config.steps, config.concurrency, config.checkpoint_every = steps, 16, 1
  config.batch.groups, config.batch.members, config.batch.only_mixed = 2, 4, False
  config.tasks.train_tasks, config.tasks.held_out_tasks = 16, 2
  config.evaluation.tasks, config.evaluation.samples = 1, 1
  config.limits.turn_tokens = 8
  use_server(config, url)
  use_transport(config, way)
  return config


def trained(config, workdir):
  """What each step measured, and what the run said."""
  console = Console(file=(workdir.parent / "said").open("w"), width=1000)
  with Progressing(console) as progress:
    asyncio.run(train(fdl.build(config), workdir, progress))
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return rows, (workdir.parent / "said").read_text()


@pytest.mark.parametrize(
  ("way", "named"), [("disk", "disk"), ("tcp", "tcp"), ("tcp-xor", "tcp"), ("auto", "disk")]
)
def test_a_run_gives_a_running_server_its_weights_and_leaves_it_to_the_next(
  way, named, server, directory, tmp_path
):
  rows, said = trained(experiment(directory, server.url, way), tmp_path / "run")
  assert len(rows) == 2
  assert all(row["faults"] == 0 and row["mismatch_max"] <= 1e-4 for row in rows)
  assert all(row["on_policy_share"] == 1 for row in rows)
  assert f"transport {named}" in said
  assert f"push v2 committed by {named}" in said
  assert server.process.poll() is None
  assert received() == []


@pytest.mark.parametrize(
  ("kind", "name", "call", "said_so"),
  [
    # The first call is of the start, the second of the first step.
    (TcpTransport, "send", 2, "is gone during a push"),
    (SGLangEngine, "generate", 6, "restarting it, finished episodes are kept"),
  ],
)
def test_a_server_killed_in_the_middle_is_waited_for(
  kind, name, call, said_so, server, directory, tmp_path, monkeypatch
):
  calls, whole = [], getattr(kind, name)

  async def killing(*arguments):
    calls.append(arguments)
    if len(calls) == call:
      server.process.send_signal(signal.SIGKILL)
      server.process.wait(10)
      server.start()
    return await whole(*arguments)

  monkeypatch.setattr(kind, name, killing)
  rows, said = trained(experiment(directory, server.url, "tcp"), tmp_path / "run")
  server.wait()
  assert len(rows) == 2
  assert all(row["faults"] == 0 and row["mismatch_max"] <= 1e-4 for row in rows)
  assert said_so in said and "engine restarted in" in said
  assert received() == []


def test_a_run_goes_on_where_a_killed_trainer_had_pushed_more_than_it_saved(
  server, directory, tmp_path
):
  weights = load_weights(load_model(directory), directory)
  context = EngineContext(load_model(directory), weights, 5, directory, tmp_path, CONTEXT, 0)

  async def main():
    killed = await served.served(url=server.url)(context)  # which does not close it
    again = await served.served(url=server.url)(dataclasses.replace(context, version=3))
    assert await again.engine.version() == 3
    other = dataclasses.replace(context, workdir=tmp_path / "other")
    with pytest.raises(Exception, match=r"serves run .*, this is "):
      await served.served(url=server.url)(other)
    await again.close()
    await (await served.served(url=server.url)(other)).close()
    await killed.close()

  asyncio.run(main())


def stamp(server):
  return httpx.get(f"{server.url}/model_info", trust_env=False).json()["weight_version"]


def test_a_run_that_ends_after_a_fenced_push_leaves_the_server_paused_and_says_so(
  server, directory, tmp_path
):
  model, weights = load_model(directory), load_weights(load_model(directory), directory)
  said, flipping = [], Flipping(tmp_path)
  flipping.flips = False
  context = EngineContext(model, weights, 0, directory, tmp_path / "a", CONTEXT, 0, said.append)
  after = dataclasses.replace(context, workdir=tmp_path / "b", version=2)

  async def main():
    first = await served.served(url=server.url, transport=auto.only(lambda: flipping))(context)
    flipping.flips = True
    report = await first.publisher.publish(random_weights(model, 1), 1)
    assert report.state is State.FENCED, str(report)
    await first.publisher.recover()  # which lets rounds begin, and the server as it is
    await first.close()
    assert stamp(server) == f"{first.publisher.run_id}:fenced"
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    async with httpx.AsyncClient(trust_env=False, timeout=0.5) as client:
      with pytest.raises(httpx.ReadTimeout):
        await client.post(f"{server.url}/generate", json=body)
    assert not any("was left paused" in line for line in said)
    next_ = await served.served(url=server.url)(after)
    (told,) = [line for line in said if "was left paused" in line]
    assert f"by run {first.publisher.run_id!r} after a push that failed" in told
    assert (await next_.engine.generate("a", [1], SamplingParams(1, ()))).version.tolist() == [2]
    await next_.close()

  asyncio.run(main())
  assert stamp(server) == "default"


class Together:
  """Two calls of a method of `Control` return at the same time, later ones as they do."""

  def __init__(self, monkeypatch, method):
    self.whole, self.waiting, self.both = getattr(Control, method), 2, asyncio.Event()
    monkeypatch.setattr(Control, method, lambda *arguments: self.call(*arguments))

  async def call(self, *arguments):
    answer = await self.whole(*arguments)
    self.waiting -= 1
    if self.waiting <= 0:
      self.both.set()
    await self.both.wait()
    return answer


def test_of_two_runs_that_find_a_server_free_at_once_one_gets_it(
  server, directory, tmp_path, monkeypatch
):
  model, writes, send = load_model(directory), [], DiskTransport.send
  contexts = [
    EngineContext(model, random_weights(model, n), n, directory, tmp_path / f"{n}", CONTEXT, 0)
    for n in (1, 2)
  ]

  async def recorded(self, staged, peer, ranks):
    writes.append(staged.key)
    await send(self, staged, peer, ranks)

  monkeypatch.setattr(DiskTransport, "send", recorded)
  Together(monkeypatch, "held")
  opening = served.served(url=server.url, transport=auto.only(DiskTransport))

  async def main():
    made = await asyncio.gather(*map(opening, contexts), return_exceptions=True)
    (lost,) = [error for error in made if isinstance(error, Exception)]
    (won,) = [host for host in made if not isinstance(host, Exception)]
    assert isinstance(lost, EngineError)
    assert f"was taken by run {won.publisher.run_id!r}, which began at the same moment" in str(lost)
    (key,) = writes
    assert key.startswith(won.publisher.run_id)
    assert stamp(server).startswith(f"{won.publisher.run_id}:")  # the loser left it alone
    assert (await won.engine.generate("a", [1], SamplingParams(2, ()))).version[0] in (1, 2)
    await won.close()

  asyncio.run(main())
  assert stamp(server) == "default"


@pytest.mark.parametrize("before", ["default", "gone:fenced"])
def test_a_server_that_does_not_compare_is_the_last_ones_that_stamped_it(before, monkeypatch):
  Together(monkeypatch, "held")

  async def main():
    async with FakeServer() as fake, make_client() as client:
      fake.version = before
      control = Control(fake.url, client, 5.0)
      claims = [served.claim(control, run, 0.2, print) for run in ("a", "b")]
      made = await asyncio.gather(*claims, return_exceptions=True)
      (lost,) = [n for n, error in enumerate(made) if error is not None]
      winner = "ba"[lost]
      assert fake.version == f"{winner}:claimed"
      with pytest.raises(EngineError, match=f"was taken by run '{winner}'"):
        raise made[lost]
      with pytest.raises(EngineError, match=f"serves run '{winner}', this is 'c'"):
        await served.claim(control, "c", 0.2, print)

  asyncio.run(main())


def opened(context, url, **options):
  return asyncio.run(served.served(url=url, start_seconds=0.5, **options)(context))


def test_a_server_that_is_not_there_or_is_another_is_said_so(server, directory, tmp_path):
  said = []
  model, weights = load_model(directory), load_weights(load_model(directory), directory)
  context = EngineContext(model, weights, 0, directory, tmp_path, CONTEXT, 0, said.append)
  with pytest.raises(EngineError, match=r"no server at http://127.0.0.1:1 within 0.5 s: .*"):
    opened(context, "http://127.0.0.1:1")
  assert said[0].startswith("waiting up to 0.5 s for a server at http://127.0.0.1:1")
  with pytest.raises(
    EngineError, match=r"takes 128 tokens, the run's limits\.context_tokens are 200"
  ):
    opened(dataclasses.replace(context, context_tokens=200), server.url)
  other = llama.bind(dataclasses.replace(model.config, vocab_size=97))
  with pytest.raises(EngineError, match="another model: its vocab_size is 300, this run's 97"):
    opened(dataclasses.replace(context, model=other), server.url)
  with pytest.raises(ValueError, match="takes weights by disk or tcp, not by bucket"):
    opened(context, server.url, transport=auto.only(TensorTransport))


FACTS = {
  "dtype": "float32", "tp_size": 1, "transports": ["disk", "tcp"], "receiver_port": 7,
}  # fmt: skip


@pytest.mark.parametrize("memory", ["another", ""])
def test_a_server_that_does_not_see_this_memory_is_not_sent_files(memory, directory, tmp_path):
  facts = FACTS | {"shared_memory": memory}
  context = EngineContext(None, {}, 0, directory, tmp_path, CONTEXT, 0)
  url = "http://127.0.0.1:9"  # as through a tunnel
  with pytest.raises(ValueError, match="does not share this machine's memory, which disk needs"):
    chosen(auto.only(DiskTransport), url, facts, "", context)
  with pytest.raises(ValueError, match=r"not by bucket; .*; tcp: receiver 127.0.0.1:7 of"):
    chosen(auto.fastest(), url, facts, "", context)
  assert chosen(auto.tcp(), url, facts, "", context).transport.receivers == {url: "127.0.0.1:7"}
  beside = chosen(auto.tcp(), url, facts, "10.0.0.2:8", context)
  assert beside.transport.receivers == {url: "10.0.0.2:8"}
  del facts["receiver_port"]
  with pytest.raises(ValueError, match="is not on this machine: name the receiver beside it"):
    chosen(auto.tcp(), url, facts, "", context)


def test_a_server_elsewhere_that_does_see_this_memory_is_sent_files(directory, tmp_path):
  facts = FACTS | {"shared_memory": shared_memory()}
  context = EngineContext(None, {}, 0, directory, tmp_path, CONTEXT, 0)
  choice = chosen(auto.fastest(tmp_path), "http://192.0.2.1:9", facts, "", context)
  assert choice.transport.name == "disk" and os.path.exists("/dev/shm")


def test_what_sglang_tells_of_itself_is_compared_too(directory):
  model = load_model(directory)
  facts = {"model_path": str(directory), "dtype": "float32", "context_length": None}
  require_model("url", facts, model, CONTEXT)
  other = llama.bind(dataclasses.replace(model.config, layers=2))
  with pytest.raises(EngineError, match="its num_hidden_layers is 1, this run's 2"):
    require_model("url", facts, other, CONTEXT)
  require_model("url", facts | {"model_path": "/elsewhere"}, other, CONTEXT)
  with pytest.raises(EngineError, match="computes in 'auto': start it with --dtype"):
    require_model("url", facts | {"dtype": "auto"}, model, CONTEXT)
  with pytest.raises(EngineError, match="serves fp8 weights"):
    require_model("url", facts | {"quantization": "fp8"}, model, CONTEXT)


def test_a_running_server_is_part_of_the_configuration():
  config = tiny_rl()
  use_server(config, "http://10.0.0.2:30000", receiver="10.0.0.2:31000")
  use_transport(config, "tcp")
  use_server(config, "http://10.0.0.3:30000")
  again = serialization.load_json(serialization.dump_json(config))
  assert again.engine.url == "http://10.0.0.3:30000" and again.engine.receiver == ""
  assert fdl.get_callable(again.engine.transport) is auto.tcp
  assert fdl.build(again).engine


@pytest.mark.sglang
def test_a_sglang_server_that_runs_already_is_used_and_left(sglang_server, tiny_llama, tmp_path):
  model = load_model(tiny_llama)
  said = []
  context = EngineContext(
    model, random_weights(model), 4, tiny_llama, tmp_path, CONTEXT, 0, said.append
  )

  async def main():
    host = await served.served(url=sglang_server.url)(context)
    assert said[0].startswith("transport disk")
    sampled = await host.engine.generate("a", [5], SamplingParams(3, ()))
    assert set(sampled.version.tolist()) == {4}
    await host.close()

  asyncio.run(main())
  assert sglang_server.alive()
  assert asyncio.run(SGLangEngine(sglang_server.url, 256).version()) == 0
