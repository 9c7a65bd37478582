"""Replayed prefixes and the endpoint rule of AC2 (arXiv 2609.39247)."""

import collections
import itertools

import numpy as np
import pytest

from agentrl_jax.losses.replay import Replay, Stored, critic_scores


def stored(problem, length):
  return Stored(problem, tuple(range(length)))


def test_first_in_first_out():
  replay = Replay(capacity=3).push([stored(str(i), 1) for i in range(2)])
  replay = replay.push([stored(str(i), 1) for i in range(2, 5)])
  assert [one.problem for one in replay.stored] == ["2", "3", "4"]


def test_prefixes_cycle_over_problems_and_are_cut_on_the_grid():
  replay = Replay().push([stored("a", 100), stored("a", 40), stored("b", 55), stored("c", 9)])
  made = replay.prefixes(300, np.random.default_rng(0), grid=10)
  assert set(collections.Counter(one.problem for one in made).values()) == {100}
  assert [one.problem for one in made[:3]] == [one.problem for one in made[3:6]]
  lengths = collections.defaultdict(set)
  for one in made:
    lengths[one.problem].add(len(one.ids))
    assert one.ids == tuple(range(len(one.ids)))
  # At most 90 % of the length: 90 of 100 (or 30 of 40), 40 of 55, 0 of 9.
  assert lengths == {"a": set(range(0, 91, 10)), "b": set(range(0, 41, 10)), "c": {0}}


def test_the_key_decides_and_nothing_else():
  replay = Replay().push([stored(p, 50) for p in "abc"])
  one, two = (replay.prefixes(7, np.random.default_rng(3), grid=10) for _ in range(2))
  assert one == two
  assert Replay().prefixes(7, np.random.default_rng(3)) == []


@pytest.mark.parametrize("state", list(itertools.product([False, True], repeat=4)))
def test_endpoint_rule(state):
  """The critic only where the chunk is full, budget is left, nothing is finished or answered."""
  reached, out, finished, answered = state
  arguments = dict(reached_chunk=reached, out_of_budget=out, finished=finished, answered=answered)
  if state[:3] == (False, False, False):
    with pytest.raises(ValueError, match="stopped before its chunk, its budget and its own end"):
      critic_scores(**arguments)
  else:
    assert critic_scores(**arguments) == (state == (True, False, False, False))
