"""Opens the parameters of a SGLang server to one-sided writes with NIXL.

Rank r listens at $AGENTRL_NIXL_HOST (127.0.0.1) : $AGENTRL_NIXL_PORT + r. Who sends the line
$AGENTRL_TRANSFER_TOKEN is told, as one JSON document, what a writer needs:

    {"agent": base64, "memory": "DRAM" | "VRAM", "device": number,
     "parameters": {name: [address, bytes, dtype, shape]}}

Without $AGENTRL_NIXL_PORT the plug-in does nothing. Parameters are looked up anew for every answer,
as an update may have moved them. NIXL's own thread serves the writes; SGLang's does not wait.
"""

import base64
import contextlib
import hmac
import importlib.util
import json
import os
import socket
import threading
import uuid

PORT = "AGENTRL_NIXL_PORT"
_SECONDS = 10.0  # for a peer to send its line


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
    listener = socket.create_server((os.environ.get("AGENTRL_NIXL_HOST", "127.0.0.1"), port))
    window = Window(runner.model)
    threading.Thread(target=serve, args=(listener, window, token), daemon=True).start()
  return result


def serve(listener: socket.socket, window: "Window", token: str) -> None:
  """Answers one connection after the other; one that fails is dropped."""
  while True:
    connection, _ = listener.accept()
    with connection:
      try:
        connection.settimeout(_SECONDS)
        line = connection.makefile("r").readline().strip()
        if hmac.compare_digest(line.encode(), token.encode()):
          connection.sendall(json.dumps(window.describe()).encode())
      except Exception as error:
        with contextlib.suppress(OSError):
          connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


class Window:
  """A model's parameters as memory that a NIXL agent of this process has registered."""

  def __init__(self, model):
    self.model = model
    api = nixl_api()
    self.agent = api.nixl_agent(f"window-{uuid.uuid4().hex}", api.nixl_agent_config())
    self._places = None
    self._registered = None

  def describe(self):
    """What a writer needs. Raises ValueError naming a parameter that is not contiguous."""
    parameters, places = {}, []
    memory, device = "DRAM", 0
    for name, value in self.model.named_parameters():
      if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
      if value.is_cuda:
        memory, device = "VRAM", value.device.index
      address, nbytes = value.data_ptr(), value.numel() * value.element_size()
      dtype = str(value.dtype).removeprefix("torch.")
      parameters[name] = [address, nbytes, dtype, list(value.shape)]
      if nbytes:
        places.append((address, nbytes, device, ""))
    places = sorted(set(places))  # tied parameters share their memory
    if places != self._places:
      if self._registered is not None:
        self.agent.deregister_memory(self._registered)
      self._registered = self.agent.register_memory(places, memory)
      self._places = places
    agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
    return {"agent": agent, "memory": memory, "device": device, "parameters": parameters}


def nixl_api():
  """NIXL's Python interface, by the name that the package for this CUDA gives it."""
  for name in ("nixl_cu13", "nixl_cu12"):
    if importlib.util.find_spec(name):
      return importlib.import_module(f"{name}._api")
  raise ImportError("NIXL is not installed: pip install --no-deps nixl-cu13")
