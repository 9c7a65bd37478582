"""One-sided writes: what differs is refused before a byte moves, faults fence, and the real server
then equals transformers.

Needs NIXL and Mooncake here and in SGLang's environment; $AGENTRL_SGLANG_PACKAGES may name folders
in which the server finds them.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate import engines
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.rollout.sglang_server import PORTS, ServerOptions, SGLangServer
from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.transports import nixl
from agentrl_jax.transfer.transports.auto import Servers, Windows, fastest, one_sided
from agentrl_jax.transfer.transports.mooncake import Mooncake
from agentrl_jax.transfer.transports.nixl import Nixl
from agentrl_jax.transfer.transports.window import (
  Aim,
  OneSidedTransport,
  ask,
  of_rank,
  opening,
  server_lacks,
  writes,
)
from tests.sglang_fixture import REFERENCE
from tests.transfer.test_sglang import changed, publish, reference, score
from tests.transfer.test_transports import ARRAYS, staged

PLUGIN = Path(__file__).parents[2] / "third_party/sglang/window"
TOKEN = "a secret"  # with a space, as any text may be one
LIBRARIES = {"nixl": Nixl, "mooncake": Mooncake}


class Peer:
  """A server's place in a round: every call succeeds."""

  url, deadline = "http://server", 20.0

  def __init__(self):
    self.calls = []

  async def call(self, method, path, body=None):
    self.calls.append(path)


def transport(library, port, token=TOKEN):
  return OneSidedTransport(library, {Peer.url: f"127.0.0.1:{port}"}, token, bucket_bytes=1 << 16)


def answered(text):
  """The address of a window that answers one connection with `text`."""
  listener = socket.create_server(("127.0.0.1", 0))

  def serve():
    connection, _ = listener.accept()
    with connection, listener:
      connection.makefile("r").readline()
      connection.sendall(text)

  threading.Thread(target=serve, daemon=True).start()
  return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_window_is_believed_only_what_fits():
  def told(text):
    return ask("http://server: window", answered(text), TOKEN, 10.0)

  assert told(b'{"agent": ""}') == ("127.0.0.1", {"agent": ""})
  with pytest.raises(CallError, match="window told nothing: is the token its own"):
    told(b"")
  with pytest.raises(CallError, match="window: ValueError: a is not contiguous"):
    told(json.dumps({"error": "ValueError: a is not contiguous"}).encode())
  with pytest.raises(CallError, match=r"window: .*refused: does the server run with the plug-in"):
    ask("http://server: window", "127.0.0.1:9", TOKEN, 10.0)


def test_parameters_that_differ_from_the_plan_are_refused():
  packed = staged(OneSidedTransport(Nixl(), {}, TOKEN))
  found = {"parameters": {
    "a": [4096, 140, "float32", [5, 7]], "b": [8192, 12, "float32", [3]],
    "empty": [0, 0, "float32", [0, 3]],
  }}  # fmt: skip
  made = writes(packed, 0, found, "window")
  assert [(write.target, write.nbytes) for write in made] == [(4096, 140), (8192, 12)]
  for write, name in zip(made, "ab", strict=True):
    (segment,) = [s for s in packed.plan.segments if s.name == name]
    view = packed.view(segment)
    assert (write.source, write.nbytes) == (view.ctypes.data, view.nbytes)
  found["parameters"]["b"] = [8192, 12, "float32", [1, 3]]
  with pytest.raises(CallError, match=r"window: b is 12 bytes of float32 \(1, 3\), the plan has"):
    writes(packed, 0, found, "window")
  del found["parameters"]["b"]
  with pytest.raises(CallError, match="window has no b"):
    writes(packed, 0, found, "window")


def test_an_interpreter_without_the_plug_in_says_what_to_install(tmp_path):
  lacks = server_lacks(sys.executable, ["nixl"])
  assert f"{sys.executable} -m pip install third_party/sglang/window" in lacks["nixl"]
  assert "No such file" in server_lacks(tmp_path / "python", ["nixl"])["nixl"]


