"""The launcher: quick cases with a stand-in interpreter, then the real SGLang server."""

import asyncio
import http.server
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agentrl_jax.rollout.engine import EngineDead, EngineError, Generation, SamplingParams
from agentrl_jax.rollout.listening import listens
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.rollout.sglang_server import (
  ServerOptions,
  SGLangServer,
  find_python,
  server_arguments,
  server_environment,
)
from tests.ports import free_port
from tests.sglang_fixture import transformers_logp

REPOSITORY = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(1, (), 0.0)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, f"still false after {seconds} s"
    time.sleep(0.05)


def running(group: int) -> list[int]:
  """Pids of a process group that really run; a zombie holds nothing but its number."""
  pids = []
  for entry in Path("/proc").glob("[0-9]*"):
    try:
      fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(fields[2]) == group and fields[0] != "Z":
      pids.append(int(entry.name))
  return pids


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[..., ServerOptions]:
  """Options for a server whose interpreter is tests/reference/fake_sglang.py."""
  script = tmp_path / "python"
  fake = REPOSITORY / "tests/reference/fake_sglang.py"
  script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
  script.chmod(0o755)
  model = tmp_path / "model"
  model.mkdir()
  (model / "config.json").write_text('{"vocab_size": 100}')

  def options(**fields) -> ServerOptions:
    return ServerOptions(**({"model": model, "python": script, "log": tmp_path / "log"} | fields))

  return options


def test_serves_restarts_at_the_same_address_and_leaves_nothing(stand_in, monkeypatch):
  monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of the outside world, not of our servers
  monkeypatch.delenv("no_proxy", raising=False)
  monkeypatch.delenv("NO_PROXY", raising=False)
  with SGLangServer(stand_in(start_seconds=30)) as server:
    assert server.alive() and server.vocab_size == 100
    url, group = server.url, server.pid
    assert len(running(group)) == 2  # the server and the child it made
    server.restart()
    assert server.url == url and server.alive() and server.pid != group
    assert running(group) == []
    engine = SGLangEngine(url, 100, server=server)
    assert asyncio.run(engine.generate("r", [1], GREEDY)).ids.tolist() == [5]
  assert not server.alive() and running(server.pid) == []
  server.close()


def test_a_busy_port_is_one_clear_error(stand_in):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(EngineError, match=f"on 127.0.0.1:{port}: Address already in use"):
      SGLangServer(stand_in(port=port)).start()


def test_a_port_that_is_taken_while_it_loads_is_left_for_another(stand_in, monkeypatch):
  monkeypatch.setenv("FAKE_SGLANG", "taken:2")
  with SGLangServer(options := stand_in(start_seconds=30)) as server:
    tried = (options.model / "ports").read_text().split()
    assert len(set(tried)) == 3 and server.url.endswith(f":{tried[-1]}")
    assert all(20_000 <= int(port) < 32_000 for port in tried)
    monkeypatch.setenv("FAKE_SGLANG", "taken:9")
    message = f"{server.url} found its port taken by another process"
    with pytest.raises(EngineError, match=message):
      server.restart()  # where its clients know it
  tried = (options.model / "ports").read_text().split()
  assert tried[2:] == tried[-1:] * 2
  with pytest.raises(EngineError, match="found its port taken"):
    SGLangServer(options).start()
  assert len((options.model / "ports").read_text().split()) == 7  # three more


class Stranger(http.server.BaseHTTPRequestHandler):
  """Says yes to everything."""

  def do_GET(self):
    self.server.asked.append(self.path)
    self.send_response(200)
    self.send_header("Content-Length", "0")
    self.end_headers()

  def log_message(self, format, *args):
    pass


