"""Fiddlers that change where rollouts come from: `--config=fiddler:use_sglang`."""

import fiddle as fdl

from agentrl_jax.orchestrate import engines
from agentrl_jax.orchestrate.experiment import Experiment


def use_sglang(config: fdl.Config[Experiment]) -> None:
  """Rollouts from a SGLang server that the run starts, watches and stops."""
  config.engine = fdl.Config(engines.sglang)


def use_embedded(config: fdl.Config[Experiment]) -> None:
  """Rollouts from the JAX sampler in the trainer's process."""
  config.engine = fdl.Config(engines.embedded)
