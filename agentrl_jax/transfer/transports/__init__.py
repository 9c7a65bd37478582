"""Ways to move staged buckets into an engine's memory, behind one small protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from agentrl_jax.transfer.control import Control
from agentrl_jax.transfer.plan import Plan
from agentrl_jax.transfer.stage import Staged


class Transport(Protocol):
  """What a round asks of a transport. `bucket_bytes`, `align` and `per_rank` shape the plan:
  buckets are of each rank's own parameters, or of checkpoint tensors that all ranks take parts of.

  A transport gives the staging memory, so that weights are packed where they are sent from.
  """

  name: str
  bucket_bytes: int
  align: int
  per_rank: bool

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Zeroed staging buckets for the round `key`. Raises OSError, with the sizes, when they do not
    fit.
    """
    ...

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """Brings all buckets into one server of `ranks` tensor-parallel ranks. Raises CallError."""
    ...

  def release(self, key: str) -> None:
    """Frees the staging of a round; unknown keys are ignored."""
    ...

  def close(self) -> None:
    """Ends what was started or connected for it. Idempotent."""
    ...


class Delivery(NamedTuple):
  """What a delivery moved, and how, where there is something to say about it."""

  nbytes: int = 0
  how: str = ""


@runtime_checkable
class Delivers(Protocol):
  """A transport that does something for a server before it pauses, so that it is idle for less."""

  async def deliver(self, staged: Staged, peer: Control, version: int) -> Delivery:
    """Raises CallError; nothing has changed on the server then."""
    ...


@runtime_checkable
class Retains(Protocol):
  """A transport that keeps what it delivered, so that the next round can send less."""

  def retain(self, staged: Staged, version: int) -> None:
    """Called once every server has committed, before the round's `release`."""
    ...


@runtime_checkable
class SharesStaging(Protocol):
  """A transport whose staging is files, which other processes of the machine can fill, too."""

  def probe(self) -> Path:
    """A new, empty file where staging would be; the caller removes it."""
    ...

  def staging(self, key: str) -> Path:
    """The directory of a round's files until they are sent."""
    ...


@runtime_checkable
class SendsParts(Protocol):
  """A transport by which several processes may deliver one round, each what it has of it."""

  def parts_go_to(self) -> tuple[str, ...]:
    """HOST:PORT of all receivers, each of which every process must reach; none: it does not."""
    ...

  token: str  # that the receivers know
