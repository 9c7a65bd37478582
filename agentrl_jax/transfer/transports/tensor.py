"""Whole buckets in HTTP bodies, unpickled by the server: needs no shared file system and no torch
here.
"""

import binascii
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

import numpy as np

from agentrl_jax.transfer.control import CallError, Control
from agentrl_jax.transfer.plan import Bucket, Plan
from agentrl_jax.transfer.stage import Staged, allocate
from agentrl_jax.transfer.transports.pickled import Payload, flattened_bucket, named_tensors
from agentrl_jax.transfer.wire import bucket_entries

_CHUNK = 3 << 20  # bytes encoded at a time; a multiple of three


class _InRequests:
  """What both have in common: buckets wait in ordinary memory and travel in request bodies."""

  align = 16

  def __init__(self, *, bucket_bytes: int = 128 << 20):
    self.bucket_bytes = bucket_bytes

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Ordinary memory, freed with the staged weights."""
    del key
    return allocate(plan)

  def release(self, key: str) -> None:
    """Nothing outlives the staged weights."""

  def close(self) -> None:
    """Nothing was started."""


class TensorTransport(_InRequests):
  """Pushes through `/update_weights_from_tensor` in SGLang's `flattened_bucket` format.

  Every tensor-parallel rank is sent the whole bucket and slices it.

  Args:
    bucket_bytes: most bytes of a request before base64, unless one tensor is larger.
  """

  name = "bucket"
  per_rank = False

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, each bucket, end."""
    async with session(peer):
      for bucket in staged.plan.buckets:
        payload = flattened_bucket(bucket_entries(staged, bucket), bucket.nbytes)
        data = staged.buffers[bucket.rank, bucket.index]
        await post(peer, [(payload, data)] * ranks, "flattened_bucket")


class DirectTransport(_InRequests):
  """Pushes each rank's own parameters through `/update_weights_from_tensor`: `direct` format.

  Fusing and cutting are done here, where the weights are, and no rank is sent another's.

  Args:
    bucket_bytes: most bytes of a request and rank before base64, unless one parameter is larger.
  """

  name = "direct"
  per_rank = True

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """One update session: begin, the k-th bucket of every rank at once, end."""
    by_index: dict[int, dict[int, Bucket]] = {}
    for bucket in staged.plan.buckets:
      by_index.setdefault(bucket.index, {})[bucket.rank] = bucket
    async with session(peer):
      for _, buckets in sorted(by_index.items()):
        payloads = [_of_rank(staged, buckets.get(rank)) for rank in range(ranks)]
        await post(peer, payloads, "direct")


def _of_rank(staged: Staged, bucket: Bucket | None) -> tuple[Payload, np.ndarray]:
  if bucket is None:
    return named_tensors((), 0), np.zeros(0, np.uint8)
  payload = named_tensors(bucket_entries(staged, bucket), bucket.nbytes)
  return payload, staged.buffers[bucket.rank, bucket.index]


async def post(
  peer: Control, payloads: Sequence[tuple[Payload, np.ndarray]], load_format: str
) -> None:
  """One request with a payload and its data for each rank."""
  body = _Body(payloads, load_format)
  await peer.call("POST", "/update_weights_from_tensor", content=body.chunks(), length=body.length)


@contextlib.asynccontextmanager
async def session(peer: Control) -> AsyncIterator[None]:
  """The begin and end that updates must lie between; one that a dead trainer left open is closed
  first. A failure inside leaves it open: weights are then in doubt and the server is fenced.
  """
  try:
    await peer.call("POST", "/begin_weight_update", {})
  except CallError as error:
    if error.failure != "refused":
      raise
    with contextlib.suppress(CallError):
      await peer.call("POST", "/end_weight_update", {})
    await peer.call("POST", "/begin_weight_update", {})
  yield
  await peer.call("POST", "/end_weight_update", {})


class _Body:
  """The JSON of a request, encoded as it is sent: memory stays at one chunk."""

  def __init__(self, payloads: Sequence[tuple[Payload, np.ndarray]], load_format: str):
    self.ranks = [(payload.head, data.data, payload.tail) for payload, data in payloads]
    self.before = (
      f'{{"load_format":"{load_format}","flush_cache":false,"serialized_named_tensors":['.encode()
    )
    texts = sum(4 * -(-sum(map(len, runs)) // 3) + 2 for runs in self.ranks)
    self.length = len(self.before) + texts + (len(payloads) - 1) + len(b"]}")

  async def chunks(self) -> AsyncIterator[bytes]:
    yield self.before
    for rank, runs in enumerate(self.ranks):
      yield b',"' if rank else b'"'
      for chunk in _base64(runs):
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
