"""Opens the parameters of a SGLang server to one-sided writes, with NIXL or with Mooncake.

Rank r listens at $AGENTRL_WINDOW_HOST (127.0.0.1) : $AGENTRL_WINDOW_PORT + r. Who sends the line
"$AGENTRL_TRANSFER_TOKEN LIBRARY" is told, as one JSON document, what a writer needs:

    {"parameters": {name: [address, bytes, dtype, shape]}, ...}      and what the library adds
    {"error": text}

Without $AGENTRL_WINDOW_PORT the plug-in does nothing. Parameters are looked up anew for every
answer, as an update may have moved them. The library's own thread serves the writes; SGLang's does
not wait.
"""

import base64
import contextlib
import hmac
import importlib
import importlib.util
import json
import os
import socket
import threading
import uuid

PORT = "AGENTRL_WINDOW_PORT"
PROTOCOL = "AGENTRL_MOONCAKE_PROTOCOL"
_SECONDS = 10.0  # for a peer to send its line
_PATIENCE = 10_000  # microseconds that NIXL's thread sleeps unless something arrives


def register() -> None:
  """The entry point `sglang.srt.plugins`."""
  from sglang.srt.plugins.hook_registry import HookRegistry, HookType

  if PORT in os.environ:
    method = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(method, load_model, HookType.AROUND)


def load_model(original, runner, *args, **kwargs):
  """Loads the model, then opens its parameters."""
  from sglang.srt.runtime_context import get_parallel

  result = original(runner, *args, **kwargs)
  if not runner.is_draft_worker:
    token = os.environ["AGENTRL_TRANSFER_TOKEN"]
    port = int(os.environ[PORT]) + get_parallel().tp_rank
    listener = listen(os.environ.get("AGENTRL_WINDOW_HOST", "127.0.0.1"), port)
    window = Window(runner.model)
    threading.Thread(target=serve, args=(listener, window, token), daemon=True).start()
  return result


def listen(host, port):
  """A listener at a port that whoever started the server may hold bound meanwhile."""
  return socket.create_server((host, port), reuse_port=True)


def serve(listener: socket.socket, window: "Window", token: str) -> None:
  """Answers one connection after the other; one that fails is dropped."""
  while True:
    connection, _ = listener.accept()
    with connection:
      try:
        connection.settimeout(_SECONDS)
        given, _, library = connection.makefile("r").readline().strip().rpartition(" ")
        if hmac.compare_digest(given.encode(), token.encode()):
          found = window.describe(library, connection.getsockname()[0])
          connection.sendall(json.dumps(found).encode())
      except Exception as error:
        with contextlib.suppress(OSError):
          connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


class Window:
  """A model's parameters, and the libraries that have been asked to open them."""

  def __init__(self, model):
    self.model = model
    self._opened = {}

  def describe(self, library, host):
    """What a writer with `library` needs, who reaches this machine at `host`.

    Raises:
      ImportError: the library is not installed.
      ValueError: there is no such library, or a parameter is not contiguous.
    """
    if library not in LIBRARIES:
      raise ValueError(f"no library {library!r}, there are {', '.join(LIBRARIES)}")
    parameters, places, device = {}, set(), None
    for name, value in self.model.named_parameters():
      if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
      if value.is_cuda:
        device = value.device.index
      address, nbytes = value.data_ptr(), value.numel() * value.element_size()
      dtype = str(value.dtype).removeprefix("torch.")
      parameters[name] = [address, nbytes, dtype, list(value.shape)]
      if nbytes:
        places.add((address, nbytes))  # tied parameters share theirs
    if library not in self._opened:
      self._opened[library] = LIBRARIES[library]()
    found = self._opened[library].open(tuple(sorted(places)), device, host)
    return {"parameters": parameters, **found}


