"""A study that counts, for the tests of the form: `python -m tests.experiments.counting`.

The environment says which job fails at its first attempt, and which never ends.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from experiments import arms


def job(place: arms.Place) -> Mapping[str, Any]:
  counted = place.workdir / "counted"
  done = int(counted.read_text()) if counted.exists() else 0
  started = done
  for step in range(done, 4):
    counted.write_text(str(step + 1))
    place.save({"counted": step + 1})
    place.progress(step + 1, 4)
    if step == 1 and os.environ.get("FAILS") == f"{place.arm}_{place.seed}" and not started:
      raise ValueError("two is enough")
    if os.environ.get("HANGS") == f"{place.arm}_{place.seed}":
      time.sleep(600)
    time.sleep(0.3)
  base = None
  if place.arm != "base":
    base = int((place.workdir_of("base") / "counted").read_text())
  cores = sorted(os.sched_getaffinity(0))
  return {"counted": 10 * place.seed + 4, "from": started, "base": base, "cores": cores}


STUDY = arms.Study(
  "counting",
  job,
  arms=("one", "two"),
  seeds=(0, 1),
  first=("base",),
  settings=lambda arm, scale: {"until": int(os.environ.get("UNTIL", "4"))},
)

if __name__ == "__main__":
  arms.main(STUDY)
