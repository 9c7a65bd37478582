"""What the transports write: files that safetensors reads, pickles that hold what was staged."""

import asyncio
import base64
import collections
import io
import json
import os
import pickle
import types

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.stage import Staged, source_layout, stage
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.pickled import flattened_bucket
from agentrl_jax.transfer.transports.tensor import TensorTransport, _Body
from agentrl_jax.transfer.wire import WireError, bucket_entries

ARRAYS = {
  "a": np.arange(35, dtype=np.float32).reshape(5, 7),
  "b": np.arange(3, dtype=np.float32),
  "empty": np.zeros((0, 3), np.float32),
}


def staged(transport, dtype="float32", key="run-1") -> Staged:
  weights = {name: jnp.asarray(array) for name, array in ARRAYS.items()}
  rules = [assembly(name, f"['{name}']", array.shape) for name, array in ARRAYS.items()]
  made = plan(
    source_layout(weights), whole(rules, dtype), rules, bucket_bytes=transport.bucket_bytes,
    align=transport.align, split=False,
  )  # fmt: skip
  return stage(made, weights, transport.allocate(made, key), key)


class Peer:
  """Records calls in place of a server."""

  url = "http://peer"

  def __init__(self):
    self.calls = []

  async def call(self, method, path, body=None, *, content=None, length=0):
    data = b"".join([chunk async for chunk in content]) if content else None
    assert data is None or len(data) == length
    self.calls.append((path, body if data is None else json.loads(data)))
    return {}


@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_writes_safetensors(tmp_path, bucket_bytes, dtype):
  transport, peer = DiskTransport(tmp_path, bucket_bytes=bucket_bytes), Peer()
  packed = staged(transport, dtype)
  assert [path.name for path in tmp_path.iterdir()] == ["run-1.partial"]  # nothing to read yet
  asyncio.run(transport.send(packed, peer, 1))
  ((path, body),) = peer.calls
  assert path == "/update_weights_from_disk"
  files = sorted(os.listdir(body["model_path"]))
  assert len(files) == len(packed.plan.buckets) == (2 if bucket_bytes == 16 else 1)
  loaded = {}
  for name in files:
    loaded |= load_file(os.path.join(body["model_path"], name))
  assert loaded.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(loaded[name].astype(np.float32), array)
    assert str(loaded[name].dtype) == dtype
  asyncio.run(transport.send(packed, peer, 1))  # a second server reads the same files
  assert peer.calls[0] == peer.calls[1]
  transport.release("run-1")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "..", "a/b", "/etc"])
def test_disk_refuses_keys_that_leave_its_root(tmp_path, key):
  with pytest.raises(ValueError, match="is no file name"):
    DiskTransport(tmp_path).release(key)


def test_disk_replaces_what_a_dead_trainer_left(tmp_path):
  first = DiskTransport(tmp_path)
  staged(first)  # killed here
  asyncio.run(DiskTransport(tmp_path).send(staged(DiskTransport(tmp_path)), Peer(), 1))
  assert [path.name for path in tmp_path.iterdir()] == ["run-1"]


class Reader(pickle.Unpickler):
  """Unpickles with stand-ins for the few names that a server allows, and no others."""

  def find_class(self, module, name):
    allowed = {
      ("torch.storage", "_load_from_bytes"): load_storage,
      ("torch._utils", "_rebuild_tensor_v2"): rebuild,
      ("collections", "OrderedDict"): collections.OrderedDict,
      ("types", "SimpleNamespace"): types.SimpleNamespace,
      ("torch", "float32"): np.dtype(np.float32),
      ("torch", "bfloat16"): np.dtype(jnp.bfloat16),
      ("torch", "ByteStorage"): np.uint8,
    }
    return allowed[module, name]

  def persistent_load(self, pid):
    kind, dtype, key, place, count, view = pid
    assert (kind, key, place, view) == ("storage", "0", "cpu", None)
    return dtype, count


def load_storage(data):
  """torch's legacy stream: magic, protocol, sizes, object, keys, count, data."""
  stream = io.BytesIO(data)
  assert Reader(stream).load() == 0x1950A86A20F9469CFC6C
  assert Reader(stream).load() == 1001
  assert Reader(stream).load()["little_endian"] is True
  dtype, count = Reader(stream).load()
  assert Reader(stream).load() == ["0"]
  assert int.from_bytes(stream.read(8), "little") == count
  values = np.frombuffer(stream.read(), dtype)
  assert len(values) == count
  return values


def rebuild(storage, offset, size, stride, requires_grad, hooks):
  assert (offset, stride, requires_grad, hooks) == (0, (1,), False, {})
  assert size == (len(storage),)
  return storage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_sends_every_rank_the_whole_bucket(dtype, ranks):
  transport, peer = TensorTransport(bucket_bytes=16), Peer()
  packed = staged(transport, dtype)
  asyncio.run(transport.send(packed, peer, ranks))
  assert [path for path, _ in peer.calls] == [
    "/begin_weight_update",
    *["/update_weights_from_tensor"] * len(packed.plan.buckets),
    "/end_weight_update",
  ]
  got = {}
  for _, body in peer.calls[1:-1]:
    assert body["load_format"] == "flattened_bucket"
    assert body["flush_cache"] is False
    payloads = body["serialized_named_tensors"]
    assert len(payloads) == ranks
    assert len(set(payloads)) == 1
    read = Reader(io.BytesIO(base64.b64decode(payloads[0], validate=True))).load()
    for item in read["metadata"]:
      data = read["flattened_tensor"][item.start_idx : item.end_idx]
      assert item.numel == len(data)
      got[item.name] = data.view(item.dtype).reshape(item.shape)
  assert got.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(got[name].astype(np.float32), array)


@pytest.mark.parametrize("extra", range(7))
def test_base64_is_seamless_whatever_the_lengths(extra):
  data = np.arange(100 + extra, dtype=np.uint8)
  payload = flattened_bucket((), len(data))._replace(head=b"h" * extra, tail=b"t" * (extra % 4))
  body = _Body(payload, data, 1)

  async def text():
    return b"".join([chunk async for chunk in body.chunks()])

  read = json.loads(asyncio.run(text()))["serialized_named_tensors"][0]
  assert base64.b64decode(read, validate=True) == b"".join(bytes(run) for run in body.runs)


def test_a_bucket_that_would_kill_the_server_is_not_sent():
  packed = staged(TensorTransport())
  (bucket,) = packed.plan.buckets
  entries = bucket_entries(packed, bucket)
  with pytest.raises(WireError, match="a: ends at byte 140 of a payload of 100"):
    flattened_bucket(entries, 100)
  with pytest.raises(WireError, match=r"a is part \(0, 2\), the server takes whole tensors"):
    flattened_bucket([entries[0]._replace(part=(0, 2))], bucket.nbytes)
