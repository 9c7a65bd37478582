"""The finishing study's jobs: `python -m experiments.finishing.run` (see README.md).

Arms: three controlled runs whose truth is known; a supervised base and five algorithms that improve
it; recorded samples of real models. Arms of recorded samples need their logs (README.md).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from experiments import arms
from experiments.finishing import config, controlled, logs, measure, tiny


def job(place: arms.Place) -> Mapping[str, Any]:
  """Dispatches on what the arm's configuration builds."""
  plan = fdl.build(config.arm_config(place.arm, place.scale))
  match plan:
    case config.Controlled():
      return controlled.run(plan, place)
    case config.Start():
      return tiny.run_base(plan, place)
    case config.Reinforced():
      return tiny.run_recipe(plan, place)
    case config.Logs():
      return logs.run(plan, place)
  raise ValueError(f"{place.arm} builds {type(plan).__name__}")


def settings(arm: str, scale: str) -> Mapping[str, Any]:
  """The configuration's own values, without the algorithm's functions, which the arm names."""
  plan = fdl.build(config.arm_config(arm, scale))
  if isinstance(plan, config.Reinforced):
    plan = dataclasses.replace(plan, algorithm=None)
  return dataclasses.asdict(plan)


STUDY = arms.Study(
  "finishing",
  job,
  arms=(*measure.CONTROLLED, *measure.RECIPES),
  seeds=(0, 1),
  first=("base",),
  recorded=measure.RECORDED,
  settings=settings,
)

if __name__ == "__main__":
  arms.main(STUDY)
