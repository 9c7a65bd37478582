"""One real SGLang server for all tests marked `sglang`, serving a tiny random Llama.

Fixtures: `sglang_python` (the interpreter), `tiny_llama` (its Hugging Face directory),
`sglang_server` (a running SGLangServer, put back to the directory's weights and version 0 before
each test).
"""

import atexit
import functools
import itertools
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer, find_python

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def sglang_python() -> Path:
  """The Python that has SGLang, torch and transformers; skips when it was never installed."""
  try:
    return find_python()
  except FileNotFoundError as error:
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_llama(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """2 layers, 4 heads over 2 key-value heads, 256 tokens, untied, float32; token 1 is the end."""
  directory = tmp_path_factory.mktemp("tiny_llama")
  script = [str(sglang_python), str(REFERENCE / "tiny_llama.py"), str(directory)]
  subprocess.run(script, check=True, timeout=120, capture_output=True)
  return directory


@pytest.fixture(scope="session")
def _session_server(
  sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
  log = tmp_path_factory.mktemp("sglang") / "server.log"
  with SGLangServer(ServerOptions(tiny_llama, python=sglang_python, log=log)) as server:
    yield server


@pytest.fixture
def sglang_server(_session_server: SGLangServer) -> SGLangServer:
  """The running server, at the weights of `tiny_llama` and version 0, whatever was done to it."""
  if not _session_server.alive():
    _session_server.restart()
  _post(_session_server.url, "/continue_generation", {})
  body = {"model_path": str(_session_server.options.model), "weight_version": "default"}
  _post(_session_server.url, "/update_weights_from_disk", body | {"abort_all_requests": True})
  return _session_server


def transformers_logp(
  python: Path, model: Path, samples: list[tuple[list[int], list[int], float]]
) -> list[list[float]]:
  """Log-probs of the sampled ids of each (prompt, sampled, temperature), by transformers."""
  process = _transformers(python)
  assert process.stdin is not None and process.stdout is not None
  job = {"number": next(_jobs), "model": str(model), "samples": samples}
  process.stdin.write(json.dumps(job) + "\n")
  process.stdin.flush()
  while line := process.stdout.readline():
    number, answer = json.loads(line)
    if number == job["number"]:  # and not what a test that gave up had asked for
      return answer
  raise AssertionError(f"transformers ended with {process.wait(10)}; its errors are beside this")


_jobs = itertools.count()


@functools.cache
def _transformers(python: Path) -> subprocess.Popen:
  """One process for all tests, as torch and transformers take seconds to import."""
  process = subprocess.Popen(
    [str(python), str(REFERENCE / "transformers_logp.py")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
  )
  atexit.register(process.kill)
  return process


def _post(url: str, route: str, body: dict) -> None:
  request = urllib.request.Request(
    url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=30) as answer:
    assert answer.status == 200, f"{route}: {answer.read()!r}"
