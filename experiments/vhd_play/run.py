"""Runs the arms: `python -m experiments.vhd_play.run --arms=mechanism --seeds=0 [--scale=smoke]`.

The base of a seed is made first, then each arm from it. A killed job goes on from its last
checkpoint. Every policy is measured on the same held-out tasks, once per task at temperature 1.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
from fiddle.experimental import serialization

from agentrl_jax.envs.mechanisms import draw, scripted
from agentrl_jax.envs.mechanisms.environment import PRESENTATIONS, problem_of, result
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.model import Weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import read_metrics
from agentrl_jax.orchestrate.play import make_play
from agentrl_jax.orchestrate.supervised import train_supervised
from agentrl_jax.orchestrate.sync_loop import train
from agentrl_jax.orchestrate.trained import open_trained
from agentrl_jax.rollout.collect import Collection, collect_groups
from agentrl_jax.rollout.records import Episode, Outcome, Task
from experiments import arms
from experiments.study import Place, Reporting, Study
from experiments.vhd_play import config
from experiments.vhd_play.failures import LABELS, play_again

UNSEEN = "unseen"
TRACED = ("reward", "probes", "turns", "invalid", "sampled_tokens", "entropy", "gradient_norm")


def job(place: Place) -> Mapping[str, Any]:
  """One arm of one seed, or its base."""
  if place.arm == config.BASE:
    return make_base(place)
  planned = config.experiment(place.arm, place.scale, place.seed)
  planned.model = str(place.workdir_of(config.BASE) / "model")
  text = serialization.dump_json(planned, indent=2)
  (place.workdir / "config.json").write_text(text)
  experiment = fdl.build(planned)
  asyncio.run(train(experiment, place.workdir, Reporting(place)))  # pyright: ignore
  weights = open_trained(experiment, place.workdir).state.weights
  return {"measured": measured(experiment, weights, place), "steps": steps(place.workdir)}


def make_base(place: Place) -> Mapping[str, Any]:
  """The starting policy, and what scripts make of the same held-out tasks."""
  plan = config.base(place.scale, place.seed)
  plan.model = str(place.workdir / "start")
  directory = train_supervised(fdl.build(plan), place.workdir, Reporting(place))  # pyright: ignore
  planned = config.experiment("mechanism", place.scale, place.seed)
  planned.model = str(directory)
  model, mesh = load_model(directory), make_mesh(devices=None)
  weights = load_weights(model, directory, shardings=shardings(model, mesh), dtype=jnp.float32)
  found = measured(fdl.build(planned), weights, place)
  rows = read_metrics(place.workdir / "metrics.jsonl")
  every = max(1, len(rows) // 20)
  return {
    "measured": found,
    "scripts": {name: scripts(tasks) for name, tasks in held_out(place.scale).items()},
    "loss": [round(row["loss"], 6) for row in rows[::every]],
  }


def held_out(scale: str) -> dict[str, list[Task]]:
  """The tasks that policies are measured on: F, I and A of the same parameters, and `unseen`."""
  size = config.MEASURED[scale]
  families = config.FAMILIES
  found = {
    p: [
      draw.make_task(families[i % len(families)], p, "held_out", i) for i in range(size.tasks)
    ]
    for p in PRESENTATIONS
  }  # fmt: skip
  unseen = [
    draw.make_task(size.unseen, "A", "held_out", i, nodes=size.nodes) for i in range(size.tasks)
  ]
  return {**found, UNSEEN: unseen}


def scripts(tasks: Sequence[Task]) -> dict[str, float]:
  """Mean score of the oracle (which probes everything in A), the naive rule and idling."""
  policies = {
    "oracle": scripted.oracle_calls,
    "naive": scripted.naive_calls,
    "idle": scripted.idle_calls,
  }
  found = {}
  for name, calls in policies.items():
    problems = [problem_of(task) for task in tasks]
    parts = [result(draw.replay(problem, calls(problem)))[0] for problem in problems]
    found[name] = round(float(np.mean([p["task/utility"] for p in parts])), 6)
  return found


# --- measuring ------------------------------------------------------------------------------------


def measured(experiment: Experiment, weights: Weights, place: Place) -> dict[str, Any]:
  """Scores and failures of a policy on each set of held-out tasks."""
  return asyncio.run(_measured(experiment, weights, place))


async def _measured(experiment: Experiment, weights: Weights, place: Place) -> dict[str, Any]:
  directory = Path(experiment.model)
  host = await experiment.engine(
    EngineContext(
      model=load_model(directory),
      weights=weights,
      version=0,
      directory=directory,
      workdir=place.workdir,
      context_tokens=experiment.limits.context_tokens,
      seed=place.seed,
    )
  )
  try:
    play = make_play(experiment, host.engine)
    found = {}
    for name, tasks in held_out(place.scale).items():
      groups = await collect_groups(
        play,
        tasks,
        Collection(members=1, concurrency=experiment.concurrency),
        label=f"measured-{name}",
        seed=place.seed,
      )
      found[name] = report_of([episode for (episode,) in groups])
    return found
  finally:
    await host.close()


def report_of(episodes: Sequence[Episode]) -> dict[str, Any]:
  """By task in order: score, probes, calls; and how often each failure was seen.

  Raises RuntimeError for a faulted episode: rows must stay paired between arms.
  """
  faulted = [e for e in episodes if e.outcome is Outcome.FAULT]
  if faulted:
    raise RuntimeError(f"{faulted[0].trajectory_id}: {faulted[0].fault}")
  played = [play_again(episode) for episode in episodes]
  labels = [p.labels(problem_of(e.task)) for p, e in zip(played, episodes, strict=True)]
  return {
    "score": [round(p.score, 4) for p in played],
    "probes": round(float(np.mean([p.probes for p in played])), 6),
    "calls": round(float(np.mean([e.info["calls"] for e in episodes])), 6),
    "tokens": round(float(np.mean([e.action_tokens for e in episodes])), 6),
    "ended": round(float(np.mean([p.ended for p in played])), 6),
    "failures": {n: round(float(np.mean([n in found for found in labels])), 6) for n in LABELS},
  }


def steps(workdir: Path) -> dict[str, list[float | None]]:
  """What each training step measured on its own tasks."""
  rows = read_metrics(workdir / "metrics.jsonl")
  return {n: [None if n not in r else round(r[n], 6) for r in rows] for n in TRACED}


STUDY = Study(
  paper="vhd_play",
  job=job,
  arms=tuple(config.ARMS),
  first=(config.BASE,),
  settings=config.settings,
)

if __name__ == "__main__":
  arms.main(STUDY)
