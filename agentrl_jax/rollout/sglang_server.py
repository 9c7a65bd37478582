"""A SGLang server as a resource with a lifetime: started, watched, restarted and ended by us.

The server and everything it forks form one process group under `sglang_watch`, so `close` ends
exactly what `start` began, and so does the trainer's death when no handler can run.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.rollout import sglang_watch
from agentrl_jax.rollout.engine import EngineDead, EngineError
from agentrl_jax.rollout.listening import listens

_REPOSITORY = Path(__file__).resolve().parents[2]
_TAIL_LINES = 20
_CLOSE_SECONDS = 10.0
PORTS = range(20_000, 32_000)  # below those that Linux gives to connections by itself
_TRIES = 3  # of free ports that another process takes while the server loads
_OWNED_FLAGS = frozenset({
  "--model-path", "--model", "--host", "--port", "--dtype", "--tp-size", "--tensor-parallel-size",
  "--tp", "--skip-tokenizer-init", "--max-total-tokens", "--context-length",
})  # fmt: skip

# SGLang refuses inputs that come closer than 6 tokens to its context length.
_RESERVES = 8


@dataclasses.dataclass(frozen=True)
class ServerOptions:
  """What to serve and how.

  `model` is a Hugging Face directory (config.json, safetensors). `port` 0 takes a free one. `dtype`
  is what the server computes in; SGLang's own "auto" would turn float32 into float16. `tokenizer`
  False serves ids only, which is all that rollouts use. `context_length` is the longest sequence it
  takes, prompt and answer together (None: what the model's config.json says). `max_total_tokens`
  bounds the KV cache (None: SGLang decides, on CPU 65536). `python` is the interpreter SGLang is
  installed in; None means $AGENTRL_SGLANG_PYTHON, else .venv-sglang of this repository. `log` None
  makes a temporary file. `extra` goes to SGLang as it is, `environment` is added to this process's.
  """

  model: Path
  dtype: str = "float32"
  tensor_parallel: int = 1
  host: str = "127.0.0.1"
  port: int = 0
  tokenizer: bool = False
  context_length: int | None = None
  max_total_tokens: int | None = None
  start_seconds: float = 300.0
  python: Path | None = None
  log: Path | None = None
  extra: tuple[str, ...] = ()
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    object.__setattr__(self, "model", Path(self.model))
    if self.dtype not in ("float32", "bfloat16", "float16"):
      raise ValueError(f"dtype is {self.dtype!r}, expected float32, bfloat16 or float16")
    if self.tensor_parallel < 1:
      raise ValueError(f"tensor_parallel is {self.tensor_parallel}, expected at least 1")
    if not 0 <= self.port < 65536:
      raise ValueError(f"port is {self.port}, expected 0 (any free one) to 65535")
    owned = [flag for flag in self.extra if flag.split("=")[0] in _OWNED_FLAGS]
    if owned:
      raise ValueError(f"extra holds {owned[0]}, which has a field of its own in ServerOptions")


class SGLangServer:
  """One server process tree on this machine.

  Use it as a context manager, or call `start` and `close`. Both block; from a coroutine use
  `asyncio.to_thread`. `close` also runs at interpreter exit.

  Raises:
    FileNotFoundError: no model directory or no SGLang interpreter, before anything starts.
    ValueError: a context longer than the model's, or a config.json without vocab_size, likewise.
    EngineError: `start` found the port taken, or free ones taken while it started, three times.
      What answers there is taken for this server only if one of its processes listens.
    EngineDead: `start` saw the process end, or no answer within `start_seconds`; the log's tail is
      quoted.
  """

  def __init__(self, options: ServerOptions):
    config = options.model / "config.json"
    if not config.is_file():
      raise FileNotFoundError(f"model directory {options.model} has no config.json")
    self.options = options
    fields = _fields(config)
    self.vocab_size: int = fields["vocab_size"]
    longest = fields.get("max_position_embeddings")
    if longest is not None and (options.context_length or 0) > longest:
      raise ValueError(
        f"context_length is {options.context_length}, expected at most {longest}, the "
        f"max_position_embeddings of {config}"
      )
    self._python = find_python(options.python)
    if options.log is None:
      descriptor, path = tempfile.mkstemp(prefix="sglang-", suffix=".log")
      os.close(descriptor)
      self.log = Path(path)
    else:
      self.log = Path(options.log)
    self._watch: subprocess.Popen | None = None
    self._port = options.port
    self._log_start = 0  # of what this start of the server writes
    self.pid = 0  # of the server's main process, which leads its group; 0 before start

  def __enter__(self) -> "SGLangServer":
    self.start()
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @property
  def url(self) -> str:
    """Where it serves; known once `start` was called."""
    if not self._port:
      raise EngineError(f"SGLang server for {self.options.model} has no port before start()")
    return f"http://{self.options.host}:{self._port}"

  def start(self) -> None:
    """Starts the server and returns when it answers. Ends what it began if that fails."""
    if self._watch is not None:
      raise EngineError(f"SGLang server {self.url} was already started")
    wanted = self._port
    for left in reversed(range(1 if wanted else _TRIES)):
      self._port = claim_port(self.options.host, wanted)
      try:
        return self._launch()
      except _PortTaken:
        self._port = wanted
        if not left:
          raise

  def _launch(self) -> None:
    cuda = has_cuda()
    command = [sys.executable, sglang_watch.__file__, str(os.getpid()), str(self._python)]
    command += server_arguments(self.options, self._port, cuda=cuda)
    environment = server_environment(self.options.tensor_parallel, cuda=cuda)
    environment |= self.options.environment
    self.log.parent.mkdir(parents=True, exist_ok=True)
    try:
      with open(self.log, "ab") as log:
        self._log_start = log.tell()
        self._watch = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=log,
          env=environment,
          start_new_session=True,
        )
      atexit.register(self.close)
      assert self._watch.stdout is not None
      self.pid = int(self._watch.stdout.readline() or 0)
      self._wait_until_healthy()
    except BaseException:  # Ctrl-C too: nothing may stay behind
      self.close()
      raise

  def alive(self) -> bool:
    """Whether the server that `start` made still runs. Never blocks."""
    return self._watch is not None and self._watch.poll() is None

  def restart(self) -> None:
    """Ends what is left of the server and starts it again at the same address, from the model
    directory.
    """
    self.close()
    self.start()

  def close(self) -> None:
    """Ends the processes that `start` made, and nothing else. Idempotent."""
    watch, self._watch = self._watch, None
    atexit.unregister(self.close)
    if watch is None:
      return
    watch.terminate()
    try:
      code = watch.wait(timeout=_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
      watch.kill()
      code = watch.wait(timeout=_CLOSE_SECONDS)
    finally:
      if watch.stdout is not None:
        watch.stdout.close()
    # Only a killed watch leaves its group behind. The session says whether that number is still
    # ours.
    if code < 0 and self.pid:
      with contextlib.suppress(ProcessLookupError):
        if os.getsid(self.pid) == watch.pid:
          os.killpg(self.pid, signal.SIGKILL)

  def log_tail(self) -> str:
    """The log's last lines since the server was started, indented, for error messages."""
    with open(self.log, "rb") as log:
      log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - 20_000))
      lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:])

  def _wait_until_healthy(self) -> None:
    deadline = time.monotonic() + self.options.start_seconds
    while self.alive():
      answer = _health(self.url)
      if answer == "200":
        if listens(self.pid, self._port) is False:
          raise _PortTaken(
            f"SGLang server {self.url} found its port taken: another process, which came while it "
            "loaded, answers there"
          )
        return
      if time.monotonic() > deadline:
        raise EngineDead(
          f"SGLang server {self.url} was not healthy within {self.options.start_seconds:g} s "
          f"(/health: {answer}); its log {self.log} ends with:\n{self.log_tail()}"
        )
      time.sleep(0.2)
    if "address already in use" in self.log_tail().lower():  # it binds only once it has loaded
      raise _PortTaken(
        f"SGLang server {self.url} found its port taken by another process, which came while it "
        f"loaded; its log is {self.log}"
      )
    raise EngineDead(
      f"SGLang server {self.url} ended while starting; "
      f"its log {self.log} ends with:\n{self.log_tail()}"
    )


