"""Whose processes listen on a TCP port of this machine, as Linux says in /proc."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h


def listens(group: int, port: int) -> bool | None:
  """Whether a process of a process group listens on `port`, at any address. None: the system does
  not say, or nothing listens there at all.
  """
  sockets = set(_listeners(port))
  if not sockets:
    return None
  return any(sockets & set(_open_by(process)) for process in _members(group))


def _listeners(port: int) -> Iterator[str]:
  """What open files of listeners on a port are called."""
  for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    with contextlib.suppress(OSError):
      for line in Path(table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
          yield f"socket:[{fields[9]}]"


def _members(group: int) -> Iterator[Path]:
  for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it ended
      if os.getpgid(int(process.name)) == group:
        yield process


def _open_by(process: Path) -> Iterator[str]:
  with contextlib.suppress(OSError):
    for descriptor in os.listdir(process / "fd"):
      with contextlib.suppress(OSError):
        yield os.readlink(process / "fd" / descriptor)
