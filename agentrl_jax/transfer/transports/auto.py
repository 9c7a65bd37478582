"""Picks the fastest transport that works for these servers, and says why a faster one does not."""

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl_jax.transfer.delta import Encode
from agentrl_jax.transfer.receive import TOKEN, ReceiverProcess
from agentrl_jax.transfer.transports import Transport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.nixl import NixlTransport, why_not
from agentrl_jax.transfer.transports.tcp import TcpTransport
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


def tcp(
  receivers: Mapping[str, str] | None = None,
  delta: Encode | None = None,
  full_every: int = 100,
) -> Choose:
  """Connections to the receivers HOST:PORT by server URL, with $AGENTRL_TRANSFER_TOKEN.

  Args:
    receivers: None: the servers are on this machine, and a receiver is started for them here.
    delta, full_every: as of `TcpTransport`.
  """

  def choose(servers: Servers) -> Choice:
    if receivers is not None:
      made = TcpTransport(receivers, _token(), delta=delta, full_every=full_every)
      return Choice(made, ())
    if away := _away(servers.urls):
      raise ValueError(f"{away} is not on this machine: name the receiver beside it")
    process = ReceiverProcess()
    beside = {url: process.address for url in servers.urls}
    made = TcpTransport(beside, process.token, process=process, delta=delta, full_every=full_every)
    return Choice(made, ())

  return choose


def fastest(
  root: str | os.PathLike[str] = "/dev/shm/agentrl",
  receivers: Mapping[str, str] | None = None,
  windows: Mapping[str, str] | None = None,
) -> Choose:
  """From fast to slow: one-sided writes, files in shared memory, connections to receivers, each
  rank's own parameters in requests, whole buckets in requests.

  With one rank `direct` moves what `bucket` does and only costs more here, so it is passed over.

  Args:
    root: where `disk` would put its files.
    receivers: as of `tcp`.
    windows: HOST:PORT of each server's, with $AGENTRL_TRANSFER_TOKEN, as of `NixlTransport`.
  """

  def choose(servers: Servers) -> Choice:
    passed = []
    if reason := why_not() or _silent(servers.urls, windows or {}, "window"):
      passed.append(f"nixl: {reason}")
    else:
      return Choice(NixlTransport(windows or {}, _token()), ())
    if away := _away(servers.urls):
      passed.append(f"disk needs servers on this machine, {away} is not")
    elif reason := _unfit(Path(root), servers.nbytes):
      passed.append(f"disk: {reason}")
    else:
      return Choice(DiskTransport(root), tuple(passed))
    if reason := _silent(servers.urls, receivers or {}, "receiver"):
      passed.append(f"tcp: {reason}")
    else:
      return Choice(TcpTransport(receivers or {}, _token()), tuple(passed))
    passed.append("broadcast is taken only by name: a server that cannot reach this machine hangs")
    if servers.ranks > 1:
      return Choice(DirectTransport(), tuple(passed))
    passed.append("direct gains nothing over bucket with one rank")
    return Choice(TensorTransport(), tuple(passed))

  return choose


def _away(urls: Sequence[str]) -> str:
  """The first server that is not on this machine, or ""."""
  return next((url for url in urls if not _here(url)), "")


def _silent(urls: Sequence[str], places: Mapping[str, str], what: str) -> str:
  """Why the receivers or windows at `places` do not do, or ""."""
  for url in urls:
    if url not in places:
      return f"{url} has no {what}"
    host, _, port = places[url].rpartition(":")
    try:
      socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except (OSError, ValueError) as error:
      return f"{what} {places[url]} of {url}: {error}"
  return "" if os.environ.get(TOKEN) else f"${TOKEN} is empty"


def _token() -> str:
  """Raises ValueError when the environment has none."""
  token = os.environ.get(TOKEN)
  if not token:
    raise ValueError(f"${TOKEN} is empty: give both ends the same secret")
  return token


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
