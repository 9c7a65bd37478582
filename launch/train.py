"""Trains: `python -m launch.train --config=config:quickstart --workdir=runs/quickstart`.

The same command on the same work directory goes on where the run was. Change anything of the
configuration with `--config=set:algorithm.high=0.3` (`--show` lists every value), apply a function
of `configs/` with `--config=fiddler:use_sglang` (`--transport` then says how weights get to that
server), and run your own with `--config=config:my_module.my_function`. On several hosts start it on
each, with `--coordinator` (see `launch.processes`) and a work directory that all of them see.
"""

import shutil
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentrl_jax.analysis.report import report_run
from agentrl_jax.orchestrate import hosts
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.sync_loop import train
from launch import command, configuration, processes

CONFIG = configuration.define_config()
WORKDIR = configuration.define_workdir()
TRANSPORT = configuration.define_transport()
SHOW = configuration.define_show()
flags.adopt_module_key_flags(processes)


def main(arguments: Sequence[str]) -> int:
  del arguments
  config = configuration.with_transport(CONFIG, TRANSPORT)
  written = configuration.written(config)
  if SHOW.value:
    print(written.text, end="")
    return 0
  with processes.joined():
    leads = hosts.leads()
    experiment = configuration.built(config, Experiment)
    workdir = configuration.opened(WORKDIR)
    with Progressing(None if leads else Console(quiet=True)) as progress:
      command.run_async(train(experiment, workdir, progress, written))
  if leads:
    print(report_run(workdir, width=shutil.get_terminal_size().columns))
  return 0


if __name__ == "__main__":
  command.run(main)
