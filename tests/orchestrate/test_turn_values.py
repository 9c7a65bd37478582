"""Values of recorded episodes: each token's own, and the sentinel's after a truncated one."""

import numpy as np
import pytest

from agentrl_jax.orchestrate.turn_values import episode_values
from agentrl_jax.rollout.records import Kind
from agentrl_jax.types import PolicyEval
from tests.reference.episodes import episode


def by_place(weights, batch, critic):
  """A critic whose value says where it was read: the sample's position, and the token there."""
  del weights, critic
  value = batch.position + batch.tokens / 100
  return PolicyEval(logp=value, entropy=value, value=value)


def test_values_turns_and_bootstraps_are_those_of_the_episode():
  rng = np.random.default_rng(0)
  made = [
    episode(rng, f"{i}/0", turns, truncated=truncated)
    for i, (turns, truncated) in enumerate([([3], False), ([1], True), ([2, 1], True)])
  ]
  found = episode_values(by_place, None, None, made, row_length=64, micro_rows=2)
  for one, (value, turn, boot) in zip(made, found, strict=True):
    values, turns = [], []
    for sample in one.samples:
      at = 0
      for part in sample.segments:
        if part.kind is Kind.ACTION:
          values += [at + i + token / 100 for i, token in enumerate(part.ids)]
          turns += [part.turn] * len(part.ids)
        at += len(part.ids)
    np.testing.assert_allclose(value, values)
    assert turn.tolist() == turns
    # The sentinel repeats the last token, one position on.
    last = one.samples[-1]
    expected = len(last) + last.ids[-1] / 100 if one.truncated else 0.0
    assert boot == pytest.approx(expected)


def test_episodes_without_a_score_are_refused():
  rng = np.random.default_rng(0)
  made = [episode(rng, "0/0", [1]), episode(rng, "1/0", [1], fault=True)]
  with pytest.raises(ValueError, match="1 of 2 episodes have a scored turn"):
    episode_values(by_place, None, None, made, row_length=64, micro_rows=2)
