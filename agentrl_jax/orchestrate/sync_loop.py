"""The story of a run, top to bottom: collect, pack, evaluate, credit, learn, publish, record."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from agentrl_jax.losses.checks import some_group_of_two
from agentrl_jax.losses.readiness import ClipController
from agentrl_jax.losses.values import explained_variance
from agentrl_jax.ops.stats import add_metrics
from agentrl_jax.orchestrate import hosts
from agentrl_jax.orchestrate.evaluate import (
  described,
  evaluate,
  read_records,
  read_settings,
  summary,
  write_records,
)
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.groups import mixed, rollout_metrics
from agentrl_jax.orchestrate.metrics import Clock, Progressing, line, to_floats
from agentrl_jax.orchestrate.minibatches import minibatches
from agentrl_jax.orchestrate.pack import Packed, pack
from agentrl_jax.orchestrate.run import Run, Stage, WrittenConfig, open_run, synchronise
from agentrl_jax.orchestrate.trajectories import write_trajectories
from agentrl_jax.rollout.collect import Collection, collect_groups
from agentrl_jax.rollout.records import Episode
from agentrl_jax.types import Aux, Metrics, TrajectoryBatch


class Mismatch(RuntimeError):
  """Engine and trainer give the same tokens different log-probs: they are not the same policy."""


async def train(
  experiment: Experiment, workdir: Path, progress: Progressing, config: WrittenConfig | None = None
) -> None:
  """Runs an experiment in `workdir`, or the rest of it, and leaves the trained model there.

  `config` is kept as `config.json` and `config.txt` once nothing was refused.
  Raises what opening a run, collecting, publishing and checkpointing raise; all of it names its
  place.
  """
  if experiment.temperature == 0:
    raise ValueError("temperature is 0, expected more: a greedy policy does not explore")
  async with open_run(experiment, workdir, progress, config) as run:
    await measure(run)
    while run.step < experiment.steps:
      progress.update("steps", run.step, experiment.steps)
      await take_step(run)
      await measure(run)
    progress.update("steps", run.step, experiment.steps)
    run.stand_by()
    run.export()
    run.export_adapter()


async def take_step(run: Run) -> None:
  """One optimizer step, from tasks to published weights."""
  experiment, clock = run.experiment, Clock()
  rollout = None if run.stage is None else await collect(run, run.stage)
  run.stand_by()
  batch = hosts.share(
    None if rollout is None else rollout.packed.batch,
    TrajectoryBatch,
    name=f"the batch of step {run.step}",
  )
  clock.lap("rollout")

  aux, entropy = frozen_evaluations(run, batch)
  old_logp = hosts.whole(aux.old_logp)
  mismatch = {} if rollout is None else check_mismatch(run, rollout, old_logp)
  clock.lap("evaluate")

  loss_batch = run.prepare(batch, aux)
  count = experiment.batch.minibatches
  metrics: Metrics = {}
  for share in minibatches(loss_batch, count, run.rows, (experiment.seed, run.step)):
    run.state, found = run.update(run.state, share)
    metrics = {n: add_metrics(metrics[n], m) if n in metrics else m for n, m in found.items()}
  synchronise(run.state)
  if "value_target_square" in metrics:
    run.explained = max(run.explained, explained_variance(metrics))
  run.clip = moved_clip(run.clip, entropy, metrics)
  clock.lap("update")

  advantage = hosts.whole(loss_batch.credit.advantage)
  run.deliver_state()
  if rollout is not None:
    path = run.workdir / "trajectories" / f"step_{run.step:06d}.jsonl"
    write_trajectories(path, rollout.groups, rollout.packed, advantage)
    run.cursor = rollout.cursor
  run.step += 1
  report = None if run.stage is None else await run.publish(run.stage)
  run.stand_by()
  clock.lap("publish")

  if rollout is not None:
    record(run, rollout, {**to_floats(metrics), **mismatch, **clock.seconds})
    run.progress.say(f"  {report}")
  # Last, so that whatever a checkpoint's steps wrote is there when it is.
  if run.step % experiment.checkpoint_every == 0 or run.step == experiment.steps:
    run.save()


def moved_clip(
  clip: ClipController | None, entropy: float, metrics: Metrics
) -> ClipController | None:
  """The controller after a step of this entropy (nats). Raises ValueError if no loss read it."""
  if clip is None:
    return None
  if "clip_high" not in metrics:
    raise ValueError(
      "clip is set, but the algorithm has no clip that it could move: build its surrogate with "
      "losses.compose.with_clip_high, as recipes.ac2 does, or leave clip at None"
    )
  return clip.after_step(entropy)


class Rollout(NamedTuple):
  """The episodes of a step, those that train as a batch, and where the next tasks begin."""

  groups: Sequence[Sequence[Episode]]
  packed: Packed
  cursor: int
  engine: str


async def collect(run: Run, stage: Stage) -> Rollout:
  """Plays the step's tasks and packs what was played."""
  experiment, layout = run.experiment, run.experiment.batch
  tasks, cursor = experiment.tasks.train.next(run.cursor, layout.groups)
  groups = await collect_groups(
    stage.play,
    tasks,
    Collection(members=layout.members, concurrency=experiment.concurrency),
    label=f"step-{run.step}",
    seed=experiment.seed,
    progress=lambda done, total: run.progress.update("episodes", done, total),
    recover=run.recover,
  )
  packed = pack(
    (mixed(groups) or groups) if layout.only_mixed else groups,
    row_length=layout.row_length,
    micro_rows=run.rows,
    min_members=2 if some_group_of_two in experiment.algorithm.checks else 1,
    share_prompts=layout.share_prompts,
    least=(layout.least_rows, layout.least_turns),
  )
  for check in experiment.algorithm.checks:
    check(packed.batch)
  return Rollout(groups, packed, cursor, stage.host.engine.name)


