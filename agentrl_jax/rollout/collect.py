"""Groups of episodes, collected concurrently; one bad episode costs one episode, a dead engine only
its own.

Results depend on tasks, seed and label, never on the order in which episodes happen to finish.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl_jax.rollout.engine import EngineDead
from agentrl_jax.rollout.episode import Play, run_episode
from agentrl_jax.rollout.records import Episode, Fault, Outcome, Task

Groups = tuple[tuple[Episode, ...], ...]
Recover = Callable[[EngineDead], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Collection:
  """How many episodes at once, how long, and how much failing machinery is too much."""

  members: int  # episodes a group, all of the same task
  concurrency: int = 64
  seconds: float = 1_800.0
  max_fault_share: float = 0.2
  restarts: int = 1  # of the engine

  def __post_init__(self):
    if self.members < 1 or self.concurrency < 1:
      raise ValueError(
        f"{self.members} members, {self.concurrency} at once: expected at least 1 of each"
      )


class TooManyFaults(RuntimeError):
  """The machinery failed too often for the rest to be a fair sample; the message is the table."""


class CollectionTimeout(TimeoutError):
  """The deadline passed; the message says how far it came and what it waited for."""


async def collect_groups(
  play: Play,
  tasks: Sequence[Task],
  collection: Collection,
  *,
  label: str,
  seed: int,
  progress: Callable[[int, int], None] | None = None,
  recover: Recover | None = None,
) -> Groups:
  """`members` episodes of each task, as one group a task, ordered by task and member.

  Member m of task g is trajectory `label/g/m`: with `seed` and the turn it fixes the sampling seed,
  so an episode that is played again after the engine was restarted starts the same.

  Args:
    label: unique in a run, as in "step-41".
    progress: called with (finished, total) after each episode.
    recover: restarts a dead engine behind `play.engine`; then only unfinished episodes are played
      again.

  Raises:
    EngineDead: the engine died more than `restarts` times, or `recover` is None.
    TooManyFaults: more than `max_fault_share` of all episodes faulted.
    CollectionTimeout: not done within `seconds`.
  """
  running = _Running(play, tasks, collection, label, seed, progress)
  for restart in range(collection.restarts + 1):
    try:
      await running.play_pending()
      return running.groups()
    except EngineDead as dead:
      if recover is None or restart == collection.restarts:
        raise
      remaining = running.deadline - time.monotonic()
      try:
        async with asyncio.timeout(max(remaining, 0.0)) as scope:
          await recover(dead)
      except TimeoutError as error:
        if not scope.expired():
          raise
        raise CollectionTimeout(f"{running.status('dead')}; it did not restart in time") from error
  raise AssertionError("unreachable: the last round returns or raises")


@dataclasses.dataclass
class _Running:
  """One collection in progress: what is finished stays, whatever happens to the rest."""

  play: Play
  tasks: Sequence[Task]
  collection: Collection
  label: str
  seed: int
  progress: Callable[[int, int], None] | None
  finished: dict[tuple[int, int], Episode] = dataclasses.field(default_factory=dict)
  started: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.deadline = time.monotonic() + self.collection.seconds
    self.total = len(self.tasks) * self.collection.members

  async def play_pending(self) -> None:
    """Plays every unfinished episode; on any error stops the others and waits for them."""
    every = ((g, m) for g in range(len(self.tasks)) for m in range(self.collection.members))
    pending = collections.deque(key for key in every if key not in self.finished)
    if not pending:
      return
    self.started.clear()
    workers = [
      asyncio.create_task(self._work(pending))
      for _ in range(min(self.collection.concurrency, len(pending)))
    ]
    try:
      remaining = max(self.deadline - time.monotonic(), 0.0)
      done, late = await asyncio.wait(
        workers, timeout=remaining, return_when=asyncio.FIRST_EXCEPTION
      )
      for worker in workers:  # in order, so that the same error is raised every time
        if worker in done and not worker.cancelled():
          worker.result()
      if late:
        raise CollectionTimeout(self.status(await self._engine_state()))
    finally:
      for worker in workers:
        worker.cancel()
      await asyncio.gather(*workers, return_exceptions=True)

  async def _work(self, pending: collections.deque[tuple[int, int]]) -> None:
    while pending:
      group, member = key = pending.popleft()
      self.started[key] = time.monotonic()
      group_id = f"{self.label}/{group}"
      self.finished[key] = await run_episode(
        self.play,
        self.tasks[group],
        trajectory_id=f"{group_id}/{member}",
        group_id=group_id,
        seed=self.seed,
      )
      if self.progress is not None:
        self.progress(len(self.finished), self.total)
      self._refuse_faults(list(self.finished.values()))

  def groups(self) -> Groups:
    """The finished groups in order; members that started from different states are all faulted."""
    members = range(self.collection.members)
    groups = tuple(
      same_state(tuple(self.finished[g, m] for m in members)) for g in range(len(self.tasks))
    )
    self._refuse_faults([episode for group in groups for episode in group])
    return groups

  def status(self, engine: str) -> str:
    """What a collection that has to stop was waiting for."""
    members = collections.Counter(g for g, _ in self.finished)
    whole = sum(n == self.collection.members for n in members.values())
    waiting = {k: t for k, t in self.started.items() if k not in self.finished}
    text = f"{self.label}: {whole}/{len(self.tasks)} groups, {len(waiting)} running"
    if waiting:
      oldest = min(waiting, key=lambda k: (waiting[k], k))
      age = time.monotonic() - waiting[oldest]
      text += f" (oldest {age:.0f} s, env {self.tasks[oldest[0]].family})"
    return f"{text}, engine {self.play.engine.name} {engine}"

  async def _engine_state(self) -> str:
    try:
      async with asyncio.timeout(5.0):
        return "alive" if await self.play.engine.healthy() else "dead"
    except TimeoutError:
      return "silent"

  def _refuse_faults(self, episodes: Sequence[Episode]) -> None:
    faults = [e for e in episodes if e.fault is not None]
    if len(faults) > self.collection.max_fault_share * self.total:
      head = f"{self.label}: {len(faults)} of {self.total} episodes faulted"
      raise TooManyFaults(f"{head}\n{fault_table(faults)}")


def same_state(group: tuple[Episode, ...]) -> tuple[Episode, ...]:
  """The group itself, or all its members as faults if they did not start from the same state."""
  hashes = list(dict.fromkeys(e.state_hash for e in group if e.state_hash is not None))
  if len(hashes) <= 1:
    return group
  detail = f"group {group[0].group_id}: members start from states {' and '.join(hashes)}"
  return tuple(
    dataclasses.replace(
      e,
      outcome=Outcome.FAULT,
      fault=e.fault or Fault("state_hash", detail),
      turn_rewards=(0.0,) * len(e.turn_rewards),
      terminated=False,
      truncated=False,
      cut_reason=None,
    )
    for e in group
  )


def fault_table(episodes: Sequence[Episode]) -> str:
  """Faults by kind, most frequent first, each with one example."""
  faults = [e.fault for e in episodes if e.fault is not None]
  counts: Mapping[str, int] = collections.Counter(f.kind for f in faults)
  examples = {f.kind: f.detail for f in reversed(faults)}
  rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  width = max((len(kind) for kind, _ in rows), default=0)
  return "\n".join(f"{n:5d}  {kind:<{width}}  {examples[kind]}" for kind, n in rows)
