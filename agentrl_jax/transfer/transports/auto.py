"""Picks the fastest transport that works for these servers, and says why a faster one does not."""

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl_jax.transfer.control import CallError
from agentrl_jax.transfer.delta import Encode
from agentrl_jax.transfer.owned import sweep
from agentrl_jax.transfer.receive import TOKEN, ReceiverProcess
from agentrl_jax.transfer.transports import Transport
from agentrl_jax.transfer.transports.disk import SHARED_MEMORY, DiskTransport
from agentrl_jax.transfer.transports.mooncake import Mooncake
from agentrl_jax.transfer.transports.nixl import Nixl
from agentrl_jax.transfer.transports.tcp import TcpTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport
from agentrl_jax.transfer.transports.window import Library, OneSidedTransport, ask, of_rank

_SECONDS = 60.0  # for a window to answer: it may have to register its memory first


class Servers(NamedTuple):
  """What a choice depends on.

  Args:
    urls: one for each replica.
    nbytes: of one push.
    ranks: tensor-parallel ranks of a server.
    windows: of servers that were started so that their parameters are open.
    lacking: by library, why such servers could not be written to.
    receivers: HOST:PORT of those that servers name themselves, by URL.
    here: whether they see this machine's shared memory; None: those at a loopback address do.
  """

  urls: Sequence[str]
  nbytes: int
  ranks: int = 1
  windows: "Windows | None" = None
  lacking: Mapping[str, str] = {}
  receivers: Mapping[str, str] = {}
  here: bool | None = None


class Windows(NamedTuple):
  """HOST:PORT of each server's window by its URL, and the token that they know."""

  addresses: Mapping[str, str]
  token: str


class Choice(NamedTuple):
  """A transport, and a line for each faster one that was passed over."""

  transport: Transport
  passed_over: tuple[str, ...]

  def __str__(self) -> str:
    return "; ".join([f"transport {self.transport.name}", *self.passed_over])


class Choose(NamedTuple):
  """How to choose; called with running servers.

  Args:
    pick: the choice.
    libraries: of one-sided writes, for which servers should be started with a window.
    otherwise: whether it takes something else where none of them works.
  """

  pick: Callable[[Servers], Choice]
  libraries: tuple[Library, ...] = ()
  otherwise: bool = True

  def __call__(self, servers: Servers) -> Choice:
    return self.pick(servers)


def only(make: Callable[[], Transport]) -> Choose:
  """The transport that `make` makes, for any servers."""
  return Choose(lambda servers: Choice(make(), ()))


def tcp(
  receivers: Mapping[str, str] | None = None,
  delta: Encode | None = None,
  full_every: int = 100,
) -> Choose:
  """Connections to the receivers HOST:PORT by server URL, with $AGENTRL_TRANSFER_TOKEN.

  Args:
    receivers: None: those that servers name; where they name none, they are on this machine, and
      a receiver is started for them here.
    delta, full_every: as of `TcpTransport`.
  """

  def pick(servers: Servers) -> Choice:
    beside = servers.receivers or None if receivers is None else receivers
    if beside is not None:
      made = TcpTransport(beside, _token(), delta=delta, full_every=full_every)
      return Choice(made, ())
    if away := away_from_here(servers):
      raise ValueError(f"{away} is not on this machine: name the receiver beside it")
    process = ReceiverProcess()
    started = {url: process.address for url in servers.urls}
    made = TcpTransport(started, process.token, process=process, delta=delta, full_every=full_every)
    return Choice(made, ())

  return Choose(pick)


def one_sided(make: Callable[[], Library], windows: Mapping[str, str] | None = None) -> Choose:
  """One-sided writes with one library.

  Args:
    make: `Nixl` or `Mooncake`.
    windows: HOST:PORT of each server's by its URL, with $AGENTRL_TRANSFER_TOKEN; None: the run
      starts the servers, with windows.
  """
  library = make()

  def pick(servers: Servers) -> Choice:
    opened = _opened(servers, windows)
    if reason := _closed(library, servers, opened):
      raise ValueError(f"{library.name} does not work: {reason}")
    return Choice(OneSidedTransport(library, *opened), ())

  return Choose(pick, (library,), otherwise=False)