def record(run: Run, rollout: Rollout, measured: Mapping[str, float]) -> None:
  """Writes the finished step down, and says it in a line."""
  assert run.stage is not None
  packed = rollout.packed
  values = {**rollout_metrics(rollout.groups), **measured}
  values |= {"row_fill": packed.fill, "dropped_groups": packed.dropped_groups}
  run.stage.metrics.write(run.step - 1, values, wall_time=time.time())
  run.progress.say(line(run.step, run.experiment.steps, values))


def frozen_evaluations(run: Run, batch: TrajectoryBatch) -> tuple[Aux, float]:
  """Old and, where a loss asks for it, reference log-probs of the batch, without gradient; and the
  policy's mean entropy over its tokens.
  """
  old = run.policy(run.state.weights, batch, run.state.critic, run.state.beside)
  reference = None if run.reference is None else run.reference(run.state.weights, batch)
  high = None if run.clip is None else jnp.float32(run.clip.high)
  entropy = float(hosts.whole(old.entropy)[batch.action].mean())
  explained = None if run.state.critic is None else jnp.float32(run.explained)
  aux = Aux(
    old.logp, reference, old.value, clip_high=high, explained=explained, routers=old.routers
  )
  return aux, entropy


def check_mismatch(run: Run, rollout: Rollout, old_logp: np.ndarray) -> Mapping[str, float]:
  """|old - behavior| log-prob over tokens that the current weights sampled.

  Raises Mismatch, naming the token, where it exceeds the experiment's bound.
  """
  batch = rollout.packed.batch
  current = batch.action & (batch.behavior_version == run.step)
  difference = np.where(current, np.abs(old_logp - batch.behavior_logp), 0.0)
  worst = np.unravel_index(difference.argmax(), difference.shape)
  if not difference[worst] <= run.experiment.max_mismatch:
    episode = rollout.packed.episodes[batch.traj[worst]]
    raise Mismatch(
      f"step {run.step}: engine {rollout.engine} gave token {batch.tokens[worst]} at "
      f"position {batch.position[worst]} of episode {episode.trajectory_id} log-prob "
      f"{batch.behavior_logp[worst]:.6f}, the trainer gives {old_logp[worst]:.6f}; "
      f"the bound is {run.experiment.max_mismatch:g}"
    )
  return {
    "mismatch_max": float(difference[worst]),
    "mismatch_mean": float(difference.sum() / max(1, current.sum())),
    "on_policy_share": float(current.sum() / max(1, batch.action.sum())),
  }


async def measure(run: Run) -> None:
  """Evaluates on held-out tasks where it is due after this step, unless that is done already."""
  plan, name = run.experiment.evaluation, due(run.experiment, run.step)
  if name is None or not plan.tasks or run.stage is None:
    return
  path, samples = run.workdir / "evaluation" / f"{name}.jsonl", plan.samples
  asked = {"step": run.step, "tasks": plan.tasks, "samples": plan.samples}
  if read_settings(path) != asked:
    held_out = run.experiment.tasks.held_out
    records = await evaluate(
      run.stage.play,
      [held_out[i] for i in range(min(plan.tasks, len(held_out)))],
      plan.samples,
      label=name,
      seed=run.experiment.seed,
      concurrency=run.experiment.concurrency,
      progress=lambda done, total: run.progress.update(f"evaluation {name}", done, total),
      recover=run.recover,
    )
    score = summary(records)
    write_records(records, path, asked)
    await run.stage.host.flush()
  else:
    score = summary(read_records(path))
  run.progress.say(f"held-out {name}: {described(score)}")
  faulted = min(plan.tasks, len(run.experiment.tasks.held_out)) * samples - int(score["samples"])
  if faulted:
    run.progress.say(
      f"  {faulted} samples are not among them: the machinery failed, not the policy"
    )


def due(experiment: Experiment, step: int) -> str | None:
  """The name of the evaluation after so many steps, None where there is none."""
  every = experiment.evaluation.every
  if step in (0, experiment.steps):
    return "after" if step else "before"
  return f"step_{step:06d}" if every and step % every == 0 else None
