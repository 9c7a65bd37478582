"""A torch process group of a sender and a server's ranks: gloo on CPU, NCCL on GPUs.

Torch's groups speak only to torch, and this process has none: a small sender in SGLang's own
environment (`third_party/sglang/broadcast.py`) reads the packed weights from shared memory and
broadcasts them. Each server has a sender and a group of its own, so that one which is gone holds up
nobody else.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import ITEM_BYTES, Plan
from agentrl_jax.transfer.round import process_of
from agentrl_jax.transfer.stage import Staged
from agentrl_jax.transfer.transports import Delivery
from agentrl_jax.transfer.transports.disk import SHARED_MEMORY, DiskTransport
from agentrl_jax.transfer.transports.tensor import session
from agentrl_jax.transfer.wire import bucket_entries

SENDER = Path(__file__).parents[3] / "third_party/sglang/broadcast.py"


class BroadcastTransport:
  """Pushes through `/update_weights_from_distributed` in SGLang's `flattened_bucket` format.

  Every tensor-parallel rank is sent the whole bucket and slices it.

  Args:
    command: that starts a sender: SGLang's interpreter and `SENDER`.
    host: this machine, as the servers reach it. A server that cannot is stuck for as long as torch
      waits, half an hour.
    root: directory in a memory file system for the packed weights.
    bucket_bytes: most bytes of a broadcast, unless one tensor is larger.
  """

  name = "broadcast"
  per_rank = False
  align = 1  # the format has no gaps

  def __init__(
    self,
    command: Sequence[str],
    *,
    host: str = "127.0.0.1",
    root: str | os.PathLike[str] = f"{SHARED_MEMORY}-broadcast",
    bucket_bytes: int = 256 << 20,
  ):
    self.command, self.host, self.bucket_bytes = list(command), host, bucket_bytes
    self._staging = DiskTransport(root, bucket_bytes=bucket_bytes)
    self._senders: dict[str, _Sender] = {}  # by the server's URL
    self._left: dict[str, list[str]] = {}  # groups that servers still hold, likewise

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Mapped files that the senders read.

    Raises:
      OSError: as `DiskTransport.allocate`.
      ValueError: naming a tensor that the server could not view in its bucket.
    """
    for s in plan.segments:
      if s.offset % ITEM_BYTES[s.dtype]:
        raise ValueError(f"{s.name} of {s.dtype} would start at byte {s.offset} of its broadcast")
    return self._staging.allocate(plan, key)

  async def deliver(self, staged: Staged, peer: Control, version: int) -> Delivery:
    """Makes the group where there is none with the server as it runs now. Moves nothing."""
    del staged, version
    facts = await peer.facts()
    who = process_of(facts)
    found = self._senders.get(peer.url)
    if found is not None and found.joined == who and found.alive():
      return Delivery()
    self._end(peer.url)
    for group in self._left.pop(peer.url, []):
      with contextlib.suppress(CallError):  # a server that was restarted has none
        await peer.call("POST", "/destroy_weights_update_group", {"group_name": group})
    sender = _Sender(self.command, peer)
    self._senders[peer.url] = sender
    try:
      await sender.join(self.host, "nccl" if facts["device"] == "cuda" else "gloo", facts)
    except BaseException:
      self._end(peer.url)
      raise
    sender.joined = who
    return Delivery()

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, each bucket, end. A failure ends the group."""
    del ranks
    sender = self._senders[peer.url]
    try:
      async with session(peer):
        for bucket, path in zip(staged.plan.buckets, self._staging.files(staged.key), strict=True):
          entries = sorted(bucket_entries(staged, bucket), key=lambda e: (e.offset, e.nbytes))
          sender.ask(
            op="send", path=str(path), offset=path.stat().st_size - bucket.nbytes,
            nbytes=bucket.nbytes,
          )  # fmt: skip
          body = {
            "names": [e.name for e in entries],
            "dtypes": [e.dtype for e in entries],
            "shapes": [e.shape for e in entries],
            "group_name": sender.group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
          }
          await peer.call("POST", "/update_weights_from_distributed", body)
          await sender.answer("sent")
    except BaseException:
      self._end(peer.url)
      raise

  def release(self, key: str) -> None:
    """Removes the round's files."""
    self._staging.release(key)

  def close(self) -> None:
    """Ends the senders; a later round starts others."""
    for url in list(self._senders):
      self._end(url)

  def _end(self, url: str) -> None:
    if sender := self._senders.pop(url, None):
      sender.kill()
      self._left.setdefault(url, []).append(sender.group)


class _Sender:
  """One sender process and its group with one server."""

  def __init__(self, command: Sequence[str], peer: Control):
    self.peer, self.group = peer, f"weights-{secrets.token_hex(8)}"
    self.joined: tuple[Any, ...] | None = None  # the server's process
    self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
    try:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._log,
        text=True,
        start_new_session=True,  # Ctrl-C is the trainer's to handle
      )
    except OSError as error:
      raise CallError("unreachable", f"{peer.url}: no sender: {error}") from error

  def alive(self) -> bool:
    return self._process.poll() is None

  async def join(self, host: str, backend: str, facts: Mapping[str, Any]) -> None:
    """Makes the group: the server looks for it only once it can be found."""
    world = 1 + int(facts["tp_size"])
    self.ask(op="join", backend=backend, host=host, world=world, group=self.group)
    port = (await self.answer("port"))["port"]
    body = {
      "master_address": host, "master_port": port, "rank_offset": 1, "world_size": world,
      "group_name": self.group, "backend": backend,
    }  # fmt: skip
    await self.peer.call("POST", "/init_weights_update_group", body)
    await self.answer("joined")

  def ask(self, **request: Any) -> None:
    """Writes one request. A sender that is gone is noticed by the answer."""
    assert self._process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
      self._process.stdin.write(json.dumps(request) + "\n")
      self._process.stdin.flush()

  async def answer(self, field: str) -> Mapping[str, Any]:
    """The next answer, which must have `field`. Raises CallError after the server's deadline."""
    assert self._process.stdout is not None
    reading = asyncio.create_task(asyncio.to_thread(self._process.stdout.readline))
    done, _ = await asyncio.wait({reading}, timeout=self.peer.deadline)
    if not done:
      self.kill()  # which ends the thread that reads
      message = f"{self.peer.url}: the sender said nothing for {self.peer.deadline:g} s"
      raise CallError("lost", message)
    try:
      said = json.loads(reading.result())
    except ValueError:
      said = {"error": f"it ended: {self._last_words()}"}
    if field not in said:
      raise CallError("refused", f"{self.peer.url}: the sender: {said.get('error', said)}")
    return said

  def _last_words(self) -> str:
    size = self._log.seek(0, os.SEEK_END)
    self._log.seek(max(0, size - 2000))
    lines = self._log.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no word")

  def kill(self) -> None:
    """Ends the process, and with it the group's connections. Idempotent."""
    if self._log.closed:
      return
    self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout, self._log):
      assert pipe is not None
      with contextlib.suppress(OSError):  # what was not written any more
        pipe.close()
