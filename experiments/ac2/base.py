"""The starting policy: a wrong rule to unlearn, and values, well formed, that mean nothing."""

import random
from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.envs import ledger
from agentrl_jax.orchestrate.experiment import Taskset
from agentrl_jax.orchestrate.supervised import EpisodeSource
from agentrl_jax.orchestrate.value_tokens import lesson
from agentrl_jax.rollout.environment import Message
from agentrl_jax.rollout.records import Episode, Task


def with_random_values(
  episodes: EpisodeSource, tasks: Taskset, *, count: int, seed: int
) -> EpisodeSource:
  """The episodes, and `count` questions for the value of a state, half of them with a reference,
  each answered by a value drawn uniformly.
  """

  def read(directory: Path) -> Sequence[Episode]:
    renderer = tasks.renderer(directory)
    chosen, _ = tasks.train.next(0, count)
    made = []
    for i, task in enumerate(chosen):
      asked, answer = random_value(task, random.Random(f"values/{seed}/{i}"))
      prompt = renderer.opening([Message("user", asked)], ())
      ids = renderer.write(Message("assistant", answer))
      made.append(lesson(f"value/{i}", task, prompt, ids, renderer.vocab_size))
    return [*episodes(directory), *made]

  return read


def random_value(task: Task, draw: random.Random) -> tuple[str, str]:
  """A question for the value of a state, and a value that has nothing to do with it."""
  said = ledger.misled(task)([])
  assert isinstance(said, Message)
  words = said.content.split()
  state = words[: draw.randint(0, len(words))]
  known = [str(x) for x in ledger.sums(task)] if draw.random() < 0.5 else []
  return ledger.value_question(task, state, known), draw.choice(ledger.VALUES)
