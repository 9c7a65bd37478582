"""A side of a benchmark that runs in a process, and a Python environment, of its own."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any


class Peer:
  """A process that says a line of JSON about itself, then answers each command with one."""

  def __init__(self, command: Sequence[Any]):
    self._name = str(command[:3])
    self._process = subprocess.Popen(
      list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.about = self._read()

  def __call__(self, command: str) -> dict[str, Any]:
    assert self._process.stdin is not None
    self._process.stdin.write(command + "\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(timeout=60)

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      if line.startswith("{"):  # its libraries may print as well
        return json.loads(line)
    raise RuntimeError(f"{self._name} ended with code {self._process.wait()}")
