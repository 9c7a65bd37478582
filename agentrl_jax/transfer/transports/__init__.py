"""Ways to move staged buckets into an engine's memory, behind one small protocol."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Delivers(Protocol):
  """A transport that does something for a server before it pauses, so that it is idle for less."""

  async def deliver(self, staged: Staged, peer: Control, version: int) -> int:
    """Returns the bytes that it moved. Raises CallError; nothing has changed on the server then."""
    ...
