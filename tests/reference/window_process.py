"""A window without a server: arrays that this process opens to one-sided writes.

  python window_process.py PLUGIN TOKEN '{NAME: [DTYPE, SHAPE]}'

Prints the window's port, then for every line that it reads a JSON document with each array's bytes
in hex.
"""

import json
import os
import socket
import sys
import threading

import numpy as np

sys.path.insert(0, sys.argv[1])
import agentrl_sglang_window as plugin  # pyright: ignore


class Parameter:
  """What the plug-in asks of a torch tensor."""

  is_cuda = False

  def __init__(self, dtype, shape):
    self.array = np.zeros(shape, dtype)
    self.dtype, self.shape = f"torch.{dtype}", shape

  def is_contiguous(self):
    return True

  def data_ptr(self):
    return self.array.ctypes.data

  def numel(self):
    return self.array.size

  def element_size(self):
    return self.array.itemsize


class Model:
  """What it asks of a model."""

  def __init__(self, listed):
    self.parameters = {name: Parameter(*entry) for name, entry in listed.items()}

  def named_parameters(self):
    return self.parameters.items()


model = Model(json.loads(sys.argv[3]))
listener = socket.create_server(("127.0.0.1", 0))
window = plugin.Window(model)
threading.Thread(target=plugin.serve, args=(listener, window, sys.argv[2]), daemon=True).start()
print(json.dumps(listener.getsockname()[1]), flush=True)
for line in sys.stdin:
  if line.strip() == "move":
    model.parameters = {
      name: Parameter(p.dtype.removeprefix("torch."), p.shape)
      for name, p in model.parameters.items()
    }
  print(json.dumps({n: p.array.tobytes().hex() for n, p in model.parameters.items()}), flush=True)
os._exit(0)  # libraries' threads are of no interest
