"""Picks the fastest transport that works for these servers, and says why a faster one does not."""

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl_jax.transfer.transports import Transport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport


class Servers(NamedTuple):
  """What a choice depends on.

  Args:
    urls: one for each replica.
    nbytes: of one push.
    ranks: tensor-parallel ranks of a server.
  """

  urls: Sequence[str]
  nbytes: int
  ranks: int = 1


class Choice(NamedTuple):
  """A transport, and a line for each faster one that was passed over."""

  transport: Transport
  passed_over: tuple[str, ...]

  def __str__(self) -> str:
    return "; ".join([f"transport {self.transport.name}", *self.passed_over])


Choose = Callable[[Servers], Choice]


def only(make: Callable[[], Transport]) -> Choose:
  """The transport that `make` makes, for any servers."""
  return lambda servers: Choice(make(), ())


def fastest(root: str | os.PathLike[str] = "/dev/shm/agentrl") -> Choose:
  """From fast to slow: files in shared memory, each rank's own parameters, whole buckets.

  With one rank `direct` moves what `bucket` does and only costs more here, so it is passed over.

  Args:
    root: where `disk` would put its files.
  """

  def choose(servers: Servers) -> Choice:
    passed = []
    if away := [url for url in servers.urls if not _here(url)]:
      passed.append(f"disk needs servers on this machine, {away[0]} is not")
    elif reason := _unfit(Path(root), servers.nbytes):
      passed.append(f"disk: {reason}")
    else:
      return Choice(DiskTransport(root), ())
    if servers.ranks > 1:
      return Choice(DirectTransport(), tuple(passed))
    passed.append("direct gains nothing over bucket with one rank")
    return Choice(TensorTransport(), tuple(passed))

  return choose


def _here(url: str) -> bool:
  """Whether the URL's host is a loopback address. Names that are not addresses are looked up."""
  host = urlsplit(url).hostname or ""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    pass
  try:
    found = socket.getaddrinfo(host, None)
  except OSError:
    return False
  return bool(found) and all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)


def _unfit(root: Path, nbytes: int) -> str:
  """Why `root` cannot hold a push, or ""."""
  parent = root
  while not parent.exists() and parent != parent.parent:
    parent = parent.parent
  if not os.access(parent, os.W_OK):
    return f"{parent} is not writable"
  free = os.statvfs(parent).f_bavail * os.statvfs(parent).f_frsize
  if free < nbytes:
    return f"{parent} has {free / 1e6:.0f} MB free, a push needs {nbytes / 1e6:.0f} MB"
  return ""