def test_the_ports_of_windows_are_held_while_a_server_loads():
  held = opening(3, PORTS)
  ports = [int(of_rank(held.address, rank).rpartition(":")[2]) for rank in range(3)]
  for port in ports:
    with pytest.raises(OSError, match="in use"):
      socket.create_server(("127.0.0.1", port))
  with pytest.raises(OSError, match="no 1 neighbouring ports of"):
    opening(1, ports)  # of another run
  for _ in range(2):  # the window of this one, and of a restarted server
    program = f"import agentrl_sglang_window as w; w.listen('127.0.0.1', {ports[1]}).accept()"
    window = subprocess.Popen([sys.executable, "-c", program], cwd=PLUGIN)
    for _ in range(100):
      with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[1]), 10).close()
        break
      time.sleep(0.1)
    assert window.wait(10) == 0  # it was met, not the holder
  held.close()
  for port in ports:
    socket.create_server(("127.0.0.1", port)).close()
  other = opening(1, ports)
  assert other.token != held.token
  other.close()


@pytest.fixture(params=LIBRARIES)
def library(request):
  """A library that works here; the end of the test run says which does not."""
  found = LIBRARIES[request.param]()
  if reason := found.why_not():
    warnings.warn(f"{request.param} is not tested: {reason}", stacklevel=1)
    pytest.skip(reason)
  yield found
  found.close()


