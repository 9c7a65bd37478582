"""Episodes of a scripted policy, as the records that training reads: demonstrations for supervised
training.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from agentrl_jax.rollout.chat import Renderer
from agentrl_jax.rollout.engine import Generation, SamplingParams
from agentrl_jax.rollout.environment import Action, Env, Malformed, Message, Opening, Step
from agentrl_jax.rollout.episode import Play, run_episode
from agentrl_jax.rollout.records import Episode, Task

Policy = Callable[[Sequence[Message]], Action]


async def demonstrate(
  play: Play, task: Task, policy: Policy, *, trajectory_id: str, group_id: str
) -> Episode:
  """One episode of `policy`, a function from all messages so far to the next action.

  `play.engine` is not used. Actions are encoded by the renderer; their log-prob is 0 (a script is
  certain) and their version -1 (no weights wrote them).
  """
  heard: list[Message] = []

  async def build(task: Task) -> Opening:
    opening = await play.build(task)
    heard.extend(opening.messages)
    return dataclasses.replace(opening, env=_Overheard(opening.env, heard))

  engine = _Script(policy, heard, play.renderer)
  scripted = dataclasses.replace(play, build=build, engine=engine)
  return await run_episode(scripted, task, trajectory_id=trajectory_id, group_id=group_id, seed=0)


@dataclasses.dataclass
class _Overheard:
  """An environment whose observations are also kept in `heard`."""

  env: Env
  heard: list[Message]

  async def step(self, action: Action) -> Step:
    step = await self.env.step(action)
    self.heard.extend(step.observation)
    return step

  async def cut(self, reason: str) -> Step:
    return await self.env.cut(reason)

  async def close(self) -> None:
    await self.env.close()


@dataclasses.dataclass
class _Script:
  """An engine that writes what a policy decides."""

  policy: Policy
  heard: list[Message]
  renderer: Renderer
  name: str = "script"

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation:
    del request_id, prompt
    action = self.policy(tuple(self.heard))
    self.heard.append(_said(action))
    written = self.renderer.write(action)
    ids = written[: params.max_new_tokens]
    return Generation(
      ids=ids,
      logp=np.zeros(len(ids), np.float32),
      version=np.full(len(ids), -1, np.int32),
      finish="stop" if len(ids) == len(written) else "length",
    )

  async def version(self) -> int:
    return -1

  async def healthy(self) -> bool:
    return True

  async def abort(self, request_id: str) -> None:
    del request_id

  async def close(self) -> None:
    return None


def _said(action: Action) -> Message:
  match action:
    case Message():
      return action
    case Malformed():
      return Message("assistant", action.text)
    case calls:
      return Message("assistant", "", tuple(calls))
