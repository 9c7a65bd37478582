"""A SGLang server's control routes over real HTTP, with a fault switch for every route.

It keeps what matters to a push: the weights it would answer with, their version, the version that
filled its prefix cache, and whether it is paused.
"""

import asyncio
import base64
import contextlib
import hashlib
import io
import itertools
import json
import math
import socket
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import load_file

from agentrl_jax.transfer.engine_layout import expected_checksums
from tests.reference.pickled import Reader

# 400; no answer; closed before, or after, it acts; the process ends before it acts, or is replaced;
# of a bucket: a bit flips on the way in, its second half or all of it is ignored, an older one
# comes again after it
Fault = Literal[
  "refuse", "hang", "drop", "lose", "die", "restart", "flip", "truncate", "ignore", "replay"
]
_START = itertools.count(1)


class FakeServer:
  """Use as an async context manager; `faults[route] = [fault, ...]` are used up one a call."""

  def __init__(self):
    self.tensors: dict[str, np.ndarray] = {"model.norm.weight": np.zeros(4, np.float32)}
    self.version, self.cached_by = "default", "default"
    self.paused = False
    self.faults: dict[str, list[Fault]] = {}
    self.calls: list[str] = []
    self.directories: list[str] = []
    self.corrupt = False  # loads a flipped bit
    self.beside: dict[str, np.ndarray] = {}  # parameters that no update reaches
    self.started = next(_START)
    self.buckets: list[list[tuple[str, np.ndarray]]] = []
    self.open = False  # between begin and end of an update
    self.groups: dict[str, socket.socket] = {}  # a socket stands for a process group
    self.takes_adapters, self.applies_adapters = True, True
    self.adapters: dict[str, dict[str, np.ndarray]] = {}
    self.answering: list[str] = []  # by which adapter, one for each request that runs
    self._server: asyncio.Server | None = None
    self._tasks: set[asyncio.Task] = set()

  async def __aenter__(self):
    self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
    self.port = self._server.sockets[0].getsockname()[1]
    return self

  async def __aexit__(self, *_):
    await self.stop()

  async def stop(self):
    """Dies: connections are refused from now on."""
    if self._server:
      self._server.close()
      for task in list(self._tasks):
        task.cancel()
      await asyncio.gather(*self._tasks, return_exceptions=True)
      self._server = None
    self._leave()

  def _leave(self):
    for group in self.groups.values():
      group.close()
    self.groups = {}

  async def restart(self):
    """A new process at the same address, with the weights it was started from."""
    await self.stop()
    self._reborn()
    self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

  def _reborn(self):
    """A new process: nothing is remembered, nobody told it to pause."""
    self.tensors = {"model.norm.weight": np.zeros(4, np.float32)}
    self.version = self.cached_by = "default"
    self.paused = self.open = False
    self.adapters = {}
    self._leave()
    self.started = next(_START)

  @property
  def url(self):
    return f"http://127.0.0.1:{self.port}"

  def answer(self) -> tuple[str, bytes]:
    """What a request would see now: (version, a hash of the weights). Raises while paused."""
    assert not self.paused, "a paused server answers nothing"
    assert self.cached_by in (self.version, "empty"), "answered from an older version's cache"
    self.cached_by = self.version
    return self.version, b"".join(a.tobytes() for _, a in sorted(self.tensors.items()))

  async def _serve(self, reader, writer):
    task = asyncio.current_task()
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    with (
      contextlib.closing(writer),
      contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
    ):
      while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        route = head[0].split()[1]
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.calls.append(route)
        fault = self.faults[route].pop(0) if self.faults.get(route) else None
        if fault == "hang":
          await asyncio.sleep(3600)
        if fault == "drop":
          return
        if fault == "die":
          self._server.close()
          for other in self._tasks - {task}:
            other.cancel()
          self._server = None
          return
        if fault == "restart":
          self._reborn()
          return
        status, answer = 400, {"success": False, "message": "told to refuse"}
        if fault != "refuse":
          status, answer = self._act(route, json.loads(body) if body else {}, fault)
        if fault == "lose":
          return
        text = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()

  def _act(self, route, body, fault):
    match route:
      case "/model_info":
        return 200, {"weight_version": self.version}
      case "/server_info":
        return 200, {
          "tp_size": 1, "dtype": "float32", "device": "cpu", "startup_time": self.started,
          "enable_lora": self.takes_adapters,
        }  # fmt: skip
      case "/v1/models":
        cards = [{"id": name, "parent": "model"} for name in self.adapters]
        return 200, {"data": [{"id": "model", "parent": None}, *cards]}
      case "/load_lora_adapter_from_tensors":
        return self._load_adapter(body)
      case "/unload_lora_adapter":
        assert body["lora_name"] not in self.answering, (
          "the server would wait, and others behind it"
        )
        if self.adapters.pop(body["lora_name"], None) is None:
          return 400, {"success": False, "error_message": f"{body['lora_name']} does not exist"}
      case "/generate":
        return self._generate(body)
      case "/pause_generation":
        self.paused = True
      case "/continue_generation":
        self.paused = False
      case "/flush_cache":
        self.cached_by = "empty"
      case "/update_weight_version":
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
      case "/weights_checker":
        checksums = self._checksums()
        return 200, {"ranks": [{"checksums": checksums, "parallelism_info": [{"tp_rank": 0}]}]}
      case "/update_weights_from_disk":
        assert self.paused, "written while generating"
        assert body["flush_cache"] is False
        self.directories.append(body["model_path"])
        self.tensors = {
          name: array
          for path in sorted(Path(body["model_path"]).glob("*.safetensors"))
          for name, array in load_file(path).items()
        }
        if self.corrupt:
          self.tensors["model.norm.weight"][0] += 1
      case "/begin_weight_update":
        if self.open:
          return 400, {"success": False, "message": "an update is open"}
        self.open = True
      case "/update_weights_from_tensor":
        assert self.paused, "written while generating"
        if not self.open:
          return 400, {"success": False, "message": "no update is open"}
        assert body["flush_cache"] is False
        (payload,) = body["serialized_named_tensors"]
        self._load(_read(payload, body["load_format"]), fault)
      case "/init_weights_update_group":
        assert (body["rank_offset"], body["world_size"], body["backend"]) == (1, 2, "gloo")
        where = (body["master_address"], body["master_port"])
        self.groups[body["group_name"]] = socket.create_connection(where, 5.0)
      case "/destroy_weights_update_group":
        if body["group_name"] not in self.groups:
          return 400, {"success": False, "message": "no such group"}
        self.groups.pop(body["group_name"]).close()
      case "/update_weights_from_distributed":
        assert self.paused, "written while generating"
        assert (body["flush_cache"], body["load_format"]) == (False, "flattened_bucket")
        if not self.open or body["group_name"] not in self.groups:
          return 400, {"success": False, "message": "no update is open, or no such group"}
        named = _receive(self.groups[body["group_name"]], body)
        if named is None:
          return 400, {"success": False, "message": "the group is gone"}
        self._load(named, fault)
      case "/end_weight_update":
        self.open = False
      case _:
        return 404, {}
    return 200, {"success": True}

  def _load_adapter(self, body):
    """As SGLang: a name is loaded once, and every tensor must have its checksum."""
    (payload,) = body["serialized_named_tensors"]
    tensors = dict(_read(payload, body["load_format"]))
    if body["lora_name"] in self.adapters:
      return 400, {"success": False, "error_message": f"{body['lora_name']} is already loaded"}
    made = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}
    assert made == body["expected_checksums"], "this would end a server"
    assert body["config_dict"]["peft_type"] == "LORA"
    self.adapters[body["lora_name"]] = tensors
    return 200, {"success": True}

  def _generate(self, body):
    """Log-probs of the prompt, which depend on the adapter."""
    name = body["lora_path"]
    if name is not None and name not in self.adapters:
      return 400, {"error": {"message": f"{name} was never loaded"}}
    change = 0.0
    if name is not None and self.applies_adapters:
      change = sum(float(np.abs(array).sum()) for array in self.adapters[name].values())
    entries = [[None, i, None] if k == 0 else [-1.0 - change, i, None]
               for k, i in enumerate(body["input_ids"])]  # fmt: skip
    return 200, {"output_ids": [0], "meta_info": {"input_token_logprobs": entries}}

  def _checksums(self):
    return self._of_tensors() | {
      name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in self.beside.items()
    }

  def _of_tensors(self):
    if any("qkv_proj" in name for name in self.tensors):  # a direct push: its own parameters
      return {
        name: hashlib.sha256(array.tobytes()).hexdigest()[:16]
        for name, array in self.tensors.items()
      }
    (checksums,) = expected_checksums(self.tensors, 1)
    return checksums

  def _load(self, named, fault):
    if fault == "flip":
      name, array = named[0]
      array = array.copy()
      array.reshape(-1).view(np.uint8)[0] ^= 1
      named = [(name, array), *named[1:]]
    if fault == "truncate":
      named = named[: len(named) // 2]
    if fault == "ignore":
      named = []
    self.tensors |= dict(named)
    if fault == "replay" and self.buckets:
      self.tensors |= dict(self.buckets[0])
    self.buckets.append(named)


def _read(payload, load_format):
  """[(name, array)] of one payload, in either format."""
  read = Reader(io.BytesIO(base64.b64decode(payload, validate=True))).load()
  if load_format == "direct":
    return [(name, np.array(array)) for name, array in read]
  return [
    (item.name, read["flattened_tensor"][item.start_idx : item.end_idx].view(item.dtype)
     .reshape(item.shape))
    for item in read["metadata"]
  ]  # fmt: skip


def _receive(group, body):
  """[(name, array)] of one broadcast, or None where the sender has left."""
  named = []
  for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
    left, data = math.prod(shape) * np.dtype(dtype).itemsize, b""
    while len(data) < left:
      chunk = group.recv(left - len(data))
      if not chunk:
        return None
      data += chunk
    named.append((name, np.frombuffer(data, dtype).reshape(shape)))
  return named
