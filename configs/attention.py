"""A fiddler for attention's kernels: `--config=fiddler:use_cudnn`. See docs/attention.md."""

import fiddle as fdl

from agentrl_jax.models import kernels
from agentrl_jax.orchestrate.experiment import Experiment


def use_cudnn(config: fdl.Config[Experiment]) -> None:
  """The learner's attention on GPUs is cuDNN's, where that can do what is asked.

  Raises ValueError for what is no `Experiment`.
  """
  if fdl.get_callable(config) is not Experiment:
    name = fdl.get_callable(config).__name__
    raise ValueError(f"the configuration builds {name}, only an Experiment has kernels to choose")
  config.kernels = fdl.Config(kernels.with_cudnn)
