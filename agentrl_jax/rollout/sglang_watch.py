"""Stands between a trainer and the server it started, so that the server never outlives the
trainer.

Usage: python sglang_watch.py TRAINER_PID COMMAND... . Prints the pid of COMMAND, which leads a
process group of its own, and kills that group when COMMAND ends, on SIGTERM, or when the trainer is
gone, however it went: a process killed by SIGKILL runs no handler, but its child gets a new parent.
(The kernel's parent-death signal follows the thread that started the child, not the process.)
Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.25
REAP_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
  trainer = int(sys.argv[1])
  stopped = []
  signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
  if sys.platform == "linux":  # orphaned grandchildren become ours, so that we can see them gone
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  child = subprocess.Popen(
    sys.argv[2:], stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0
  )
  print(child.pid, flush=True)
  reason = None
  while reason is None:
    if stopped:
      reason = "asked to stop"
    elif os.getppid() != trainer:
      reason = f"the process that started it ({trainer}) is gone"
    else:
      with contextlib.suppress(subprocess.TimeoutExpired):
        reason = f"it ended with exit code {child.wait(POLL_SECONDS)}"
  print(f"[sglang_watch] server {child.pid}: {reason}", file=sys.stderr, flush=True)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child.pid, signal.SIGKILL)
  deadline = time.monotonic() + REAP_SECONDS
  with contextlib.suppress(ChildProcessError):  # raised once no child is left
    while time.monotonic() < deadline:
      if os.waitpid(-1, os.WNOHANG) == (0, 0):
        time.sleep(0.01)


if __name__ == "__main__":
  main()