class Process:
  """`window_process.py` with the arrays of `test_transports`."""

  def __init__(self):
    listed = {name: [str(array.dtype), array.shape] for name, array in ARRAYS.items()}
    program = [sys.executable, str(REFERENCE / "window_process.py"), str(PLUGIN), TOKEN]
    self.popen = subprocess.Popen(
      [*program, json.dumps(listed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.port = self.read()

  def read(self):
    """Its next line; libraries print others."""
    for line in self.popen.stdout:
      with contextlib.suppress(ValueError):
        return json.loads(line)
    raise AssertionError(f"the window ended with {self.popen.wait()}")

  def say(self, line=""):
    self.popen.stdin.write(f"{line}\n")
    self.popen.stdin.flush()
    return {name: bytes.fromhex(text) for name, text in self.read().items()}

  def close(self):
    self.popen.kill()
    self.popen.wait()


@pytest.fixture
def process():
  started = Process()
  yield started
  started.close()


async def moved(way, packed):
  peer = Peer()
  await way.deliver(packed, peer, 1)
  await way.send(packed, peer, 1)
  way.release(packed.key)
  assert peer.calls == ["/begin_weight_update", "/end_weight_update"]


def test_bytes_reach_the_memory_of_another_process(library, process):
  way = transport(library, process.port)
  assert set(process.say()["a"]) == {0}
  asyncio.run(moved(way, staged(way)))
  assert process.say() == {name: array.tobytes() for name, array in ARRAYS.items()}
  assert set(process.say("move")["a"]) == {0}  # its memory is elsewhere now, registered anew
  asyncio.run(moved(way, staged(way, key="run-2")))
  assert process.say() == {name: array.tobytes() for name, array in ARRAYS.items()}
  with pytest.raises(CallError, match=r"float32 .*, the plan has .*bfloat16"):
    asyncio.run(moved(way, staged(way, "bfloat16", key="run-3")))
  with pytest.raises(CallError, match="told nothing: is the token its own"):
    asyncio.run(moved(transport(library, process.port, "another"), staged(way, key="run-4")))
  way.close()


def test_a_window_that_nobody_writes_to_takes_no_core(library, process):
  way = transport(library, process.port)
  asyncio.run(moved(way, staged(way)))

  def seconds():
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  before = seconds()
  time.sleep(2.0)
  assert seconds() - before < 0.3  # one that polls takes what it gets
  way.close()


def test_a_process_that_used_nixl_ends_well():
  if reason := Nixl().why_not():
    pytest.skip(reason)
  program = (
    "import numpy as np; from agentrl_jax.transfer.transports.nixl import Nixl; "
    "kept = Nixl().writer('', [np.zeros(1000)], [])"
  )
  ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])


def test_memory_that_cannot_be_registered_is_refused(monkeypatch):
  class Agent:
    def register_memory(self, *_):
      raise RuntimeError("no more locked memory")

  api = types.SimpleNamespace(nixl_agent=lambda *_: Agent(), nixl_agent_config=lambda: None)
  monkeypatch.setattr(nixl, "_api", lambda: api)
  aim = Aim("http://server: window", "127.0.0.1", {}, ())
  with pytest.raises(CallError, match=r"window: NIXL: RuntimeError no more locked") as caught:
    Nixl().writer(Peer.url, [np.zeros(4, np.uint8)], [aim])
  assert caught.value.failure == "refused"


@pytest.mark.parametrize("when", ["before", "between", "frozen"])
def test_a_receiver_that_is_gone_is_named_within_the_deadline(library, process, when):  # W9, W19
  way, peer = transport(library, process.port), Peer()
  packed = staged(way)
  peer.deadline = 4.0

  async def main():
    await way.deliver(packed, peer, 1)
    process.popen.send_signal(signal.SIGSTOP if when == "frozen" else signal.SIGKILL)
    if when != "frozen":
      process.popen.wait()
    await way.send(packed, peer, 1)

  if when == "before":
    process.close()
  start = time.monotonic()
  with pytest.raises(
    CallError, match=r"http://server: (window|a one-sided write|one-sided writes)"
  ):
    asyncio.run(main())
  assert time.monotonic() - start < peer.deadline + 10
  assert peer.calls[1:] == []  # the update is never ended: the server stays fenced
  way.release(packed.key)
  way.close()


def test_the_choice_asks_the_windows(library, process, monkeypatch, tmp_path):
  url = "http://127.0.0.1:1"
  windows = Windows({url: f"127.0.0.1:{process.port}"}, TOKEN)
  named = one_sided(type(library))
  assert str(named(Servers([url], 1000, 1, windows))) == f"transport {library.name}"
  with pytest.raises(ValueError, match=f"{library.name} does not work: {url} has no window"):
    named(Servers([url], 1000))
  with pytest.raises(ValueError, match="does not work: no plug-in there"):
    named(Servers([url], 1000, 1, windows, {library.name: "no plug-in there"}))
  wrong = windows._replace(token="another")
  with pytest.raises(ValueError, match="told nothing: is the token its own"):
    named(Servers([url], 1000, 1, wrong))
  for other in LIBRARIES.values():
    if other is not type(library):
      monkeypatch.setattr(other, "why_not", lambda self: "not here")
  line = str(fastest(tmp_path)(Servers([url], 1000, 1, windows)))
  assert line == ("transport nixl" if library.name == "nixl" else "transport disk; nixl: not here")
  line = str(fastest(tmp_path)(Servers([url], 1 << 60, 1, windows)))  # no room for files
  if library.name == "mooncake":
    assert line.startswith("transport mooncake; nixl: not here; disk: ")


@pytest.fixture(scope="module")
def plugged(sglang_python, tmp_path_factory):
  """An environment in which the server has the plug-in, and what it lacks."""
  plugin = tmp_path_factory.mktemp("plugin")
  info = plugin / "agentrl_sglang_window-2.0.0.dist-info"
  info.mkdir()
  (plugin / "agentrl_sglang_window").symlink_to(PLUGIN / "agentrl_sglang_window")
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl-sglang-window\nVersion: 2\n")
  (info / "entry_points.txt").write_text(
    "[sglang.srt.plugins]\nagentrl_window = agentrl_sglang_window:register\n"
  )
  with pytest.MonkeyPatch.context() as patch:
    found = [str(plugin), os.environ.get("AGENTRL_SGLANG_PACKAGES", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(found))
    patch.setenv("UCX_TLS", "cma,tcp")
    patch.setenv("UCX_NET_DEVICES", "lo")
    yield server_lacks(sglang_python, list(LIBRARIES))


class Open:
  """A server whose parameters are open, and the last version that it was given."""

  def __init__(self, server, opened):
    self.server, self.opened, self.version = server, opened, 0

  def transport(self, library, token=None):
    windows = {self.server.url: self.opened.address}
    return OneSidedTransport(library, windows, token or self.opened.token, bucket_bytes=1 << 16)

  def next(self):
    self.version += 1
    return self.version


@pytest.fixture(
  scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids="tp{}".format
)
def opened(request, plugged, sglang_python, tiny_llama, tmp_path_factory):
  reasons = {name: make().why_not() or plugged[name] for name, make in LIBRARIES.items()}
  if all(reasons.values()):
    pytest.skip("; ".join(reasons.values()))
  at = opening(request.param, PORTS)
  options = ServerOptions(
    tiny_llama,
    python=sglang_python,
    tensor_parallel=request.param,
    log=tmp_path_factory.mktemp("window") / "log",
    environment=at.environment(),
  )
  with SGLangServer(options) as server:
    yield Open(server, at)
  at.close()


@pytest.fixture
def usable(library, plugged):
  """A library that works on both sides."""
  if reason := plugged[library.name]:
    pytest.skip(reason)
  return library


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_written_parameters_equal_transformers_on_the_export(
  opened, usable, sglang_python, tiny_llama, tmp_path
):  # W23
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)
  way = opened.transport(usable)
  for _ in range(2):
    version = opened.next()
    weights = changed(original, seed=version)
    spread = jax.device_put(weights, shardings(model, make_mesh(fsdp=4, tensor=2)))
    publish(opened.server, model, spread, version, way)
    got, meta = score(opened.server)
    want = reference(sglang_python, model, weights, tiny_llama, tmp_path / f"export{version}")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert meta["weight_version"] == f"test:{version}"


@contextlib.asynccontextmanager
async def publishing(opened, model, way, deadline=30.0):
  publisher = sglang_publisher(
    model, [opened.server.url], transport=way, run_id="test", deadline=deadline
  )
  try:
    yield publisher
  finally:
    await publisher.close()


class Half:
  """A library that writes every other parameter, and then lets `then` happen."""

  def __init__(self, library, then):
    self.library, self.name, self.then = library, library.name, then

  def writer(self, peer, buffers, aims):
    made = self.library.writer(
      peer, buffers, [aim._replace(writes=aim.writes[::2]) for aim in aims]
    )
    state = made.state

    def ended():
      found = state()
      if found != "running":
        self.then()
      return found

    made.state = ended
    return made

  def close(self):
    self.library.close()


def dying_sender(name, source, url, address, token, version):
  """A trainer that is killed when half of its parameters are written."""
  model = load_model(Path(source))
  weights = changed(load_weights(model, Path(source)), seed=int(version))
  library = Half(LIBRARIES[name](), lambda: os.kill(os.getpid(), signal.SIGKILL))
  way = OneSidedTransport(library, {url: address}, token)
  publisher = sglang_publisher(model, [url], transport=way, run_id="test")
  asyncio.run(publisher.publish(weights, int(version)))


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sender_that_is_killed_leaves_a_fence_that_the_next_one_takes_down(
  opened, usable, sglang_python, tiny_llama, tmp_path
):  # W9
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)
  way = opened.transport(usable)
  before = opened.next()
  publish(opened.server, model, original, before, way)
  killed = opened.next()
  arguments = [usable.name, tiny_llama, opened.server.url, opened.opened.address]
  arguments += [opened.opened.token, killed]
  program = "import sys; from tests.transfer.test_window import dying_sender as d; d(*sys.argv[1:])"
  ran = subprocess.run(
    [sys.executable, "-c", program, *map(str, arguments)],
    capture_output=True,
    cwd=Path(__file__).parents[2],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # not the server's
  )
  assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()[-2000:]
  held = httpx.get(f"{opened.server.url}/model_info").json()["weight_version"]
  assert held == f"test:{before}"
  with pytest.raises(httpx.ReadTimeout):  # it answers nothing
    httpx.post(
      f"{opened.server.url}/generate",
      json={"input_ids": [3, 17], "sampling_params": {"max_new_tokens": 1}},
      timeout=3.0,
    )
  weights, version = changed(original, seed=77), opened.next()
  publish(opened.server, model, weights, version, way)
  got, meta = score(opened.server)
  want = reference(sglang_python, model, weights, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  assert meta["weight_version"] == f"test:{version}"


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_write_that_stops_half_way_is_fenced_and_made_good(
  opened, usable, sglang_python, tiny_llama, tmp_path
):  # W9: the server's checksums tell, also where the library does not
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)

  async def main():
    half = opened.transport(Half(usable, lambda: None))
    async with publishing(opened, model, half) as publisher:
      report = await publisher.publish(changed(original, seed=5), opened.next())
      assert report.state is State.FENCED, str(report)
      assert f"{opened.server.url} failed verification" in report.message
    async with publishing(opened, model, opened.transport(usable)) as publisher:
      report = await publisher.publish(changed(original, seed=6), opened.next())
      assert report.state is State.COMMITTED, str(report)

  asyncio.run(main())
  got, _ = score(opened.server)
  weights = changed(original, seed=6)
  want = reference(sglang_python, model, weights, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wrong_token_changes_nothing(opened, usable, tiny_llama):
  model = load_model(tiny_llama)
  weights = load_weights(model, tiny_llama)
  before = opened.next()
  publish(opened.server, model, weights, before, opened.transport(usable))
  want, _ = score(opened.server)

  async def main():
    async with publishing(opened, model, opened.transport(usable, "another")) as publisher:
      report = await publisher.publish(changed(weights, seed=5), opened.next())
    assert report.state is State.ABORTED, str(report)
    assert "told nothing: is the token its own?" in report.message

  asyncio.run(main())
  got, meta = score(opened.server)
  np.testing.assert_array_equal(got, want)
  assert meta["weight_version"] == f"test:{before}"


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_named_and_written_again(
  opened, usable, sglang_python, tiny_llama, tmp_path
):  # W9, W19: between the last call before the writes and the writes
  model = load_model(tiny_llama)
  original = load_weights(model, tiny_llama)
  server, way = opened.server, opened.transport(usable)
  weights = changed(original, seed=8)
  writer = usable.writer

  def doomed(*arguments):
    made = writer(*arguments)
    start = made.start

    def killing():
      os.killpg(server.pid, signal.SIGKILL)
      time.sleep(1.0)
      start()

    made.start = killing
    return made

  async def main():
    async with publishing(opened, model, way) as publisher:
      report = await publisher.publish(changed(original, seed=7), opened.next())
      assert report.state is State.COMMITTED, str(report)
      usable.writer = doomed
      begin = time.monotonic()
      report = await publisher.publish(changed(original, seed=5), opened.next())
      assert time.monotonic() - begin < 60
      assert report.state in (State.FENCED, State.UNKNOWN), str(report)
      assert server.url in report.message
      usable.writer = writer
      await asyncio.to_thread(server.restart)
      await publisher.recover()
      report = await publisher.publish(weights, opened.next())
      assert report.state is State.COMMITTED, str(report)

  asyncio.run(main())
  got, _ = score(server)
  want = reference(sglang_python, model, weights, tiny_llama, tmp_path / "export")
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_starts_its_server_with_a_window(
  usable, plugged, sglang_python, tiny_llama, tmp_path, monkeypatch
):
  monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(sglang_python))
  model = load_model(tiny_llama)
  original, said = load_weights(model, tiny_llama), []
  context = EngineContext(model, original, 0, tiny_llama, tmp_path / "run", 64, 0, said.append)

  async def main():
    host = await engines.sglang(transport=one_sided(type(usable)), start_seconds=600)(context)
    try:
      for version in (1, 2):
        weights = changed(original, seed=version)
        report = await host.publisher.publish(weights, version)
        assert report.state is State.COMMITTED, str(report)
        await host.revive(weights, version)  # at the same window, with another session
        assert await host.engine.version() == version
    finally:
      await host.close()

  asyncio.run(main())
  assert said == [f"transport {usable.name}"]