def test_who_else_answers_at_its_port_is_not_taken_for_the_server(stand_in, monkeypatch):
  """They listen there once the server loads, and say that they are healthy."""
  strangers, launch = [], SGLangServer._launch

  def late(server):
    if len(strangers) < wanted:
      strangers.append(http.server.ThreadingHTTPServer(("127.0.0.1", server._port), Stranger))
      strangers[-1].asked = []
      threading.Thread(target=strangers[-1].serve_forever, daemon=True).start()
    launch(server)

  monkeypatch.setattr(SGLangServer, "_launch", late)
  try:
    wanted = 2
    with SGLangServer(stand_in(start_seconds=30)) as server:
      ours, theirs = server._port, [stranger.server_port for stranger in strangers]
      assert len({ours, *theirs}) == 3
      assert listens(server.pid, ours) is True and listens(server.pid, theirs[0]) is False
      engine = SGLangEngine(server.url, 100, server=server)
      assert asyncio.run(engine.generate("r", [1], GREEDY)).ids.tolist() == [5]
    assert listens(server.pid, ours) is None  # nobody does
    wanted, server = 3, SGLangServer(stand_in(port=free_port(), start_seconds=30))
    with pytest.raises(EngineError, match="another process, which came while it loaded, answers"):
      server.start()
    assert running(server.pid) == []
    assert [stranger.asked for stranger in strangers] == [["/health"]] * 3
  finally:
    for stranger in strangers:
      stranger.shutdown()
      stranger.server_close()


def test_a_crash_while_starting_quotes_the_log(stand_in, monkeypatch):
  monkeypatch.setenv("FAKE_SGLANG", "crash")
  server = SGLangServer(stand_in())
  with pytest.raises(EngineDead, match="ended while starting") as caught:
    server.start()
  assert "RuntimeError: no such architecture" in str(caught.value)
  assert str(server.log) in str(caught.value)
  assert running(server.pid) == []


def test_a_server_that_never_answers_is_ended_at_its_deadline(stand_in, monkeypatch):
  monkeypatch.setenv("FAKE_SGLANG", "mute")
  server = SGLangServer(stand_in(start_seconds=1.5))
  with pytest.raises(EngineDead, match=r"not healthy within 1.5 s \(/health: 503\)"):
    server.start()
  assert running(server.pid) == []


def test_what_is_missing_is_named_before_anything_starts(stand_in, tmp_path, monkeypatch):
  with pytest.raises(FileNotFoundError, match=r"nowhere has no config.json"):
    SGLangServer(stand_in(model=tmp_path / "nowhere"))
  with pytest.raises(FileNotFoundError, match=r"nopython: run bash third_party/sglang/install.sh"):
    SGLangServer(stand_in(python=tmp_path / "nopython"))
  monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", sys.executable)
  assert find_python() == Path(sys.executable)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"dtype": "auto"}, "dtype is 'auto'"),
    ({"tensor_parallel": 0}, "tensor_parallel is 0"),
    ({"port": 70000}, "port is 70000"),
    ({"extra": ("--port=1",)}, "extra holds --port=1"),
  ],
)
def test_refused_options(fields, message):
  with pytest.raises(ValueError, match=message):
    ServerOptions(**({"model": Path("m")} | fields))


def test_a_context_longer_than_the_models_is_refused(tmp_path):
  (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
  message = "context_length is 65, expected at most 64, the max_position_embeddings of "
  with pytest.raises(ValueError, match=message):
    SGLangServer(ServerOptions(tmp_path, context_length=65))


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("{}", "vocab_size is None, expected a whole number > 0"),
    ("[]", "vocab_size is None, expected a whole number > 0"),
    ('{"vocab_size": "many"}', "vocab_size is 'many', expected"),
    ("", "not JSON: Expecting value"),
  ],
)
def test_a_configuration_without_vocabulary_is_refused(tmp_path, text, words):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError) as caught:
    SGLangServer(ServerOptions(tmp_path))
  assert str(caught.value).startswith(f"{tmp_path}/config.json: {words}")


