"""Malformed batches are refused with the values named; well-formed ones of every kind pass."""

import itertools

import numpy as np
import pytest

from agentrl_jax.losses.checks import check_batch, no_negative_return, some_group_of_two
from tests.reference import batches


def made(seed=1, **options):
  trajectories = batches.ragged(seed)
  layout = batches.place(trajectories, rows=12, length=40, pad=1)
  return batches.pack(trajectories, layout, **options).batch


@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_pass(seed):
  for gap in (1, 2):
    check_batch(made(seed, gap=gap))
    some_group_of_two(made(seed, gap=gap))
    no_negative_return(made(seed, gap=gap))


def first_action(batch):
  return tuple(np.argwhere(batch.action)[0])


def spans(batch):
  b, t = first_action(batch)
  own = batch.turn_traj[batch.turn[b, t]]
  other = next(k for k in range(len(batch.turn_traj)) if batch.turn_traj[k] not in (own, -1))
  batch.turn[b, t] = other


def decreases(batch):
  for row in range(len(batch.turn)):
    where = np.flatnonzero(batch.action[row])
    for i, j in itertools.pairwise(where):
      one, two = batch.turn[row, i], batch.turn[row, j]
      if one != two and batch.traj[row, i] == batch.traj[row, j]:
        batch.turn[row, i], batch.turn[row, j] = two, one
        return
  raise AssertionError("no trajectory of two turns")


def on_padding(name):
  def change(batch):
    b, t = np.argwhere(batch.traj < 0)[0]
    batch.action[b, t] = True
    if name != "sample":
      batch.sample[b, t] = 0
    if name == "turn":
      batch.traj[b, t] = 0

  return change


def with_reward(reward):
  def change(batch):
    batch.turn_reward[np.flatnonzero(batch.turn_traj >= 0)[1]] = reward

  change.__name__ = f"reward {reward}"
  return change


def silent_turn(batch):
  b, t = first_action(batch)
  k = batch.turn[b, t]
  batch.action[batch.turn == k] = False
  batch.turn_reward[k] = 0.5


def positive_logp(batch):
  batch.behavior_logp[first_action(batch)] = 0.5


def label_too_large(batch):
  b, t = first_action(batch)
  batch.traj[b, t] = 999


def no_sentinel(batch):
  r = next(r for r in np.flatnonzero(batch.traj_truncated))
  rows, columns = np.nonzero(batch.traj == r)
  last = np.lexsort((batch.position[rows, columns], batch.sample[rows, columns]))
  for i in last[::-1]:
    if batch.action[rows[i], columns[i]]:
      break
    batch.traj[rows[i], columns[i]] = -1


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (spans, r"turn \d+ spans trajectories \d+ and \d+, row \d+"),
    (decreases, r"turn \d+ follows turn \d+ in trajectory \d+"),
    (on_padding("sample"), r"action on padding: row \d+, position \d+ has sample -1"),
    (on_padding("traj"), r"action on padding: row \d+, position \d+ has traj -1"),
    (on_padding("turn"), r"action on padding: row \d+, position \d+ has turn -1"),
    (with_reward(np.nan), r"turn \d+ of trajectory \d+ has reward nan, expected at most 1e\+15"),
    (with_reward(-np.inf), r"turn \d+ of trajectory \d+ has reward -inf"),
    (with_reward(1e25), r"turn \d+ of trajectory \d+ has reward 1e\+25, expected at most 1e\+15"),
    (silent_turn, r"turn \d+ of trajectory \d+ has reward 0.5 and no action token"),
    (positive_logp, r"behavior log-prob at row \d+, position \d+ is 0.5, expected finite"),
    (label_too_large, r"traj at row \d+, position \d+ is 999, expected -1 to \d+"),
    (no_sentinel, r"trajectory \d+ is truncated and ends without a sentinel position"),
  ],
  ids=lambda x: getattr(x, "__name__", None),
)
def test_malformed_batches_are_refused(change, words):
  batch = made()
  change(batch)
  with pytest.raises(ValueError, match=words):
    check_batch(batch)


def test_unequal_lengths_are_refused():
  batch = made()
  with pytest.raises(ValueError, match=r"turn has shape \(12, 39\), tokens \(12, 40\)"):
    check_batch(batch.replace(turn=batch.turn[:, 1:]))
  with pytest.raises(ValueError, match=r"turn_reward has shape \(\d+,\), turn_traj \(\d+,\)"):
    check_batch(batch.replace(turn_reward=batch.turn_reward[1:]))
  with pytest.raises(ValueError, match=r"tokens have shape \(40,\), expected \[B, T\]"):
    check_batch(batch.replace(tokens=batch.tokens[0]))


def test_a_group_baseline_needs_two_of_a_group():
  lone = batches.lay_out([batches.by_hand([0], [1.0], group=g) for g in range(3)]).batch
  with pytest.raises(ValueError, match="group 0 and the 2 others have 1"):
    some_group_of_two(lone)


def test_maximum_likelihood_refuses_negative_returns():
  batch = batches.lay_out([batches.by_hand([0, 1], [0.5, -0.75])]).batch
  with pytest.raises(ValueError, match=r"trajectory 0 has return -0.25, expected at least 0"):
    no_negative_return(batch)
