"""A staged round by its difference from another: the buckets that a receiver of both can apply."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentrl_jax.transfer.delta import SAME, Encode, encode
from agentrl_jax.transfer.plan import ITEM_BYTES, Segment
from agentrl_jax.transfer.stage import Staged, segment_bytes, tensor_hash
from agentrl_jax.transfer.wire import ALIGN, Change, Entry


class Difference(NamedTuple):
  """By (rank, bucket), what `wire.encode_delta` takes."""

  buckets: Mapping[tuple[int, int], tuple[Sequence[Entry], Sequence[Change], bytearray]]
  nbytes: int  # of all payloads


def difference(staged: Staged, base: Staged, how: Encode) -> Difference:
  """`staged` against `base`, of the same plan. A tensor whose hash is the base's has no bytes."""
  if staged.plan.digest != base.plan.digest:
    raise ValueError(f"plans differ: {staged.plan.digest} and {base.plan.digest}")

  def one(segment: Segment, new_hash: str, old_hash: str) -> tuple[Change, bytes]:
    if new_hash == old_hash:
      return Change(SAME, new_hash), b""
    key = (segment.rank, segment.bucket)
    new, old = (segment_bytes(held.buffers[key], segment) for held in (staged, base))
    encoding, data = encode(how, new, old, ITEM_BYTES[segment.dtype])
    return Change(encoding, new_hash), data

  with concurrent.futures.ThreadPoolExecutor(2) as pool:  # comparing and deflating free the lock
    made = list(pool.map(one, staged.plan.segments, staged.hashes, base.hashes))
  by_bucket: dict[tuple[int, int], list[tuple[Segment, Change, bytes]]] = {}
  for segment, (change, data) in zip(staged.plan.segments, made, strict=True):
    by_bucket.setdefault((segment.rank, segment.bucket), []).append((segment, change, data))
  buckets = {(b.rank, b.index): _packed(by_bucket[b.rank, b.index]) for b in staged.plan.buckets}
  return Difference(buckets, sum(len(payload) for _, _, payload in buckets.values()))


def _packed(rows: Sequence[tuple[Segment, Change, bytes]]):
  entries, payload = [], bytearray()
  for segment, _, data in rows:
    payload += bytes(-len(payload) % ALIGN)
    n = len(data)
    entries.append(
      Entry(segment.name, (0, 1), "uint8", (n,), ((0, n),), len(payload), n, tensor_hash(data))
    )
    payload += data
  return entries, [change for _, change, _ in rows], payload
