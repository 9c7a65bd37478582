"""One-sided writes: what differs is refused before a byte moves, and the real server then equals
transformers.

Needs NIXL here and in SGLang's environment (`pip install --no-deps nixl-cu13`);
$AGENTRL_SGLANG_NIXL may name a folder that the server finds it in.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.transports.nixl import NixlTransport, _ask, _pairs, why_not
from tests.transfer.test_sglang import changed, publish, reference, score
from tests.transfer.test_transports import staged

PLUGIN = Path(__file__).parents[2] / "third_party/sglang/nixl_window"
TOKEN = "secret"


def answered(text):
  """The port of a window that answers one connection with `text`."""
  listener = socket.create_server(("127.0.0.1", 0))

  def serve():
    connection, _ = listener.accept()
    with connection, listener:
      connection.makefile("r").readline()
      connection.sendall(text)

  threading.Thread(target=serve, daemon=True).start()
  return listener.getsockname()[1]


def test_a_window_is_believed_only_what_fits():
  def ask(text):
    return _ask("http://server: window", "127.0.0.1", answered(text), TOKEN, 10.0)

  assert ask(b'{"agent": ""}') == {"agent": ""}
  with pytest.raises(CallError, match="window told nothing: is the token its own"):
    ask(b"")
  with pytest.raises(CallError, match="window: ValueError: a is not contiguous"):
    ask(json.dumps({"error": "ValueError: a is not contiguous"}).encode())
  with pytest.raises(CallError, match=r"window: .*refused"):
    _ask("http://server: window", "127.0.0.1", 9, TOKEN, 10.0)


def test_parameters_that_differ_from_the_plan_are_refused():
  packed = staged(NixlTransport({}, TOKEN))
  found = {"device": 0, "parameters": {
    "a": [4096, 140, "float32", [5, 7]], "b": [8192, 12, "float32", [3]],
    "empty": [0, 0, "float32", [0, 3]],
  }}  # fmt: skip
  local, remote = _pairs(packed, 0, found, "window")
  assert remote == [(4096, 140, 0), (8192, 12, 0)]
  for (start, nbytes, _), name in zip(local, "ab", strict=True):
    (segment,) = [s for s in packed.plan.segments if s.name == name]
    view = packed.view(segment)
    assert (start, nbytes) == (view.ctypes.data, view.nbytes)
  found["parameters"]["b"] = [8192, 12, "float32", [1, 3]]
  with pytest.raises(CallError, match=r"window: b is 12 bytes of float32 \(1, 3\), the plan has"):
    _pairs(packed, 0, found, "window")
  del found["parameters"]["b"]
  with pytest.raises(CallError, match="window has no b"):
    _pairs(packed, 0, found, "window")


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def window_server(request, sglang_python, tiny_llama, tmp_path, monkeypatch):
  """A server with its parameters open, and the transport into them."""
  if reason := why_not():
    pytest.skip(reason)
  plugin = tmp_path / "plugin"
  info = plugin / "agentrl_sglang_nixl-1.0.0.dist-info"
  info.mkdir(parents=True)
  (plugin / "agentrl_sglang_nixl").symlink_to(PLUGIN / "agentrl_sglang_nixl")
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl-sglang-nixl\nVersion: 1\n")
  (info / "entry_points.txt").write_text(
    "[sglang.srt.plugins]\nagentrl_nixl = agentrl_sglang_nixl:register\n"
  )
  path = os.pathsep.join([str(plugin), os.environ.get("AGENTRL_SGLANG_NIXL", "")])
  monkeypatch.setenv("PYTHONPATH", path)
  program = "import agentrl_sglang_nixl as a; a.nixl_api()"
  if subprocess.run([sglang_python, "-c", program], capture_output=True).returncode:
    pytest.skip("SGLang's environment has no NIXL")
  with contextlib.ExitStack() as probes:  # neighbours that are free, as far as that can be known
    port = probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
  for name, value in {
    "AGENTRL_NIXL_PORT": str(port), "AGENTRL_TRANSFER_TOKEN": TOKEN, "UCX_TLS": "cma,tcp",
    "UCX_NET_DEVICES": "lo",
  }.items():  # fmt: skip
    monkeypatch.setenv(name, value)
  options = ServerOptions(
    tiny_llama, python=sglang_python, tensor_parallel=request.param, log=tmp_path / "log"
  )
  with SGLangServer(options) as server:
    yield server, NixlTransport({server.url: f"127.0.0.1:{port}"}, TOKEN, bucket_bytes=1 << 16)


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_written_parameters_equal_transformers_on_the_export(
  window_server, sglang_python, tiny_llama, tmp_path
):  # W23
  server, transport = window_server
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)
  for version in (1, 2):
    weights = changed(original, seed=version)
    spread = jax.device_put(weights, shardings(model, make_mesh(fsdp=4, tensor=2)))
    publish(server, model, spread, version, transport)
    got, meta = score(server)
    want = reference(sglang_python, model, weights, tiny_llama, tmp_path / f"export{version}")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert meta["weight_version"] == f"test:{version}"