def test_flags_follow_the_platform():
  options = ServerOptions(Path("m"), dtype="bfloat16", tensor_parallel=2, extra=("--x", "1"))
  cpu = " ".join(server_arguments(options, 7, cuda=False))
  assert cpu == (
    "-m sglang.launch_server --model-path m --host 127.0.0.1 --port 7 "
    "--sleep-on-idle --dtype bfloat16 --tp-size 2 "
    "--device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--disable-cuda-graph --grammar-backend none --max-total-tokens 65536 "
    "--skip-tokenizer-init --x 1"
  )
  cuda = " ".join(server_arguments(options, 7, cuda=True))
  assert cuda == (
    "-m sglang.launch_server --model-path m --host 127.0.0.1 --port 7 "
    "--sleep-on-idle --dtype bfloat16 --tp-size 2 "
    "--skip-tokenizer-init --x 1"
  )
  environment = server_environment(2, cuda=False)
  assert environment["OMP_NUM_THREADS"] == "1" and environment["SGLANG_USE_CPU_ENGINE"] == "1"
  assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
  assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_killing_the_server_ends_its_calls_and_its_children(stand_in):
  with SGLangServer(stand_in()) as server:
    group = server.pid
    check_kill_mid_request(server, SGLangEngine(server.url, 100, server=server), "hang")
    wait_until(lambda: running(group) == [])


def test_killing_the_watch_still_leaves_nothing_after_close(stand_in):
  server = SGLangServer(stand_in())
  server.start()
  (watch,) = [int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])]
  os.kill(watch, signal.SIGKILL)
  wait_until(lambda: not server.alive())
  assert running(server.pid)  # nothing could end them yet
  server.close()
  wait_until(lambda: running(server.pid) == [])