class _PortTaken(EngineError):
  """Another process listens where the server wanted to."""


def _fields(config: Path) -> dict[str, Any]:
  """Of a model's config.json, with a vocab_size. Raises ValueError, with its path, otherwise."""
  try:
    fields = json.loads(config.read_text())
  except ValueError as error:
    raise ValueError(f"{config}: not JSON: {error}") from error
  size = fields.get("vocab_size") if isinstance(fields, dict) else None
  if not isinstance(size, int) or size < 1:
    raise ValueError(f"{config}: vocab_size is {size!r}, expected a whole number > 0")
  return fields


def find_python(path: Path | None = None) -> Path:
  """The interpreter that has SGLang: argument, $AGENTRL_SGLANG_PYTHON, or .venv-sglang."""
  chosen = (
    path or os.environ.get("AGENTRL_SGLANG_PYTHON") or _REPOSITORY / ".venv-sglang/bin/python"
  )
  if not os.access(chosen, os.X_OK):
    raise FileNotFoundError(
      f"no SGLang interpreter at {chosen}: run bash third_party/sglang/install.sh"
    )
  return Path(chosen)


def has_cuda() -> bool:
  """Whether a CUDA device answers here."""
  if shutil.which("nvidia-smi") is None:
    return False
  return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode == 0


