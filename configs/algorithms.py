"""Any named algorithm on any configuration: `--config='fiddler:use_algorithm(name="gspo")'`."""

import inspect

import fiddle as fdl

from agentrl_jax.losses import recipes
from agentrl_jax.orchestrate.experiment import Experiment

NAMES = sorted(
  name
  for name, recipe in vars(recipes).items()
  if inspect.isfunction(recipe)
  and recipe.__module__ == recipes.__name__
  and not name.startswith("_")
)


def use_algorithm(config: fdl.Config[Experiment], name: str) -> None:
  """Puts the recipe `name` there; its numbers are `--config=set:algorithm.ARGUMENT=VALUE` after it.

  Raises ValueError for a name that is not a recipe.
  """
  if name not in NAMES:
    raise ValueError(f"no algorithm {name!r}; there are {', '.join(NAMES)}")
  config.algorithm = fdl.Config(getattr(recipes, name))
