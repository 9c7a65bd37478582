"""Trains: `python -m launch.train --config=config:quickstart --workdir=runs/quickstart`.

The same command on the same work directory goes on where the run was. Change anything of the configuration
with `--config=set:algorithm.high=0.3`, apply a function of `configs/` with `--config=fiddler:use_sglang`, and
run your own with `--config=config:my_module.my_function`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import fiddle as fdl
from absl import flags
from fiddle import absl_flags
from fiddle.experimental import serialization

import configs
from agentrl_jax.analysis.report import report_run
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.sync_loop import train
from launch import command

CONFIG = absl_flags.DEFINE_fiddle_config(
  "config",
  default_module=configs,
  help_string="config:NAME, then any of set:PATH=VALUE, fiddler:NAME; or config_file:config.json",
  allow_imports=True,
)
WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory; made if absent.")


def main(arguments: Sequence[str]) -> int:
  del arguments
  if not WORKDIR.value:
    raise ValueError("--workdir is missing: give the directory that the run shall live in")
  if CONFIG.value is None:
    raise ValueError("--config is missing: for example --config=config:quickstart")
  workdir = Path(WORKDIR.value)
  experiment = cast(Experiment, fdl.build(CONFIG.value))
  workdir.mkdir(parents=True, exist_ok=True)
  command.traceback_directory = workdir
  text = serialization.dump_json(CONFIG.value, indent=2)
  _write_whole(workdir / "config.json", text)
  with Progressing() as progress:
    command.run_async(train(experiment, workdir, progress))
  print(report_run(workdir, width=shutil.get_terminal_size().columns))
  return 0


def _write_whole(path: Path, text: str) -> None:
  partial = path.with_suffix(".partial")
  partial.write_text(text)
  partial.replace(path)


if __name__ == "__main__":
  command.run(main)
