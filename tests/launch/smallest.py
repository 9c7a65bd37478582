"""The smallest runs there are, for `--config=config:tests.launch.smallest.NAME`.

The environment says which recipe. Apart from the tests, as those import commands, whose flags exist
once a process.
"""

import os

import fiddle as fdl

from agentrl_jax.losses import recipes
from agentrl_jax.losses.readiness import ClipController
from configs import tiny_rl

ARGUMENTS = {"dr_grpo": {"length": 16.0}, "dapo": {"limit": 40, "buffer": 20}}


def smallest():
  """A run of three steps of four groups of four episodes on a model of one layer."""
  config = tiny_rl()
  config.model = os.environ["AGENTRL_TINY"]
  config.steps, config.concurrency, config.checkpoint_every = 3, 16, 100
  config.engine.slots = 16
  config.batch.groups, config.batch.members, config.batch.only_mixed = 4, 4, False
  config.evaluation.tasks, config.evaluation.samples = 2, 1
  recipe = os.environ["AGENTRL_RECIPE"]
  config.algorithm = fdl.Config(getattr(recipes, recipe), **ARGUMENTS.get(recipe, {}))
  return config


def controlled():
  """AC2 with its controller of the upper clip, a checkpoint after every step."""
  config = smallest()
  config.clip = fdl.Config(ClipController, offset=0.06, base=0.28, target=0.28, step=0.02)
  config.steps, config.checkpoint_every = int(os.environ["AGENTRL_STEPS"]), 1
  return config
