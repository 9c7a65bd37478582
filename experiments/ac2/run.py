"""Runs the arms: `python -m experiments.ac2.run --arms=ac2,grpo --seeds=0 [--scale=smoke]`.

The base of a seed is made first, then each arm from it. A killed job goes on from its last
checkpoint. `--arms=critic` reads the critic of a seed's finished ac2; `--arms=probe` has no model.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fiddle as fdl
import numpy as np

from agentrl_jax.orchestrate.evaluate import evaluate, read_records, summary
from agentrl_jax.orchestrate.metrics import read_metrics
from agentrl_jax.orchestrate.supervised import train_supervised
from experiments import arms
from experiments.ac2 import config, critic
from experiments.ac2.loop import open_run, train
from experiments.ac2.plan import Plan
from experiments.ac2.probe import probe
from experiments.ac2.starts import choose
from experiments.ac2.states import examine
from experiments.study import Place, Reporting, Study

TEMPERATURES = (1.0, 0.8, 0.0)
TRACED = (
  *("flops/decode", "flops/total", "refill_success", "whole_success", "chunked", "ready", "solved"),
  *(
    "error",
    "error_whole",
    "error_aided",
    "error_unaided",
    "stated",
    "invalid",
    "worth_spread",
    "prefix_tokens",
  ),
  *("sampled_tokens", "entropy_at_start", "clip_high", "clip_fraction", "critic_rate"),
)


def job(place: Place) -> Mapping[str, Any]:
  """One arm of one seed, its base, or a probe."""
  if place.arm == config.PROBE:
    return probe(place)
  if place.arm == config.BASE:
    return make_base(place)
  if place.arm == config.CRITIC:
    return asyncio.run(examine(place, Reporting(place)))
  asyncio.run(train(planned(place), place.workdir, Reporting(place)))  # pyright: ignore
  return {"held_out": held_out(place.workdir), "steps": steps(place.workdir)}


def planned(place: Place) -> Plan:
  """The arm's plan, from the base of its seed."""
  made = config.plan(place.arm, place.scale, place.seed)
  made.model = str(place.workdir_of(config.BASE) / "model")
  return fdl.build(made)


def make_base(place: Place) -> Mapping[str, Any]:
  """The starting policy, how often it succeeds, and what its values are worth."""
  supervised = config.base(place.scale, place.seed)
  supervised.model = str(place.workdir / "start")
  directory = train_supervised(fdl.build(supervised), place.workdir, Reporting(place))  # pyright: ignore
  made = config.plan("ac2", place.scale, place.seed)
  made.model = str(directory)
  return asyncio.run(examined(fdl.build(made), place))


async def examined(plan: Plan, place: Place) -> Mapping[str, Any]:
  """Success at each temperature; the share of valid values of bare problems, and their spread."""
  found = {}
  async with open_run(plan, place.workdir / "examined", Reporting(place)) as run:  # pyright: ignore
    for temperature in TEMPERATURES:
      records = await evaluate(
        dataclasses.replace(run.limited(), temperature=temperature),
        plan.tasks.held_out[: plan.evaluation.tasks],
        plan.evaluation.samples,
        label=f"temperature-{temperature:g}",
        seed=plan.seed,
      )
      scored = summary(records)
      found[f"{temperature:g}"] = {n: round(scored[n], 6) for n in ("success", "finished")}
    count = min(64, len(run.problems))
    starts, _ = choose(
      dataclasses.replace(run, plan=dataclasses.replace(plan, groups=count)),
      run.memory.replay,
      0,
      np.random.default_rng(place.seed),
    )
    said = np.array((await critic.value(run, starts, [[] for _ in starts])).starts)
  valid = said[np.isfinite(said)]
  values = (
    {"valid": len(valid) / count, "spread": round(float(valid.std()), 6)} if len(valid) else {}
  )
  return {"success_at_temperature": found, "values": values}


def held_out(workdir: Path) -> dict[str, dict[str, float]]:
  """Steps taken -> score, and the share that was finished."""
  found = {}
  for path in sorted((workdir / "evaluation").glob("step_*.jsonl")):
    scored = summary(read_records(path))
    found[str(int(path.stem.removeprefix("step_")))] = {
      "score": round(scored["success"], 6), "finished": round(scored["finished"], 6)
    }  # fmt: skip
  return found


def steps(workdir: Path) -> dict[str, list[float | None]]:
  """What each training step measured, and the share of problems by its first unmet condition."""
  rows = read_metrics(workdir / "metrics.jsonl")
  names = [*TRACED, *sorted({n for row in rows for n in row if n.startswith("why/")})]
  return {n: [_rounded(row.get(n)) for row in rows] for n in names}


def _rounded(x: float | None) -> float | None:
  return None if x is None else float(f"{x:.9g}")


STUDY = Study(
  paper="ac2",
  job=job,
  arms=tuple(config.ARMS),
  first=(config.BASE,),
  recorded=(config.CRITIC, config.PROBE),
  settings=config.settings,
)

if __name__ == "__main__":
  arms.main(STUDY)
