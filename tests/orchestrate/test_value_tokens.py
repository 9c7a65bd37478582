"""Values in words: greedy answers read strictly, and lessons that train the answer alone."""

import asyncio
import math

import numpy as np
import pytest

from agentrl_jax.envs import ledger
from agentrl_jax.losses.advantages import imitation
from agentrl_jax.losses.weights import nested_mean
from agentrl_jax.ops.scales import GROUP, TRAJ
from agentrl_jax.orchestrate.pack import pack
from agentrl_jax.orchestrate.value_tokens import lesson, stated_values
from agentrl_jax.rollout.engine import EngineError, Generation
from agentrl_jax.rollout.records import Task
from agentrl_jax.types import Aux

TASK = Task("ledger", "train", 0, {})
END, THREE, SEVEN = (ledger.SYMBOLS.index(word) for word in (ledger.END, "v3", "v7"))


class Answers:
  """An engine that answers each prompt by its first id."""

  name = "answers"

  def __init__(self, answers):
    self.answers, self.asked = answers, []

  async def generate(self, request_id, prompt, params):
    self.asked.append((request_id, prompt, params))
    found = self.answers[prompt[0]]
    if found is None:
      raise EngineError("engine answers: no")
    ids, finish = np.array(found, np.int32), "stop" if found[-1] == END else "length"
    n = len(ids)
    return Generation(ids, np.zeros(n, np.float32), np.zeros(n, np.int32), finish)


def read(ids):
  return ledger.read_value([ledger.SYMBOLS[i] for i in ids])


def ask(engine, *prompts):
  named = {f"q{i}": np.array(prompt, np.int32) for i, prompt in enumerate(prompts)}
  return asyncio.run(stated_values(engine, named, read, stop_token_ids=(END,)))


def test_only_a_value_and_its_end_is_a_value():
  engine = Answers({1: [THREE, END], 2: [END], 3: [THREE, SEVEN, END], 4: [THREE] * 4})
  found = ask(engine, [1, 9], [2], [3], [4])
  assert found["q0"] == 0.3
  assert all(math.isnan(found[name]) for name in ("q1", "q2", "q3"))
  assert engine.asked[0][:2] == ("q0", [1, 9])
  params = {p for _, _, p in engine.asked}
  (one,) = params
  assert (one.temperature, one.max_new_tokens, one.stop_token_ids) == (0.0, 4, (END,))


def test_an_engine_that_fails_is_not_a_value():
  with pytest.raises(EngineError, match="answers: no"):
    ask(Answers({1: None}), [1])


def test_a_lesson_trains_its_answer_only():
  """Two prompts of one pair have half the weight of a pair with one; prompts have none."""
  pair = [lesson(f"a/{k}", TASK, np.arange(5 + k), np.array([THREE, END]), 47) for k in (0, 3)]
  alone = [lesson("b", TASK, np.arange(6), np.array([SEVEN, END]), 47)]
  packed = pack([pair, alone], row_length=32, micro_rows=1, min_members=1)
  batch = packed.batch
  aux = Aux(old_logp=np.zeros(batch.tokens.shape, np.float32))
  credit = imitation()(batch, aux)
  weight = np.asarray(nested_mean(GROUP, TRAJ)(batch, aux, credit))
  assert sorted(batch.tokens[batch.action].tolist()) == sorted([THREE, END, THREE, END, SEVEN, END])
  assert (weight[~batch.action] == 0).all()
  for r, episode in enumerate(packed.episodes):
    expected = 1 / 2 / (2 if episode.trajectory_id.startswith("a") else 1) / 2
    mine = batch.action & (batch.traj == r)
    np.testing.assert_allclose(weight[mine], [expected] * 2, rtol=1e-6)
