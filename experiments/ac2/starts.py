"""Where responses begin and how far they go: refills, replayed prefixes, chunks and audits."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.envs import ledger
from agentrl_jax.losses.replay import Replay, Stored
from agentrl_jax.rollout.collect import Collection, collect_groups
from agentrl_jax.rollout.records import Episode, Kind, Outcome, Task
from experiments.ac2.memory import chunked
from experiments.ac2.plan import Run


class Start(NamedTuple):
  """The state in which a group begins: a prefix of a stored response, or the bare problem."""

  state: Stored
  task: Task
  chunked: bool

  @property
  def budget(self) -> int:
    """Tokens that a continuation may have."""
    return ledger.BUDGET - len(self.state.ids)


async def refill(run: Run) -> tuple[list[Episode], int]:
  """Fresh problems with one whole response each, for the store; and the cursor after them."""
  tasks, cursor = run.plan.tasks.train.next(run.memory.cursor, run.plan.refill)
  if not tasks:
    return [], cursor
  groups = await collect_groups(
    run.limited(),
    tasks,
    Collection(members=1, concurrency=len(tasks)),
    label=f"refill-{run.step}",
    seed=run.plan.seed,
  )
  return flat(groups), cursor


def choose(
  run: Run, replay: Replay, cursor: int, rng: np.random.Generator
) -> tuple[list[Start], int]:
  """The batch's states and which of them get chunks; fresh problems where nothing is stored."""
  plan = run.plan
  states = replay.prefixes(plan.groups, rng, grid=plan.grid)
  if not states:
    fresh, cursor = plan.tasks.train.next(cursor, plan.groups)
    states = [Stored(problem_of(task), ()) for task in fresh]
  short = [False] * len(states)
  if plan.critic is not None:
    names = [state.problem for state in states]
    trust, share = plan.critic.trust, plan.critic.audit
    short = chunked(names, run.memory.readiness, trust, rng, audit=share)
  tasks = [ledger.at_prefix(run.problems[s.problem], run.words(s.ids)) for s in states]
  return [Start(*each) for each in zip(states, tasks, short, strict=True)], cursor


async def continue_from(run: Run, starts: Sequence[Start]) -> list[tuple[Episode, ...]]:
  """A group of continuations of each start, to the end of its chunk or its budget."""

  async def one(index: int, start: Start) -> tuple[Episode, ...]:
    critic, most = run.plan.critic, start.budget
    if start.chunked and critic is not None:
      most = min(critic.chunk, most)
    (group,) = await collect_groups(
      run.limited(most),
      [start.task],
      Collection(members=run.plan.members, concurrency=run.plan.members),
      label=f"step-{run.step}/{index}",
      seed=run.plan.seed,
    )
    return group

  return list(await asyncio.gather(*(one(i, start) for i, start in enumerate(starts))))


def problem_of(task: Task) -> str:
  """The name of a training problem."""
  return str(task.seed)


def new_ids(episode: Episode) -> tuple[int, ...]:
  """What the policy sampled."""
  return tuple(int(i) for s in episode.segments() if s.kind is Kind.ACTION for i in s.ids)


def prompt_tokens(episode: Episode) -> int:
  """Of the problem and the prefix."""
  return sum(len(s.ids) for s in episode.segments()) - episode.action_tokens


def response(episode: Episode) -> Stored:
  """The whole response, prefix and all."""
  prefix = episode.task.params.get("prefix", "").split()
  begun = tuple(ledger.SYMBOLS.index(word) for word in prefix)
  return Stored(problem_of(episode.task), (*begun, *new_ids(episode)))


def flat(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
  """The scored episodes of all groups."""
  return [e for group in groups for e in group if e.outcome is not Outcome.FAULT]
