"""What the critic of a finished run knows of turns: constancy and controls, alarms, retries."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import numpy as np

from agentrl_jax.analysis import turn_scores
from agentrl_jax.analysis.turn_scores import Attempts, Trace
from agentrl_jax.envs import turn_chain
from agentrl_jax.learner.critic import Critic
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.play import make_play
from agentrl_jax.orchestrate.trained import Trained, open_trained
from agentrl_jax.rollout.collect import Collection, collect_groups
from agentrl_jax.rollout.episode import Play
from agentrl_jax.rollout.records import Episode, Outcome
from agentrl_jax.rollout.resume import resume_episode
from experiments.mpo import config
from experiments.study import Place

FALSE_ALARMS = 0.1
PLAYS = 4  # of each retry
FIRST_SEED = 100_000  # of held-out tasks that no evaluation has played


@dataclasses.dataclass(frozen=True)
class Size:
  calibration: int = 256
  test: int = 256
  retried: int = 40


SIZES = {"cpu": Size(), "smoke": Size(12, 12, 2)}


async def probe(place: Place) -> Mapping[str, Any]:
  """Of the arm mpo's last checkpoint, with the critic of token_token as the control that never saw
  a turn. Raises FileNotFoundError where either has not been run.
  """
  ours, control = (_trained(place, arm) for arm in ("mpo", "token_token"))
  host = await ours.experiment.engine(
    EngineContext(
      model=ours.model,
      weights=ours.state.weights,
      version=ours.step,
      directory=Path(ours.experiment.model),
      workdir=place.workdir,
      context_tokens=ours.experiment.limits.context_tokens,
      seed=place.seed,
    )
  )
  size = SIZES[place.scale]
  try:
    play = make_play(ours.experiment, host.engine)
    episodes = await _episodes(play, size, place.seed)
    traces = traces_of(ours, episodes)
    calibration, test = traces[: size.calibration], traces[size.calibration :]
    result = {"success": float(np.mean([t.success for t in traces]))}
    result |= {"constancy": _constancy(ours, control, episodes, place.seed)}
    result |= {"alarms": _judged(calibration, test)}
    place.save(result)
    tested = list(zip(episodes[size.calibration :], test, strict=True))
    result |= {"retries": await _retries(play, calibration, tested, size.retried, place.seed)}
  finally:
    await host.close()
  return result


def _trained(place: Place, arm: str) -> Trained:
  experiment_config = config.experiment(arm, place.scale, place.seed)
  experiment_config.model = str(place.workdir_of(config.BASE) / "model")
  return open_trained(fdl.build(experiment_config), place.workdir_of(arm))


async def _episodes(play: Play, size: Size, seed: int) -> list[Episode]:
  """One episode of each fresh held-out task."""
  count = size.calibration + size.test
  tasks = turn_chain.make_tasks("held_out", count, first_seed=FIRST_SEED)
  collection = Collection(members=1, concurrency=128)
  groups = await collect_groups(play, tasks, collection, label="probe", seed=seed)
  return [episode for group in groups for episode in group if episode.turn_rewards]


def traces_of(
  trained: Trained, episodes: Sequence[Episode], critic: Critic | None = None
) -> list[Trace]:
  found = trained.values(list(episodes), critic)
  return [
    Trace(v.value, v.turn, np.asarray(e.turn_rewards), v.boot, success=e.outcome is Outcome.SUCCESS)
    for v, e in zip(found, episodes, strict=True)
  ]


# --- constancy ------------------------------------------------------------------------------------


def _constancy(
  ours: Trained, control: Trained, episodes: Sequence[Episode], seed: int
) -> dict[str, dict[str, float]]:
  """The statistic of four critics on the same episodes; `critic` is the one that is claimed of."""
  rng = np.random.default_rng((seed, 1))
  mine = traces_of(ours, episodes)
  assert ours.state.critic is not None
  sets = {
    "critic": mine,
    "permuted": [turn_scores.with_permuted_turns(t, rng) for t in mine],
    "token_targets": traces_of(control, episodes),
    "untrained": traces_of(ours, episodes, _untrained(ours.state.critic, rng)),
  }
  return {name: dataclasses.asdict(turn_scores.constancy(t)) for name, t in sets.items()}


def _untrained(critic: Critic, rng: np.random.Generator) -> Critic:
  """A random head on the same hidden states."""
  size = critic.head.weight.shape[0]
  weight = jnp.asarray(rng.normal(size=size) / np.sqrt(size), jnp.float32)
  return dataclasses.replace(critic, head=dataclasses.replace(critic.head, weight=weight))


# --- alarms and retries ---------------------------------------------------------------------------


def _limits(calibration: Sequence[Trace]) -> tuple[float, float]:
  """Scale and threshold from successful runs."""
  good = [t for t in calibration if t.success]
  scale = turn_scores.surprise_scale(good)
  maxima = [float(turn_scores.turn_scores(t, scale).max()) for t in good]
  return scale, turn_scores.conformal_threshold(maxima, FALSE_ALARMS)


def _judged(calibration: Sequence[Trace], test: Sequence[Trace]) -> dict[str, float | None]:
  scale, threshold = _limits(calibration)
  found = dataclasses.asdict(turn_scores.alarms(test, scale, threshold))
  found |= {"scale": scale, "threshold": threshold, "failed": sum(not t.success for t in test)}
  return {name: float(x) if np.isfinite(x) else None for name, x in found.items()}


async def _retries(
  play: Play,
  calibration: Sequence[Trace],
  tested: Sequence[tuple[Episode, Trace]],
  most: int,
  seed: int,
) -> dict[str, Any]:
  """For episodes with an alarm: chances of success after going back to the flagged turn, to a
  random one and to the last, and of going on after the flagged one, all with the tokens of the
  first. One row an episode.
  """
  scale, threshold = _limits(calibration)
  rng = np.random.default_rng((seed, 2))
  rows: list[dict[str, float]] = []
  for episode, trace in tested:
    flagged = turn_scores.first_alarm(turn_scores.turn_scores(trace, scale), threshold)
    if flagged is None or len(rows) == most:
      continue
    last = len(trace.reward) - 1
    turns = {"flagged": flagged, "random": int(rng.integers(last + 1)), "last": last}
    tries = {n: await attempts(play, episode, turn, seed) for n, turn in turns.items()}
    budget = tries["flagged"].tokens
    row = {name: tried.chance(budget) for name, tried in tries.items()}
    row["continued"] = float(trace.success)
    if flagged < last:
      row["continued"] = (await attempts(play, episode, flagged + 1, seed)).chance(budget)
    rows.append(row | {"turn": flagged, "turns": last + 1, "succeeded": float(trace.success)})
  names = list(rows[0]) if rows else []
  return {"episodes": len(rows), **{n: [round(row[n], 6) for row in rows] for n in names}}


async def attempts(play: Play, episode: Episode, turn: int, seed: int) -> Attempts:
  """`PLAYS` plays of an episode from `turn` on."""
  kept = sum(len(s.ids) for s in itertools.islice(_actions(episode), turn))
  played = [
    await resume_episode(
      play, episode, turn, trajectory_id=f"{episode.trajectory_id}/retry-{turn}-{i}", seed=seed
    )
    for i in range(PLAYS)
  ]
  scored = [e for e in played if e.outcome is not Outcome.FAULT]
  return Attempts(
    successes=sum(e.outcome is Outcome.SUCCESS for e in scored),
    plays=len(scored),
    tokens=float(np.mean([e.action_tokens - kept for e in scored])),
  )


def _actions(episode: Episode):
  return (s for s in episode.segments() if s.turn >= 0)