class Nixl:
  """Adds {"agent": base64, "memory": "DRAM" | "VRAM", "device": number}."""

  def __init__(self):
    self._agent = patient_agent(nixl_api(), f"window-{uuid.uuid4().hex}")
    self._places, self._registered = None, None

  def open(self, places, device, host):
    """Registers memory once, and again when it has moved."""
    del host  # the agent knows its machine's addresses
    memory, number = ("DRAM", 0) if device is None else ("VRAM", device)
    if places != self._places:
      if self._registered is not None:
        self._agent.deregister_memory(self._registered)
      listed = [(address, nbytes, number, "") for address, nbytes in places]
      self._registered = self._agent.register_memory(listed, memory)
      self._places = places
    agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
    return {"agent": agent, "memory": memory, "device": number}


class Mooncake:
  """Adds {"session": "HOST:PORT", "protocol": "" | "tcp" | "rdma"}.

  A session is one registration: memory that moves gets another, so no writer uses what it knows
  of the old one.
  """

  def __init__(self):
    self._engine_type = mooncake_engine()
    self._opened, self._engine = None, None

  def open(self, places, device, host):
    """Registers memory once, and again when it has moved."""
    del device  # it finds out where an address lies
    protocol = os.environ.get(PROTOCOL, "")
    if (places, host) != self._opened:
      self._opened = self._engine = None
      engine = start_engine(self._engine_type, host, protocol)
      if engine.batch_register_memory([a for a, _ in places], [n for _, n in places]):
        raise RuntimeError(f"Mooncake could not register {len(places)} parameters")
      self._opened, self._engine = (places, host), engine
    return {"session": f"{host}:{self._engine.get_rpc_port()}", "protocol": protocol}


LIBRARIES = {"nixl": Nixl, "mooncake": Mooncake}


def why_not(library):
  """Why a library does not work in this environment, or ""."""
  try:
    {"nixl": nixl_api, "mooncake": mooncake_engine}[library]()
  except ImportError as error:
    return str(error)
  return ""


def nixl_api():
  """NIXL's Python interface, by the name that the package for this CUDA gives it."""
  for name in ("nixl_cu13", "nixl_cu12"):
    if importlib.util.find_spec(name):
      return importlib.import_module(f"{name}._api")
  raise ImportError("NIXL is not installed: pip install --no-deps nixl-cu13")


def patient_agent(api, name):
  """An agent whose thread sleeps until something arrives.

  NIXL's Python interface sets that thread's delay to 0: it would poll, and keep a core of the
  server's machine busy, for as long as the agent lives.
  """
  bindings, config = api.nixlBind, api.nixlBind.nixlAgentConfig

  class Patient(config):
    def __setattr__(self, field, value):
      super().__setattr__(field, _PATIENCE if field == "pthrDelay" else value)

  bindings.nixlAgentConfig = Patient
  try:
    return api.nixl_agent(name, api.nixl_agent_config())
  finally:
    bindings.nixlAgentConfig = config


def mooncake_engine():
  """Mooncake's class of engines."""
  os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when it is loaded
  try:
    return importlib.import_module("mooncake.engine").TransferEngine
  except ImportError as error:
    raise ImportError(
      f"Mooncake is not installed ({error}): pip install --no-deps "
      "mooncake-transfer-engine-non-cuda, and with it Debian's libibverbs1, libnuma1, "
      "libnl-3-200 and libnl-route-3-200"
    ) from error


def start_engine(engine_type, host, protocol):
  """An engine that others find at `host`. Raises RuntimeError where it cannot use `protocol`.

  Mooncake takes RDMA where it finds a card for it and TCP elsewhere, whatever protocol it is
  given; only its environment says otherwise.
  """
  if forced := {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}.get(protocol):
    os.environ[forced] = "1"
  engine = engine_type()
  if engine.initialize(host, "P2PHANDSHAKE", protocol or "rdma", ""):
    raise RuntimeError(f"Mooncake does not start with protocol {protocol or 'of its choice'!r}")
  return engine
