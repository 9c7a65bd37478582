"""`launch.serve --engine=embedded` as a process that tests start, kill and start again."""

import os
import pathlib
import threading
import time

from agentrl_jax.transfer.receive import TOKEN
from tests.launch.commands import start

SECRET = "served"


class Served:
  """A server of a model directory; what it prints is in `lines`."""

  def __init__(self, model: pathlib.Path, *flags: str):
    self.arguments = ["launch.serve", "--engine=embedded", f"--model={model}", *flags]
    self.port = self.receiver_port = 0
    self.start()

  def start(self):
    """At the ports of the start before."""
    ports = [f"--port={self.port}", f"--receive_port={self.receiver_port}"]
    self.process = start([*self.arguments, *ports], **{TOKEN: SECRET})
    self.lines, reader = [], threading.Thread(target=self._read, daemon=True)
    reader.start()

  def _read(self):
    assert self.process.stdout is not None
    for line in self.process.stdout:
      self.lines.append(line.strip())

  def wait(self, seconds: float = 120.0):
    """Until it serves."""
    deadline = time.monotonic() + seconds
    while not (said := [line for line in self.lines if line.startswith("serving at ")]):
      assert self.process.poll() is None, self.lines
      assert time.monotonic() < deadline, self.lines
      time.sleep(0.05)
    self.url = said[0].split()[2]
    self.port = int(self.url.rpartition(":")[2])
    (receiving,) = [line for line in self.lines if line.startswith("receiving weights at ")]
    self.receiver = receiving.split()[-1]
    self.receiver_port = int(self.receiver.rpartition(":")[2])
    return self

  def stop(self, number: int) -> tuple[int, list[str]]:
    """Sends a signal. Returns the exit code and what was printed."""
    self.process.send_signal(number)
    code = self.process.wait(60)
    return code, self.lines


def received() -> list[str]:
  """Directories that receivers of this user hold."""
  root = pathlib.Path(f"/dev/shm/agentrl-{os.getuid()}-received")
  return sorted(path.name for path in root.glob("*")) if root.exists() else []
