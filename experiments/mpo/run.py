"""Runs the arms: `python -m experiments.mpo.run --arms=mpo,grpo --seeds=0 [--scale=smoke]`.

The base of a seed is made first, then each arm from it. A killed job goes on from its last
checkpoint. `--arms=critic` probes the critics of a seed's finished mpo and token_token.
"""

import asyncio
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from fiddle.experimental import serialization

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.evaluate import Record, evaluate, read_records
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import read_metrics
from agentrl_jax.orchestrate.play import make_play
from agentrl_jax.orchestrate.supervised import train_supervised
from agentrl_jax.orchestrate.sync_loop import train
from experiments import arms
from experiments.mpo import config, probes
from experiments.study import Place, Reporting, Study

TRACED = ("success", "turns", "sampled_tokens", "clip_fraction", "entropy", "gradient_norm")
TEMPERATURES = (1.0, 0.5, 0.0)


def job(place: Place) -> Mapping[str, Any]:
  """One arm of one seed, or its base."""
  if place.arm == config.BASE:
    return make_base(place)
  if place.arm == config.CRITIC:
    return asyncio.run(probes.probe(place))
  experiment_config = config.experiment(place.arm, place.scale, place.seed)
  experiment_config.model = str(place.workdir_of(config.BASE) / "model")
  text = serialization.dump_json(experiment_config, indent=2)
  (place.workdir / "config.json").write_text(text)
  experiment = fdl.build(experiment_config)
  asyncio.run(train(experiment, place.workdir, Reporting(place)))  # pyright: ignore
  return {"held_out": held_out(place.workdir), "steps": steps(place.workdir)}


def make_base(place: Place) -> Mapping[str, Any]:
  """The starting policy, and how often it succeeds sampled, at temperature 1/2, and greedy."""
  plan = config.base(place.scale, place.seed)
  plan.model = str(place.workdir / "start")
  directory = train_supervised(fdl.build(plan), place.workdir, Reporting(place))  # pyright: ignore
  experiment = dataclasses.replace(
    fdl.build(config.experiment("grpo", place.scale, place.seed)), model=str(directory)
  )
  found = {f"{t:g}": by_family(asyncio.run(_evaluate(experiment, t))) for t in TEMPERATURES}
  return {"success_at_temperature": found}


async def _evaluate(experiment: Experiment, temperature: float) -> Sequence[Record]:
  """The experiment's model on its held-out tasks."""
  directory = Path(experiment.model)
  model, mesh = load_model(directory), make_mesh(devices=None)
  weights = load_weights(model, directory, shardings=shardings(model, mesh), dtype=jnp.float32)
  host = await experiment.engine(
    EngineContext(
      model, weights, 0, directory, directory, experiment.limits.context_tokens, experiment.seed
    )
  )
  try:
    play = make_play(dataclasses.replace(experiment, temperature=temperature), host.engine)
    return await evaluate(
      play,
      experiment.tasks.held_out[: experiment.evaluation.tasks],
      1,
      label=f"temperature-{temperature:g}",
      seed=experiment.seed,
      concurrency=experiment.concurrency,
    )
  finally:
    await host.close()


def held_out(workdir: Path) -> dict[str, dict[str, float]]:
  """Steps taken -> success by family."""
  names = {"before": 0, "after": len(read_metrics(workdir / "metrics.jsonl"))}
  found = {}
  for path in (workdir / "evaluation").glob("*.jsonl"):
    step = names[path.stem] if path.stem in names else int(path.stem.removeprefix("step_"))
    found[step] = by_family(read_records(path))
  return {str(step): found[step] for step in sorted(found)}


def by_family(records: Sequence[Record]) -> dict[str, float]:
  """Success of each family and `all` records, and the share of episodes that were `finished`."""
  families: dict[str, list[float]] = {}
  for r in records:
    families.setdefault(r.problem.split("/")[0], []).append(float(r.correct))
  means = {family: statistics.fmean(values) for family, values in sorted(families.items())}
  means["all"] = statistics.fmean(float(r.correct) for r in records)
  means["finished"] = statistics.fmean(float(r.finished) for r in records)
  return {name: round(value, 6) for name, value in means.items()}


def steps(workdir: Path) -> dict[str, list[float | None]]:
  """What each training step measured on its own, fresh tasks."""
  rows = read_metrics(workdir / "metrics.jsonl")
  traced = {n: [None if n not in r else round(r[n], 6) for r in rows] for n in TRACED}
  return {**traced, "explained": [explained(row) for row in rows]}


def explained(row: Mapping[str, float]) -> float | None:
  """Share of the variance of the targets that the critic explained; None without a critic."""
  if "value_target_square" not in row:
    return None
  spread = row["value_target_square"] - row["value_target"] ** 2
  error = row["value_error_square"] - row["value_error"] ** 2
  return round(1.0 - error / spread, 6) if spread > 1e-12 else 0.0


STUDY = Study(
  paper="mpo",
  job=job,
  arms=tuple(config.ARMS),
  first=(config.BASE,),
  recorded=(config.CRITIC,),
  settings=config.settings,
)

if __name__ == "__main__":
  arms.main(STUDY)
