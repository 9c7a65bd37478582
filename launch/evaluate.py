"""Evaluates a model on held-out tasks, with the configuration's own tasks, limits and scorer.

  python -m launch.evaluate --config=config:quickstart --model=DIRECTORY --output=FILE.jsonl

Records are one JSON line a sample; the summary goes to standard output.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from absl import flags

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.evaluate import (
  check_writable,
  described,
  evaluate,
  summary,
  write_records,
)
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.play import make_play
from launch import command, configuration

CONFIG = configuration.define_config()
TRANSPORT = configuration.define_transport()
MODEL = flags.DEFINE_string("model", None, "Hugging Face directory; default: the configuration's.")
OUTPUT = flags.DEFINE_string("output", None, "Where the records go, as jsonl.")
TASKS = flags.DEFINE_integer(
  "tasks", None, "Held-out tasks; default: the configuration's.", lower_bound=1
)
SAMPLES = flags.DEFINE_integer(
  "samples", None, "Episodes a task; default: the configuration's.", lower_bound=1
)
TEMPERATURE = flags.DEFINE_float(
  "temperature", None, "0 is greedy; default: the configuration's.", lower_bound=0.0
)


def main(arguments: Sequence[str]) -> int:
  del arguments
  if OUTPUT.value is None:
    raise ValueError("--output is missing: give the file that the records go to")
  output = Path(OUTPUT.value)
  check_writable(output)
  experiment = configuration.built(configuration.with_transport(CONFIG, TRANSPORT), Experiment)
  if MODEL.value is None and experiment.lora is not None and experiment.lora.start is not None:
    raise ValueError(
      f"the configuration starts at the adapter {experiment.lora.start}, which no model directory "
      "holds: give --model, as `model/` of a run, or --config=set:lora.start=None"
    )
  changes = {"model": MODEL.value, "temperature": TEMPERATURE.value}
  changes = {name: value for name, value in changes.items() if value is not None}
  command.run_async(_evaluate(dataclasses.replace(experiment, **changes), output))
  return 0


async def _evaluate(experiment: Experiment, output: Path) -> None:
  directory = Path(experiment.model)
  model = load_model(directory)
  mesh = make_mesh(devices=None, **experiment.mesh)
  weights = load_weights(model, directory, shardings=shardings(model, mesh), dtype=jnp.float32)
  with Progressing() as progress, tempfile.TemporaryDirectory() as scratch:
    context = experiment.limits.context_tokens
    host = await experiment.engine(
      EngineContext(
        model, weights, 0, directory, Path(scratch), context, experiment.seed, progress.say
      )
    )
    try:
      plan, held_out = experiment.evaluation, experiment.tasks.held_out
      count = min(TASKS.value or plan.tasks, len(held_out))
      records = await evaluate(
        make_play(experiment, host.engine),
        [held_out[i] for i in range(count)],
        SAMPLES.value or plan.samples,
        label=directory.name,
        seed=experiment.seed,
        concurrency=experiment.concurrency,
        progress=lambda done, total: progress.update("episodes", done, total),
      )
    finally:
      await host.close()
    write_records(records, output)
    score = summary(records)
    progress.say(
      f"{directory}: {count} held-out tasks, {score['samples']:.0f} episodes at temperature "
      f"{experiment.temperature:g}: {described(score)}; records in {output}"
    )


if __name__ == "__main__":
  command.run(main)
