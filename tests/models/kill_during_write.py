"""Run by test_hf: forks children that are killed at the file events of writing a model directory.

Each has in a directory of its own the old model, starts to write the new one over it, and dies by
SIGKILL at the n-th of Python's audit events on files below; n = 0, 1, ... until one outlives it.
Prints how many were killed, and the exit code of the last. Usage: DIRECTORY
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from agentrl_jax.models.checkpoint_files import TensorEntry, new_directory, write_tensors


def write(directory: Path, number: int) -> None:
  """Two files with an index, whose numbers are all `number`."""
  array = np.full((4,), number, np.float32)
  entries = [TensorEntry(n, array.shape, array.dtype, lambda: array) for n in ("a", "b")]
  with new_directory(directory) as partial:
    write_tensors(partial, entries, max_file_bytes=array.nbytes)
    (partial / "config.json").write_text("{}")


def child(directory: Path, countdown: int) -> None:
  write(directory, 1)
  left = countdown

  def hook(event: str, arguments: tuple) -> None:
    nonlocal left
    if event.startswith(("open", "os.")) and arguments and str(directory.parent) in str(arguments):
      left -= 1
      if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(hook)
  write(directory, 2)


def main() -> None:
  killed = 0
  while True:
    pid = os.fork()
    if pid == 0:
      child(Path(sys.argv[1]) / str(killed) / "model", killed)
      os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
      break
    killed += 1
  print(killed, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
  main()
