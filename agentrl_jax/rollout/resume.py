"""Playing a recorded episode again from one of its turns: what came before is replayed, not drawn.

The environment is built anew and given the recorded actions; it must answer as it did. That holds
for environments that are deterministic in their task.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentrl_jax.rollout.engine import Engine, Generation, SamplingParams
from agentrl_jax.rollout.environment import EnvFault
from agentrl_jax.rollout.episode import Play, run_episode
from agentrl_jax.rollout.records import Episode, Kind, Segment


async def resume_episode(
  play: Play, episode: Episode, turn: int, *, trajectory_id: str, seed: int
) -> Episode:
  """A new episode with the recorded turns before `turn`, and turns of `play.engine` from there on.

  Kept turns have their recorded log-probs and versions; turns of equal (`seed`, `trajectory_id`)
  are drawn alike, so give every try a trajectory id of its own. Faults with kind "replay" where the
  environment does not answer as recorded.

  Raises:
    ValueError: the episode has no such turn, or was forked (its context was edited).
    EngineDead: as `run_episode`.
  """
  if len(episode.samples) != 1:
    name = episode.trajectory_id
    raise ValueError(f"episode {name} has {len(episode.samples)} samples: expected one")
  segments = episode.samples[0].segments
  recorded = [s for s in segments if s.kind is Kind.ACTION]
  if not 0 <= turn < len(recorded):
    raise ValueError(
      f"episode {episode.trajectory_id}: turn {turn}, expected one of {len(recorded)}"
    )
  stops = frozenset(play.renderer.stop_token_ids)
  engine = _Replay(play.engine, episode.samples[0].ids, recorded[:turn], stops)
  return await run_episode(
    dataclasses.replace(play, engine=engine),
    episode.task,
    trajectory_id=trajectory_id,
    group_id=episode.trajectory_id,
    seed=seed,
  )


@dataclasses.dataclass
class _Replay:
  """An engine that says what was recorded, then what `engine` samples."""

  engine: Engine
  stream: np.ndarray  # int32, the recorded episode's
  turns: Sequence[Segment]
  stops: frozenset[int]
  name: str = "replay"
  said: int = 0

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation:
    # The prompt of the first new turn is checked as well: it holds the answer to the last old one.
    if self.said <= len(self.turns) and not np.array_equal(prompt, self.stream[: len(prompt)]):
      raise EnvFault("replay", f"turn {self.said} has another prompt than was recorded")
    self.said += 1
    if self.said > len(self.turns):
      return await self.engine.generate(request_id, prompt, params)
    turn = self.turns[self.said - 1]
    assert turn.logp is not None and turn.version is not None
    finish = "stop" if int(turn.ids[-1]) in self.stops else "length"
    return Generation(turn.ids, turn.logp, turn.version, finish)

  async def version(self) -> int:
    return await self.engine.version()

  async def healthy(self) -> bool:
    return await self.engine.healthy()

  async def abort(self, request_id: str) -> None:
    await self.engine.abort(request_id)

  async def close(self) -> None:
    """Nothing: the engine is its owner's."""