def fastest(
  root: str | os.PathLike[str] = SHARED_MEMORY,
  receivers: Mapping[str, str] | None = None,
  windows: Mapping[str, str] | None = None,
) -> Choose:
  """The first that works of one-sided writes with NIXL, files in shared memory, one-sided writes
  with Mooncake, connections to receivers, each rank's own parameters in requests, whole buckets in
  requests. On one machine the first three are level (docs/transfer.md).

  With one rank `direct` moves what `bucket` does and only costs more here, so it is passed over.

  Args:
    root: where `disk` would put its files.
    receivers: as of `tcp`.
    windows: as of `one_sided`.
  """
  nixl, mooncake = Nixl(), Mooncake()

  def pick(servers: Servers) -> Choice:
    passed = []
    opened = _opened(servers, windows)
    if reason := _closed(nixl, servers, opened):
      passed.append(f"nixl: {reason}")
    else:
      return Choice(OneSidedTransport(nixl, *opened), ())
    sweep(Path(root))  # what a killed trainer left counts against the space
    if away := away_from_here(servers):
      passed.append(f"disk needs servers on this machine, {away} is not")
    elif reason := _unfit(Path(root), servers.nbytes):
      passed.append(f"disk: {reason}")
    else:
      return Choice(DiskTransport(root), tuple(passed))
    if reason := _closed(mooncake, servers, opened):
      passed.append(f"mooncake: {reason}")
    else:
      return Choice(OneSidedTransport(mooncake, *opened), tuple(passed))
    beside = receivers or servers.receivers
    if reason := _silent(servers.urls, beside):
      passed.append(f"tcp: {reason}")
    else:
      return Choice(TcpTransport(beside, _token()), tuple(passed))
    passed.append("broadcast is taken only by name: a server that cannot reach this machine hangs")
    if servers.ranks > 1:
      return Choice(DirectTransport(), tuple(passed))
    passed.append("direct gains nothing over bucket with one rank")
    return Choice(TensorTransport(), tuple(passed))

  return Choose(pick, (nixl, mooncake))


def _opened(servers: Servers, windows: Mapping[str, str] | None) -> Windows:
  """The windows that were named, or those that the servers were started with."""
  if windows is not None:
    return Windows(windows, os.environ.get(TOKEN, ""))
  return servers.windows or Windows({}, "")


def _closed(library: Library, servers: Servers, opened: Windows) -> str:
  """Why a library cannot write into these servers, or "". Asks every rank's window."""
  if reason := library.why_not() or servers.lacking.get(library.name):
    return reason
  if away := next((url for url in servers.urls if url not in opened.addresses), ""):
    return f"{away} has no window"
  if not opened.token:
    return f"${TOKEN} is empty"
  for url in servers.urls:
    try:
      for rank in range(servers.ranks):
        address = of_rank(opened.addresses[url], rank)
        ask(f"window {address}", address, f"{opened.token} {library.name}", _SECONDS)
    except (CallError, ValueError) as error:
      return f"{url}: {error}"
  return ""


def away_from_here(servers: Servers) -> str:
  """The first server that does not see this machine's shared memory, or ""."""
  if servers.here is None:
    return next((url for url in servers.urls if not _here(url)), "")
  return "" if servers.here else servers.urls[0]


def _silent(urls: Sequence[str], receivers: Mapping[str, str]) -> str:
  """Why the receivers do not do, or ""."""
  for url in urls:
    if url not in receivers:
      return f"{url} has no receiver"
    host, _, port = receivers[url].rpartition(":")
    try:
      socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except (OSError, ValueError) as error:
      return f"receiver {receivers[url]} of {url}: {error}"
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