def start_driver(options: ServerOptions) -> tuple[subprocess.Popen, int]:
  """A parent process that starts the server and then waits; returns it and the server's pid."""
  program = f"""
    import time
    from pathlib import Path
    from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
    model, python, log = {str(options.model)!r}, {str(options.python)!r}, {str(options.log)!r}
    server = SGLangServer(ServerOptions(Path(model), python=Path(python), log=Path(log)))
    server.start()
    print(server.pid, flush=True)
    time.sleep(600)
  """
  driver = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(program)],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  assert driver.stdout is not None
  return driver, int(driver.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphans_however_the_parent_ends(stand_in, number):
  check_no_orphans(stand_in(), number)


def check_no_orphans(options: ServerOptions, number: signal.Signals) -> None:
  driver, group = start_driver(options)
  try:
    assert len(running(group)) >= 2
    driver.send_signal(number)
    driver.wait(timeout=30)
    wait_until(lambda: running(group) == [])
  finally:
    driver.kill()
    driver.communicate(timeout=30)


def test_serve_prints_its_url_and_ends_with_zero_on_ctrl_c(stand_in):
  options = stand_in()
  command = [sys.executable, "-m", "launch.serve", f"--model={options.model}"]
  environment = os.environ | {"AGENTRL_SGLANG_PYTHON": str(options.python)}
  serve = subprocess.Popen(
    [*command, f"--log={options.log}"],
    cwd=REPOSITORY,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert serve.stdout is not None
  assert str(options.log) in serve.stdout.readline()
  assert "serving at http://127.0.0.1:" in serve.stdout.readline()
  serve.send_signal(signal.SIGINT)
  out, err = serve.communicate(timeout=30)
  assert (serve.returncode, out, err) == (0, "stopped\n", "")


def test_serve_refuses_a_missing_model_in_one_line(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "launch.serve", f"--model={tmp_path}/nowhere"],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 1
  assert done.stderr == f"cannot serve: model directory {tmp_path}/nowhere has no config.json\n"


# The real server


def check_kill_mid_request(server: SGLangServer, engine: SGLangEngine, request_id: str) -> None:
  async def main():
    # The model's own end token may come first in some, also while the server is being killed, so
    # many requests are in flight.
    params = SamplingParams(500, (), 1.0)
    ids = [f"{request_id} {k}" for k in range(16)]
    calls = [asyncio.create_task(engine.generate(i, [3, 4, 5], params)) for i in ids]
    await asyncio.sleep(0.3)
    pending = [call for call in calls if not call.done()]
    assert pending
    os.kill(server.pid, signal.SIGKILL)
    begin = time.monotonic()
    ended = await asyncio.gather(*pending, return_exceptions=True)
    dead = [error for error in ended if not isinstance(error, Generation)]
    assert dead
    for error in dead:
      assert isinstance(error, EngineDead)
      assert "process ended" in str(error) and str(server.log) in str(error)
    assert time.monotonic() - begin < 10
    assert not await engine.healthy()

  asyncio.run(main())


@pytest.fixture
def engine(sglang_server: SGLangServer) -> SGLangEngine:
  return SGLangEngine(sglang_server.url, sglang_server.vocab_size, server=sglang_server)


@pytest.mark.sglang
def test_the_contract_holds(engine):
  assert asyncio.run(engine.probe()) < 1e-5
  assert asyncio.run(engine.version()) == 0
  assert engine.seeded is False  # the CPU flags leave deterministic inference off


@pytest.mark.sglang
def test_log_probs_equal_transformers(engine, sglang_python, tiny_llama):
  prompts = [[3, 4, 5], [200], list(range(2, 60))] * 2
  cases = [(prompt, temperature) for temperature in (1.0, 0.7) for prompt in prompts]

  async def main():
    return await asyncio.gather(
      *(
        engine.generate(f"case {k}", prompt, SamplingParams(24, (), temperature))
        for k, (prompt, temperature) in enumerate(cases)
      )
    )

  turns = asyncio.run(main())
  samples = [(p, turn.ids.tolist(), t) for (p, t), turn in zip(cases, turns, strict=True)]
  expected = transformers_logp(sglang_python, tiny_llama, samples)
  for turn, row in zip(turns, expected, strict=True):
    np.testing.assert_allclose(turn.logp, row, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(turn.version, np.zeros(len(row)))
  assert len({turn.ids.tobytes() for turn in turns}) > 6  # really sampled


@pytest.mark.sglang
def test_a_sampled_stop_token_is_the_last_token_with_its_log_prob(engine):
  async def main():
    free = await engine.generate("free", [3, 4, 5], SamplingParams(6, (), 0.0))
    stop = int(free.ids[3])
    return free, await engine.generate("stop", [3, 4, 5], SamplingParams(6, (stop,), 0.0))

  free, stopped = asyncio.run(main())
  end = free.ids.tolist().index(int(free.ids[3])) + 1
  assert free.finish == "length" and stopped.finish == "stop"
  np.testing.assert_array_equal(stopped.ids, free.ids[:end])
  np.testing.assert_allclose(stopped.logp, free.logp[:end], atol=1e-5, rtol=0)


@pytest.mark.sglang
def test_abort_returns_what_was_sampled(engine):
  async def main():
    # The tiny model's own end token may come first, so several requests are in flight.
    params = SamplingParams(500, (), 1.0)
    calls = [asyncio.create_task(engine.generate(f"a{k}", [3], params)) for k in range(16)]
    await asyncio.sleep(0.3)
    await asyncio.gather(*(engine.abort(f"a{k}") for k in range(16)), engine.abort("unknown"))
    return await asyncio.wait_for(asyncio.gather(*calls), 20)

  turns = asyncio.run(main())
  aborted = [turn for turn in turns if turn.finish == "abort"]
  assert aborted
  assert all(len(turn.ids) == len(turn.logp) == len(turn.version) for turn in turns)
  assert all(len(turn.ids) < 500 for turn in aborted)


@pytest.mark.sglang
def test_a_prompt_beyond_the_context_is_refused_by_name(engine):
  with pytest.raises(EngineError, match=r"HTTP 400: .*512"):
    asyncio.run(engine.generate("long", [5] * 600, SamplingParams(4, (), 1.0)))


@pytest.mark.sglang
def test_killing_the_real_server_ends_its_calls_and_its_children(sglang_server, engine):
  group = sglang_server.pid
  assert len(running(group)) >= 3  # server, scheduler, detokenizer
  check_kill_mid_request(sglang_server, engine, "killed")
  wait_until(lambda: running(group) == [])
  # The session's server stays down; the fixture restarts it for the next test that asks.


@pytest.mark.slow  # the stand-in above says the same in a second
@pytest.mark.sglang
def test_no_orphans_of_the_real_server_when_the_parent_is_killed(
  sglang_python, tiny_llama, tmp_path
):
  options = ServerOptions(tiny_llama, python=sglang_python, log=tmp_path / "log")
  check_no_orphans(options, signal.SIGKILL)
