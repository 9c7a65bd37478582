"""Whole buckets in HTTP bodies, unpickled by the server: needs no shared file system and no torch
here.
"""

import binascii
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import numpy as np

from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import Plan
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports.pickled import Payload, flattened_bucket
from agentrl_jax.transfer.wire import bucket_entries

_CHUNK = 3 << 20  # bytes encoded at a time; a multiple of three


class TensorTransport:
  """Pushes through `/update_weights_from_tensor` in SGLang's `flattened_bucket` format.

  Every tensor-parallel rank is sent the whole bucket and slices it.

  Args:
    bucket_bytes: most bytes of a request before base64, unless one tensor is larger.
  """

  name = "tensor"
  align = 16

  def __init__(self, *, bucket_bytes: int = 128 << 20):
    self.bucket_bytes = bucket_bytes

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Ordinary memory, freed with the staged weights."""
    del key
    return allocate(plan)

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, each bucket, end."""
    await _begin(peer)
    for bucket in staged.plan.buckets:
      payload = flattened_bucket(bucket_entries(staged, bucket), bucket.nbytes)
      body = _Body(payload, staged.buffers[bucket.rank, bucket.index], ranks)
      await peer.call(
        "POST", "/update_weights_from_tensor", content=body.chunks(), length=body.length
      )
    await peer.call("POST", "/end_weight_update", {})

  def release(self, key: str) -> None:
    """Nothing outlives the staged weights."""


async def _begin(peer: Control) -> None:
  """Opens the session; one that a dead trainer left open is closed first."""
  try:
    await peer.call("POST", "/begin_weight_update", {})
  except CallError as error:
    if error.failure != "refused":
      raise
    with contextlib.suppress(CallError):
      await peer.call("POST", "/end_weight_update", {})
    await peer.call("POST", "/begin_weight_update", {})


class _Body:
  """The JSON of a request, encoded as it is sent: memory stays at one chunk."""

  def __init__(self, payload: Payload, data: np.ndarray, ranks: int):
    self.runs = (payload.head, data.data, payload.tail)
    self.ranks = ranks
    self.before = (
      b'{"load_format":"flattened_bucket","flush_cache":false,"serialized_named_tensors":['
    )
    size = 4 * -(-(len(payload.head) + payload.nbytes + len(payload.tail)) // 3)
    self.length = len(self.before) + ranks * (size + 2) + (ranks - 1) + len(b"]}")

  async def chunks(self) -> AsyncIterator[bytes]:
    yield self.before
    for rank in range(self.ranks):
      yield b',"' if rank else b'"'
      for chunk in _base64(self.runs):
        yield chunk
      yield b'"'
    yield b"]}"


def _base64(runs: Iterable[bytes | memoryview]) -> Iterator[bytes]:
  rest = b""
  for run in runs:
    for start in range(0, len(run), _CHUNK):
      chunk = rest + bytes(run[start : start + _CHUNK])
      whole = len(chunk) - len(chunk) % 3
      yield binascii.b2a_base64(chunk[:whole], newline=False)
      rest = chunk[whole:]
  yield binascii.b2a_base64(rest, newline=False)
