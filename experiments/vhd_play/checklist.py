"""The control's reward: environment first, so what can be seen of an episode without its solution.

A third each for having probed, for having made valid calls only, and for having come to the end.
"""

import dataclasses
from collections.abc import Mapping

from agentrl_jax.orchestrate.experiment import Taskset
from agentrl_jax.rollout.environment import Action, Env, Opening, Step
from agentrl_jax.rollout.records import Task

PART = "checklist"


@dataclasses.dataclass
class Checked:
  """The same environment with one reward part more."""

  env: Env

  async def step(self, action: Action) -> Step:
    return _checked(await self.env.step(action))

  async def cut(self, reason: str) -> Step:
    return _checked(await self.env.cut(reason))

  async def close(self) -> None:
    await self.env.close()


def _checked(step: Step) -> Step:
  if not (step.terminated or step.truncated):
    return step
  return dataclasses.replace(step, reward={**step.reward, PART: share(step.info)})


def share(info: Mapping[str, float]) -> float:
  """Of the points of the list that an episode met, from the numbers its last step reports."""
  points = (info["probes"] > 0, info["invalid"] == 0, info["finished"] > 0)
  return sum(points) / len(points)


def checklist(tasks: Taskset) -> Taskset:
  """The same tasks, rewarded by the list alone."""

  async def build(task: Task) -> Opening:
    opening = await tasks.build(task)
    return dataclasses.replace(opening, env=Checked(opening.env))

  return dataclasses.replace(tasks, build=build, combine=lambda parts: parts.get(PART, 0.0))
