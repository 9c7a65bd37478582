"""Directories whose files go with the process that made them, however it ends.

Such a directory holds a lock as long as its process lives, so that whoever comes next knows what a
killed one has left.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

LOCK = "owner.lock"


def make_owned(directory: Path) -> int:
  """Makes a directory, and parents that are absent. Returns a descriptor that holds its lock, which
  the system lets go at any death. No sweep ever sees the lock there and not held.

  Raises OSError, and leaves no such directory, where it cannot be made.
  """
  directory.mkdir(parents=True, mode=0o700)
  unseen = directory / f"{LOCK}.new"
  descriptor = -1
  try:
    descriptor = os.open(unseen, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unseen.rename(directory / LOCK)
  except BaseException:
    shutil.rmtree(directory, ignore_errors=True)
    if descriptor >= 0:
      os.close(descriptor)
    raise
  return descriptor


def sweep(root: Path) -> None:
  """Removes directories of `root` whose process is dead; those of a living one stay, and what no
  process owns.
  """
  for lock in root.glob(f"*/{LOCK}"):
    with contextlib.suppress(OSError):  # its owner lives, or removed it just now
      descriptor = os.open(lock, os.O_RDWR)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
      finally:
        os.close(descriptor)
