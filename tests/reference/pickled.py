"""Reads the pickles that a server is sent, with stand-ins for the few names it allows."""

import collections
import io
import pickle
import types

import jax.numpy as jnp
import numpy as np


class Reader(pickle.Unpickler):
  """Unpickles with stand-ins for the few names that a server allows, and no others."""

  def find_class(self, module, name):
    allowed = {
      ("torch.storage", "_load_from_bytes"): load_storage,
      ("torch._utils", "_rebuild_tensor_v2"): rebuild,
      ("torch._utils", "_rebuild_tensor_v3"): rebuild_typed,
      ("collections", "OrderedDict"): collections.OrderedDict,
      ("types", "SimpleNamespace"): types.SimpleNamespace,
      ("torch", "float32"): np.dtype(np.float32),
      ("torch", "bfloat16"): np.dtype(jnp.bfloat16),
      ("torch", "ByteStorage"): np.uint8,
      ("torch", "float8_e4m3fn"): np.dtype(jnp.float8_e4m3fn),
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


def rebuild_typed(storage, offset, size, stride, requires_grad, hooks, dtype):
  assert (requires_grad, hooks) == (False, {})
  typed = storage[: len(storage) // dtype.itemsize * dtype.itemsize].view(dtype)
  return np.lib.stride_tricks.as_strided(
    typed[offset:], size, [step * dtype.itemsize for step in stride]
  )
