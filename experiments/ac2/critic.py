"""The policy as its own critic: what it is asked, what it said, and what it learns from that."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.envs import ledger
from agentrl_jax.losses.readiness import critic_target
from agentrl_jax.losses.replay import Stored, critic_scores
from agentrl_jax.orchestrate.pack import bucket, pack
from agentrl_jax.orchestrate.value_tokens import lesson, stated_values
from agentrl_jax.rollout.environment import Message
from agentrl_jax.rollout.records import Episode, Outcome
from agentrl_jax.types import Aux, Metrics, TrajectoryBatch
from experiments.ac2.memory import Pair
from experiments.ac2.plan import Run
from experiments.ac2.starts import Start, new_ids, response

ROW = 128  # positions of a row of lessons
LONGEST = (
  58  # of a lesson: 13 numbers, reference 1 + 18, ?, prefix 19, left, VALUE, answer 2, spare
)

Bank = Mapping[str, tuple[int, ...]]


class Valued(NamedTuple):
  """What a step's groups are worth.

  `stated` by trajectory is of what the critic scores, NaN where it said no value; `worths` of each
  group is that or the reward; `starts` its opinion of each start, `unaided` the same without the
  reference where there is one, only to be compared; `flops` what asking for all but that took.
  """

  stated: Mapping[str, float]
  worths: Sequence[Sequence[float]]
  starts: Sequence[float]
  unaided: Sequence[float | None]
  flops: int


async def value(run: Run, starts: Sequence[Start], groups: Sequence[Sequence[Episode]]) -> Valued:
  """Asks the engine's weights, from before the update, with the references from before the step."""
  scored = [[e for e in group if e.outcome is not Outcome.FAULT] for group in groups]
  if run.plan.critic is None:
    return Valued({}, [[e.reward for e in group] for group in scored], [], [], 0)
  ends = {
    e.trajectory_id: response(e)
    for start, group in zip(starts, scored, strict=True)
    for e in group
    if is_open(run, start, e)
  }
  openings = {f"start-{i}": start.state for i, start in enumerate(starts)}
  asked = {
    name: question(run, state, reference(run, run.memory.bank, state))
    for name, state in (openings | ends).items()
  }
  unaided = {
    f"unaided-{i}": question(run, start.state, [])
    for i, start in enumerate(starts)
    if reference(run, run.memory.bank, start.state)
  }
  found = await stated_values(
    run.host.engine,
    asked | unaided,
    lambda ids: ledger.read_value(run.words(ids)),
    stop_token_ids=run.play.renderer.stop_token_ids,
  )
  worths = [[found.get(e.trajectory_id, e.reward) for e in group] for group in scored]
  flops = sum(run.cost.forward(len(q)) + run.cost(len(q), 2) for q in asked.values())
  return Valued(
    stated={name: found[name] for name in ends},
    worths=worths,
    starts=[found[name] for name in openings],
    unaided=[found.get(f"unaided-{i}") for i in range(len(starts))],
    flops=flops,
  )


def is_open(run: Run, start: Start, episode: Episode) -> bool:
  """Whether the critic scores where a continuation stopped."""
  critic, new = run.plan.critic, new_ids(episode)
  return critic_scores(
    reached_chunk=bool(start.chunked and critic and len(new) == critic.chunk),
    out_of_budget=len(new) >= start.budget,
    finished=new[-1] in run.play.renderer.stop_token_ids,
    answered=ledger.answered(run.words(response(episode).ids)) is not None,
  )


def reference(run: Run, bank: Bank, state: Stored) -> list[str]:
  """The running list of the problem's first right response; empty if it was never solved."""
  words = run.words(bank.get(state.problem, ()))
  return words[: words.index("=")] if "=" in words else []


def question(run: Run, state: Stored, known: Sequence[str]) -> np.ndarray:
  """The prompt that asks for the value of a state."""
  text = ledger.value_question(run.problems[state.problem], run.words(state.ids), known)
  return run.play.renderer.opening([Message("user", text)], ())


def targets(run: Run, starts: Sequence[Start], valued: Valued) -> list[Pair]:
  """Of the groups in which enough members have a worth."""
  assert run.plan.critic is not None
  least = run.plan.critic.min_valid
  found = [critic_target(worths, least=least) for worths in valued.worths]
  return [Pair(s.state, t) for s, t in zip(starts, found, strict=True) if t is not None]


def lessons(run: Run, bank: Bank, pairs: Sequence[Pair]) -> list[list[Episode]]:
  """Each pair as a group: its question without the reference and, if there is one, with it."""
  made = []
  for i, pair in enumerate(pairs):
    known = reference(run, bank, pair.state)
    answer = run.play.renderer.write(Message("assistant", ledger.value_word(pair.target)))
    asked = [question(run, pair.state, words) for words in ([known] if known else []) + [[]]]
    task = run.problems[pair.state.problem]
    made.append(
      [
        lesson(f"lesson-{i}/{k}", task, prompt, answer, run.play.renderer.vocab_size)
        for k, prompt in enumerate(asked)
      ]
    )
  return made


def learn(run: Run, groups: Sequence[Sequence[Episode]]) -> Metrics:
  """One update of the shared weights by the critic's own optimizer."""
  assert run.teach is not None and run.plan.critic is not None
  prepare, update = run.teach
  most = 2 * run.plan.critic.drawn
  rows = -(-most // (ROW // LONGEST))
  packed = pack(groups, row_length=ROW, micro_rows=1, min_members=1, least=(rows, most))
  batch = with_room(packed.batch, bucket(most))
  # Against an old log-prob of zero the likelihood's loss is the negative log-likelihood itself.
  aux = Aux(old_logp=np.zeros(batch.tokens.shape, np.float32))  # pyright: ignore
  run.state, found = update(run.state, prepare(batch, aux))
  return found


def with_room(batch: TrajectoryBatch, trajectories: int) -> TrajectoryBatch:
  """The batch with room for so many trajectories: one program, however many lessons there are."""
  more = trajectories - len(batch.traj_group)
  return dataclasses.replace(
    batch,
    traj_group=np.pad(batch.traj_group, (0, more), constant_values=-1),
    traj_truncated=np.pad(batch.traj_truncated, (0, more)),
  )
