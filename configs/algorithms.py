"""Any named algorithm on any configuration: `--config='fiddler:use_algorithm(name="gspo")'`, and
what is asked of a mixture's routers: `--config='fiddler:use_routers(load_balance=0.001)'`.
"""

import inspect
from typing import Any

import fiddle as fdl

from agentrl_jax.losses import recipes
from agentrl_jax.losses.routers import Routers
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.supervised import Supervised
from configs.precision import require

NAMES = sorted(
  name
  for name, recipe in vars(recipes).items()
  if inspect.isfunction(recipe)
  and recipe.__module__ == recipes.__name__
  and not name.startswith("_")
)


def use_algorithm(config: fdl.Config[Experiment], name: str, **numbers: Any) -> None:
  """Puts the recipe `name` there, with `numbers` as its arguments:
  `fiddler:use_algorithm(name="dapo", limit=96, buffer=32)`.

  Raises ValueError for a name that is not a recipe, or a number that the recipe does not have.
  """
  if name not in NAMES:
    raise ValueError(f"no algorithm {name!r}; there are {', '.join(NAMES)}")
  recipe = getattr(recipes, name)
  known = inspect.signature(recipe).parameters
  if unknown := numbers.keys() - known:
    raise ValueError(f"{name} has no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
  config.algorithm = fdl.Config(recipe, **numbers)


def use_routers(
  config: fdl.Config[Experiment | Supervised],
  load_balance: float | None = None,
  z: float = 0.0,
  correction_rate: float = 0.0,
) -> None:
  """The losses and corrections of a mixture's routers, see `losses.routers.Routers`.

  Raises ValueError for what is no `Experiment` and not `Supervised`.
  """
  require(config, "routing", Experiment, Supervised)
  config.routers = fdl.Config(
    Routers, load_balance=load_balance, z=z, correction_rate=correction_rate
  )
