"""Supervised training: `python -m launch.sft --config=config:tiny_sft --workdir=runs/tiny_sft`."""

from collections.abc import Sequence

from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.supervised import Supervised, train_supervised
from launch import command, configuration

CONFIG = configuration.define_config()
WORKDIR = configuration.define_workdir()
SHOW = configuration.define_show()


def main(arguments: Sequence[str]) -> int:
  del arguments
  written = configuration.written(CONFIG)
  if SHOW.value:
    print(written.text, end="")
    return 0
  plan = configuration.built(CONFIG, Supervised)
  workdir = configuration.opened(WORKDIR)
  with Progressing() as progress:
    trained = train_supervised(plan, workdir, progress, written)
    progress.say(f"trained model: {trained}")
  return 0


if __name__ == "__main__":
  command.run(main)