def claim_port(host: str, port: int) -> int:
  """`port`, or a free one for 0. Raises EngineError when something already listens there."""
  if not port:
    draw = random.SystemRandom()  # so that two who look at once find different ones
    for port in draw.sample(PORTS, 100):
      with contextlib.suppress(EngineError):
        return claim_port(host, port)
    raise EngineError(f"cannot serve SGLang on {host}: no port of {PORTS} is free")
  with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, port))
    except OSError as error:
      raise EngineError(f"cannot serve SGLang on {host}:{port}: {error.strerror}") from error
    return probe.getsockname()[1]


def server_arguments(options: ServerOptions, port: int, *, cuda: bool) -> Sequence[str]:
  """The interpreter's arguments that start the server; on CPU the paths that need no compiled
  kernel.
  """
  arguments = [
    "-m",
    "sglang.launch_server",
    "--model-path",
    str(options.model),
    "--host",
    options.host,
  ]
  arguments += [
    "--port",
    str(port),
    "--sleep-on-idle",  # else the scheduler polls, and takes a core from the learner's step
    "--dtype",
    options.dtype,
    "--tp-size",
    str(options.tensor_parallel),
  ]
  max_total_tokens = options.max_total_tokens
  if not cuda:
    arguments += [
      "--device",
      "cpu",
      "--attention-backend",
      "torch_native",
      "--sampling-backend",
      "pytorch",
    ]
    arguments += ["--disable-cuda-graph", "--grammar-backend", "none"]
    max_total_tokens = max_total_tokens or 65536
  if max_total_tokens is not None:
    arguments += ["--max-total-tokens", str(max_total_tokens)]
  if options.context_length is not None:
    arguments += ["--context-length", str(options.context_length + _RESERVES)]
  if not options.tokenizer:
    arguments += ["--skip-tokenizer-init"]
  return [*arguments, *options.extra]


def server_environment(tensor_parallel: int, *, cuda: bool) -> dict[str, str]:
  """This process's environment with what the server needs.

  Log-probs stay those of the temperature-scaled distribution. /health answers without generating: a
  generating one fails while generation is paused for a weight update, and a stuck scheduler is
  caught by the deadline of each call. A context longer than the model's is allowed for the part
  that SGLang keeps for itself; `SGLangServer` refuses one that is longer for any other reason.
  """
  environment = dict(os.environ)
  environment |= {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
  }
  if not cuda:
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # More threads help a server that is alone, and cost it most of its speed beside a busy trainer.
    environment.setdefault("OMP_NUM_THREADS", "1")
    if tensor_parallel > 1:
      cores = os.cpu_count() or 1
      binding = "|".join(str(rank % cores) for rank in range(tensor_parallel))
      environment["SGLANG_CPU_OMP_THREADS_BIND"] = binding
  return environment


def _health(url: str) -> str:
  """The status code of /health, or why there is none."""
  direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as in sglang.py
  try:
    with direct.open(f"{url}/health", timeout=5) as answer:
      return str(answer.status)
  except urllib.error.HTTPError as error:
    return str(error.code)
  except OSError as error:
    return str(getattr(error, "reason", error))
