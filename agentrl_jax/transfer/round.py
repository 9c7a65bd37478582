"""What one round knows: its servers, who left it and how, and what tells that a server is right."""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl_jax.transfer.control import CallError, Control, RankChecksum
from agentrl_jax.transfer.engine_layout import VOCAB_PADDING
from agentrl_jax.transfer.report import Clock, State


@dataclasses.dataclass(eq=False)
class Peer:
  """A server as this publisher knows it. Facts are read at the first contact."""

  control: Control
  ranks: int = 0
  dtype: str = ""
  process: tuple[Any, ...] = ()  # differs for every start of a server
  exact: bool = False  # its checksums are ones that we can compute
  padding: int = VOCAB_PADDING  # what it pads vocabularies to multiples of
  parameters: frozenset[str] = frozenset()  # of all ranks
  covered_by: str = ""  # digest of a plan that makes all of them
  seen: tuple[RankChecksum, ...] | None = None  # at the last commit, or when it was first met

  @property
  def layout(self) -> tuple[int, int]:
    """What decides the checksums of a model's weights."""
    return self.ranks, self.padding

  async def meet(self) -> None:
    """Reads what kind of server it is, afresh: a restart may have changed it."""
    facts = await self.control.facts()
    try:
      self.ranks, self.dtype = int(facts["tp_size"]), str(facts["dtype"]).removeprefix("torch.")
      self.exact = facts["device"] == "cpu" or facts.get("checksums") == "sha256"
      self.padding = int(facts.get("vocab_padding", VOCAB_PADDING))
      stages, replicas = int(facts.get("pp_size", 1)), int(facts.get("dp_size", 1))
    except (KeyError, ValueError) as error:
      raise CallError("refused", f"{self.control.url}/server_info lacks {error}") from error
    if stages != 1 or replicas != 1:
      message = f"has pp_size {stages} and dp_size {replicas}, only 1 is served"
      raise CallError("refused", f"{self.control.url} {message}")
    if self.process == process_of(facts):
      return
    self.seen = await self.control.checksums()
    self.parameters = frozenset(name for _, tensors in self.seen for name in tensors)
    self.covered_by, self.process = "", process_of(facts)

  async def same_process(self) -> None:
    """Raises CallError when the server was restarted since `meet`: what it serves is then not what
    was verified.
    """
    if process_of(await self.control.facts()) != self.process:
      raise CallError("refused", f"{self.control.url} was restarted during the round")


@dataclasses.dataclass
class Round:
  """One round's progress: who is still in it, who left and how."""

  version: int
  key: str
  live: list[Peer]
  clock: Clock = dataclasses.field(default_factory=Clock)
  ended: dict[Peer, State] = dataclasses.field(default_factory=dict)
  reasons: list[str] = dataclasses.field(default_factory=list)
  untouched: set[Peer] = dataclasses.field(default_factory=set)  # left before the first byte
  lost: dict[Peer, str] = dataclasses.field(default_factory=dict)  # sends without an answer
  paused_at: dict[Peer, float] = dataclasses.field(default_factory=dict)
  delivered: set[str] = dataclasses.field(default_factory=set)  # how
  idle: float = 0.0
  fingerprint: str = ""
  whole: bool = True  # what is sent was staged by this process alone, or into its own buffers

  def leave(self, peer: Peer, state: State, reason: object) -> None:
    self.live.remove(peer)
    self.ended[peer] = state
    self.reasons.append(str(reason))

  def resumed(self, peer: Peer) -> None:
    if peer in self.paused_at:
      self.idle = max(self.idle, time.perf_counter() - self.paused_at.pop(peer))

  @property
  def state(self) -> State:
    states = set(self.ended.values())
    if len(states) == 1:
      return states.pop()
    for worst in (State.COMMITTED, State.UNKNOWN):
      if worst in states:
        return State.PARTIAL if worst is State.COMMITTED else worst
    return State.FENCED


def process_of(facts: Mapping[str, Any]) -> tuple[Any, ...]:
  """What tells one start of a server from the next."""
  return facts.get("startup_time"), facts.get("random_seed")


async def twice(call: Callable[[], Awaitable[None]]) -> None:
  """An idempotent call, once more when its answer was lost."""
  try:
    await call()
  except CallError as error:
    if error.failure != "lost":
      raise
    await call()


def differences(got: Sequence[RankChecksum], expected: Sequence[Mapping[str, str]]) -> str:
  """One line on the first wrong or missing parameter, or "". Those that no plan makes were looked
  for before (`engine_layout.unplanned`).
  """
  if [rank for rank, _ in got] != list(range(len(expected))):
    return f"ranks {[rank for rank, _ in got]} answered, expected {len(expected)}"
  for rank, tensors in got:
    wrong = [name for name, text in expected[rank].items() if tensors.get(name) != text]
    if wrong:
      what = "differs" if wrong[0] in tensors else "is not there"
      return f"{wrong[0]} of rank {rank} {what} ({len(wrong)} of {len(expected[rank])} wrong)"
  return ""
