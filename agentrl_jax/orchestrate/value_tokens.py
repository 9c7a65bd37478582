"""A critic that is the policy itself: asked in words, it states a value in a few greedy tokens.

What it should have said is a supervised lesson of one turn, packed like any episode.
"""

import asyncio
import math
from collections.abc import Callable, Mapping

import numpy as np

from agentrl_jax.rollout.chat import Ids
from agentrl_jax.rollout.engine import Engine, SamplingParams
from agentrl_jax.rollout.records import Episode, Kind, Outcome, Sample, Segment, Task


async def stated_values(
  engine: Engine,
  questions: Mapping[str, Ids],
  read: Callable[[Ids], float],
  *,
  stop_token_ids: tuple[int, ...],
  most_tokens: int = 4,
) -> dict[str, float]:
  """The engine's greedy answers, by the name of the question; NaN where one is no value.

  Args:
    engine: serves the weights that are asked.
    questions: prompts by a name, which is its request id.
    read: an answer's ids, without its stop token, to its value or NaN.
    stop_token_ids: an answer that ends with none of them within `most_tokens` is no value.
    most_tokens: of an answer, the stop token among them.

  Raises:
    EngineError: a call failed.
  """
  params = SamplingParams(most_tokens, stop_token_ids, temperature=0.0)

  async def ask(name: str, prompt: Ids) -> float:
    answer = await engine.generate(name, prompt.tolist(), params)
    return read(answer.ids[:-1]) if answer.finish == "stop" else math.nan

  found = await asyncio.gather(*(ask(name, prompt) for name, prompt in questions.items()))
  return dict(zip(questions, found, strict=True))


def lesson(name: str, task: Task, prompt: Ids, answer: Ids, vocab_size: int) -> Episode:
  """The episode in which `prompt` is answered by `answer`, for supervised training.

  As of a script: log-probs are 0, and no weights wrote it (version -1).
  """
  count = len(answer)
  certain, nobody = np.zeros(count, np.float32), np.full(count, -1, np.int32)
  segments = (
    Segment(Kind.PROMPT, np.asarray(prompt, np.int32)),
    Segment(Kind.ACTION, np.asarray(answer, np.int32), 0, certain, nobody),
  )
  return Episode(
    task=task,
    trajectory_id=name,
    group_id=name,
    samples=(Sample(segments, vocab_size, name),),
    reward_parts=({},),
    turn_rewards=(0.0,),
    outcome=Outcome.SUCCESS,
    terminated=True,
    truncated=False,
    info={"finished": 1.0},
  )
