"""Plans a run on devices that are not here:
`python -m launch.plan --config=config:qwen3_4b_v5e_16 --topology=v5e:4x4`.

Compiles the run's own programs for the topology and prints parameters, mesh, sharding table, peak
memory against capacity, FLOPs, bytes, roofline time and MFU, collectives by mesh axis, and the
largest values. `--topology=cpu:8` needs nothing installed; TPUs and GPUs need their compilers:
`bash launch/environment.sh --extra=plan-tpu` (or `plan-gpu`) puts them into the environment.

Exit code 1 where something does not fit.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
from absl import flags

from agentrl_jax.analysis.planning import chips
from launch import command, configuration

CONFIG = configuration.define_config()
TOPOLOGY = flags.DEFINE_string("topology", None, f"What to plan for: {chips.ACCEPTED}.")
PROGRAMS = flags.DEFINE_list("programs", [], "Of evaluate, step, prefill, decode; all if empty.")
JSON = flags.DEFINE_bool("json", False, "Print the plan as JSON.")


def main(arguments: Sequence[str]) -> int:
  del arguments
  if not TOPOLOGY.value:
    raise ValueError(f"--topology is missing, accepted are {chips.ACCEPTED}")
  topology = chips.parse(TOPOLOGY.value)
  chips.prepare_process(topology)
  experiment, sampler = experiment_of(CONFIG)
  plan = planned(experiment, sampler, topology)
  print(json.dumps(plan["json"], indent=2) if JSON.value else plan["text"], end="")
  return 0 if plan["fits"] else 1


def experiment_of(flag: flags.FlagHolder) -> tuple[Any, Any]:
  """The experiment without its tasks, which planning does not read, and the sampler's sizes: None
  where rollouts come from a server.
  """
  from agentrl_jax.orchestrate import engines
  from agentrl_jax.orchestrate.experiment import Experiment
  from launch.programs import Sampler

  config = copy.deepcopy(configuration.given(flag))
  if fdl.get_callable(config) is not Experiment:
    name = fdl.get_callable(config).__name__
    raise ValueError(f"--config builds {name}, this command takes Experiment")
  sampler = None
  if fdl.get_callable(config.engine) is engines.embedded:
    sizes = fdl.ordered_arguments(config.engine, include_defaults=True)
    fp8: Any = fdl.build(sizes["fp8"])
    sampler = Sampler(slots=sizes["slots"], dtype=sizes["dtype"], fp8=fp8)
  config.tasks = None
  return fdl.build(config), sampler


def model_of(experiment: Any) -> Any:
  """The model of the directory, or of the configuration where there is no directory yet."""
  from agentrl_jax.models.hf import load_model
  from agentrl_jax.orchestrate.run import require_architecture

  if experiment.architecture is not None and not (Path(experiment.model) / "config.json").exists():
    return experiment.architecture
  model = load_model(experiment.model)
  require_architecture(experiment, model)
  return model


def planned(experiment: Any, sampler: Any, topology: chips.Topology) -> dict[str, Any]:
  """{"text", "json", "fits"} of a run. Raises ValueError for a mesh of another size."""
  from agentrl_jax.analysis.planning import estimate as estimates
  from agentrl_jax.analysis.planning import render
  from agentrl_jax.models import sharding
  from launch.programs import PROGRAMS as KNOWN
  from launch.programs import trace_run

  unknown = sorted(set(PROGRAMS.value) - set(KNOWN))
  if unknown:
    raise ValueError(f"--programs names {', '.join(unknown)}; there are {', '.join(KNOWN)}")
  model = model_of(experiment)
  mesh = sharding.make_mesh(devices=chips.devices(topology), **experiment.mesh)
  run = trace_run(experiment, model, mesh, sampler)
  wanted = PROGRAMS.value or KNOWN
  found = [
    estimates.estimate(traced, run, topology, dict(mesh.shape))
    for traced in run.programs
    if traced.name in wanted
  ]
  evaluations = 2 if "reference" in run.resident else 1
  step = estimates.training_step({e.name: e for e in found}, topology, evaluations)
  fits = all(not e.refused and (e.memory is None or e.memory.fits is not False) for e in found)
  table = sharding.table(model, mesh)
  shape = dict(mesh.shape)
  text = render.text(
    heading=f"plan of {model.family} from {experiment.model}",
    run=run,
    topology=topology,
    mesh=shape,
    sharding=table,
    estimates=found,
    step=step,
    batch=experiment.batch,
  )
  data = {
    "family": model.family,
    "parameters": run.parameters,
    "topology": topology,
    "mesh": shape,
    "sharding": table.splitlines(),
    "rows": run.rows,
    "tokens": run.tokens,
    "resident": run.resident,
    "attention": run.attention,
    "programs": found,
    "training_step": step,
    "fits": fits,
  }
  return {"text": text, "json": estimates.as_json(data), "fits": fits}


if __name__ == "__main__":
  command.run(main)
