"""Going back to a turn: a policy whose only error is at turn j succeeds from there on only."""

import asyncio
import dataclasses

import numpy as np
import pytest

from agentrl_jax.envs import turn_chain
from agentrl_jax.rollout.engine import Generation
from agentrl_jax.rollout.episode import Limits, Play
from agentrl_jax.rollout.records import Kind, Outcome
from agentrl_jax.rollout.resume import resume_episode
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.rollout.symbols import SymbolRenderer

RENDERER = SymbolRenderer(
  turn_chain.SYMBOLS,
  end=turn_chain.END,
  read=turn_chain.read_words,
  write=turn_chain.write_words,
)
TASK = turn_chain.make_task("train", 0, family="search")  # four hops: turns 0 to 4
ERROR = 2


@dataclasses.dataclass
class Player:
  """An engine that plays the oracle's way from whatever prompt it gets; it counts its calls."""

  log_prob: float = -0.5
  calls: int = 0
  name: str = "player"

  async def generate(self, request_id, prompt, params):
    self.calls += 1
    words = [turn_chain.SYMBOLS[i] for i in prompt]
    turn = sum(word.startswith("#") for word in words)
    at = words[-1] if turn else words[1]
    verb = "ANS" if turn == TASK.params["hops"] else "GET"
    ids = np.array([turn_chain.SYMBOLS.index(w) for w in (f"#{turn}", verb, at, turn_chain.END)])
    n = len(ids)
    return Generation(ids, np.full(n, self.log_prob, np.float32), np.full(n, 7, np.int32), "stop")


def play(engine):
  limits = Limits(turn_tokens=6, context_tokens=64)
  return Play(turn_chain.build, engine, RENDERER, limits, turn_chain.combine)


def stumbling(task):
  """The oracle, but at turn ERROR it reads another key."""
  right = turn_chain.oracle(task)

  def act(messages):
    action = right(messages)
    turn = sum(m.role == "assistant" for m in messages)
    if turn != ERROR:
      return action
    (call,) = action
    arguments = {"turn": turn, "key": (call.arguments["key"] + 1) % 16}
    return (dataclasses.replace(call, arguments=arguments),)

  return act


@pytest.fixture(scope="module")
def failed():
  episode = asyncio.run(
    demonstrate(play(None), TASK, stumbling(TASK), trajectory_id="t", group_id="g")
  )
  assert episode.outcome is Outcome.FAILURE and len(episode.turn_rewards) == 5
  return episode


def resume(episode, turn, engine=None):
  return asyncio.run(
    resume_episode(play(engine or Player()), episode, turn, trajectory_id=f"r{turn}", seed=0)
  )


@pytest.mark.parametrize("turn", range(5))
def test_a_retry_helps_up_to_the_turn_that_went_wrong(failed, turn):
  engine = Player()
  again = resume(failed, turn, engine)
  assert again.outcome is (Outcome.SUCCESS if turn <= ERROR else Outcome.FAILURE)
  assert engine.calls == 5 - turn
  old = [s for s in failed.segments() if s.kind is Kind.ACTION]
  new = [s for s in again.segments() if s.kind is Kind.ACTION]
  for k in range(5):
    if k < turn:  # kept, with the record's log-probs and versions
      assert new[k].ids.tolist() == old[k].ids.tolist()
      assert set(new[k].version) == {-1} and set(new[k].logp) == {0.0}
    else:
      assert set(new[k].version) == {7}


def test_what_an_environment_answers_differently_is_a_fault(failed):
  other = dataclasses.replace(failed, task=turn_chain.make_task("train", 3, family="search"))
  again = resume(other, 3)
  assert again.outcome is Outcome.FAULT and again.fault.kind == "replay"


def test_turns_that_do_not_exist_are_refused(failed):
  for turn in (-1, 5):
    with pytest.raises(ValueError, match=f"episode t: turn {turn}, expected one of 5"):
      resume(failed, turn)
  forked = dataclasses.replace(
    failed, samples=(*failed.samples, dataclasses.replace(failed.samples[0], segments=()))
  )
  with pytest.raises(ValueError, match="2 samples: expected one"):
    resume(forked, 0)
