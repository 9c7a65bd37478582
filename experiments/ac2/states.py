"""What the critic of a finished ac2 run says of states that are right and of those that are not."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import fiddle as fdl
import numpy as np

from agentrl_jax.envs import ledger
from agentrl_jax.losses.replay import Stored
from agentrl_jax.orchestrate.value_tokens import stated_values
from experiments.ac2 import config, critic
from experiments.ac2.loop import open_run
from experiments.ac2.plan import Run
from experiments.study import Place

CUTS = (0, 4, 8, 12)


async def examine(place: Place, progress: Any) -> Mapping[str, Any]:
  """Of the states that its store holds at the end, with the reference where there is one and
  without. Raises FileNotFoundError where ac2 has not been run.
  """
  made = config.plan("ac2", place.scale, place.seed)
  made.model = str(place.workdir_of(config.BASE) / "model")
  opened = place.workdir / "opened"  # a copy: opening a run writes to its directory
  shutil.rmtree(opened, ignore_errors=True)
  shutil.copytree(place.workdir_of("ac2") / "checkpoints", opened / "checkpoints")
  async with open_run(fdl.build(made), opened, progress) as run:
    states = [
      Stored(one.problem, one.ids[:cut])
      for one in run.memory.replay.stored
      for cut in CUTS
      if cut < 0.9 * len(one.ids)
    ]
    said = {
      "aided": await values(
        run, states, [critic.reference(run, run.memory.bank, s) for s in states]
      ),
      "unaided": await values(run, states, [[] for _ in states]),
    }
    right = np.array([is_right(run, state) for state in states])
  cut = np.array([len(state.ids) for state in states])
  return {name: by_state(found, right, cut) for name, found in said.items()}


async def values(run: Run, states: Sequence[Stored], known: Sequence[Sequence[str]]) -> np.ndarray:
  """The critic's word on each state, NaN where it is none."""
  asked = {
    f"state-{i}": critic.question(run, state, words)
    for i, (state, words) in enumerate(zip(states, known, strict=True))
  }
  found = await stated_values(
    run.host.engine,
    asked,
    lambda ids: ledger.read_value(run.words(ids)),
    stop_token_ids=run.play.renderer.stop_token_ids,
  )
  return np.array(list(found.values()))


def is_right(run: Run, state: Stored) -> bool:
  """Whether the running list has no error so far."""
  words = run.words(state.ids)
  return words == [str(x) for x in ledger.sums(run.problems[state.problem])][: len(words)]


def by_state(said: np.ndarray, right: np.ndarray, cut: np.ndarray) -> dict[str, Any]:
  """By length and rightness: how many, their mean value, and the share whose value is 0."""
  made = {}
  for length in CUTS:
    for name, which in (("right", right), ("wrong", ~right)):
      mine = said[(cut == length) & which]
      mine = mine[np.isfinite(mine)]
      if mine.size:
        made[f"{name} at {length}"] = {
          "count": int(mine.size),
          "mean": round(float(mine.mean()), 6),
          "zero": round(float((mine == 0).mean()), 6),
        }
  return made
