"""A SGLang server's control routes over real HTTP, with a fault switch for every route.

It keeps what matters to a push: the weights it would answer with, their version, the version that
filled its prefix cache, and whether it is paused.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import load_file

from agentrl_jax.transfer.engine_layout import expected_checksums

Fault = Literal[
  "refuse", "hang", "drop", "lose"
]  # 400; no answer; closed before, or after, it acts


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

  async def restart(self):
    """A new process at the same address, with the weights it was started from."""
    await self.stop()
    self.tensors = {"model.norm.weight": np.zeros(4, np.float32)}
    self.version = self.cached_by = "default"
    self.paused = False
    self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

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
        status, answer = 400, {"success": False, "message": "told to refuse"}
        if fault != "refuse":
          status, answer = self._act(route, json.loads(body) if body else {})
        if fault == "lose":
          return
        text = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()

  def _act(self, route, body):
    match route:
      case "/model_info":
        return 200, {"weight_version": self.version}
      case "/server_info":
        return 200, {"tp_size": 1, "dtype": "float32", "device": "cpu"}
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
        (checksums,) = expected_checksums(self.tensors, 1)
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
      case _:
        return 404, {}
    return 200, {"success": True}
