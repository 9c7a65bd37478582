"""Packing is a relabelling: every token of every scored episode exactly once, nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.orchestrate.pack import bucket, pack, unpack
from agentrl_jax.rollout.records import Kind, Outcome, Segment
from tests.reference.episodes import VOCAB, episode, groups


def share_prompt(rng, members):
  """The same episodes with one prompt for all, behind the examples that every group has."""
  examples = np.arange(1, 13, dtype=np.int32)
  prompt = Segment(Kind.PROMPT, np.concatenate([examples, rng.integers(1, VOCAB, 5, np.int32)]))

  def behind(piece):
    return dataclasses.replace(piece, segments=(prompt, *piece.segments[1:]))

  return [
    dataclasses.replace(one, samples=tuple(behind(piece) for piece in one.samples))
    for one in members
  ]


def test_buckets_are_the_powers_of_two_and_their_three_quarters():
  assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 25)] == [
    1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 32,
  ]  # fmt: skip


def stream(batch, label):
  """Tokens and positions of a sample, what it continues included, and where its own part lies."""
  row, column = np.nonzero(batch.sample == label)
  parent = batch.parent[row[0], column[0]]
  before = np.flatnonzero(batch.sample[row[0]] == parent) if parent != label else []
  whole = (row[0], np.array([*before, *column], int))
  return batch.tokens[whole], batch.position[whole], (row[0], column)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), micro_rows=st.integers(2, 5), row_length=st.integers(60, 120))
def test_shared_prompts_lose_nothing_and_take_less_room(seed, micro_rows, row_length):
  rng = np.random.default_rng(seed)
  made = [share_prompt(rng, members) for members in groups(rng)]
  sizes = dict(row_length=row_length, micro_rows=micro_rows, min_members=1)
  shared, apart = pack(made, **sizes, share_prompts=True), pack(made, **sizes)
  used = [int((p.batch.sample >= 0).sum()) for p in (shared, apart)]
  assert used[0] < used[1]
  batch = shared.batch
  labels = sorted({*batch.sample[batch.traj >= 0].tolist()})
  samples = [(one, piece) for one in shared.episodes for piece in one.samples]
  for label, (one, piece) in zip(labels, samples, strict=True):
    tokens, position, own = stream(batch, label)
    cut = one.truncated and piece is one.samples[-1]
    np.testing.assert_array_equal(tokens[: len(tokens) - cut], piece.ids)
    np.testing.assert_array_equal(position, np.arange(len(piece) + cut))
    assert batch.action[own].sum() == piece.column("action").sum()
  own = batch.parent == batch.sample
  assert not batch.action[own & (batch.traj < 0)].any(), "what is shared carries no loss"
  for a, b in zip(*(unpack(p.batch.behavior_logp, p) for p in (shared, apart)), strict=True):
    np.testing.assert_array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), micro_rows=st.integers(2, 5), row_length=st.integers(60, 120))
def test_every_token_of_every_scored_episode_is_in_the_batch_once(seed, micro_rows, row_length):
  made = groups(np.random.default_rng(seed))
  packed = pack(made, row_length=row_length, micro_rows=micro_rows, min_members=1)
  batch = packed.batch
  assert batch.tokens.shape[0] % micro_rows == 0
  assert packed.faults == sum(e.outcome is Outcome.FAULT for g in made for e in g)
  seen = 0
  for r, one in enumerate(packed.episodes):
    rows, columns = np.nonzero(batch.traj == r)
    assert len(set(rows // micro_rows)) == 1, "a trajectory stays in one micro-batch"
    sentinel = int(one.truncated)
    assert len(rows) == sum(map(len, one.samples)) + sentinel
    seen += len(rows)
    first_turn = int(np.flatnonzero(batch.turn_traj == r)[0])
    for piece, label in zip(one.samples, sorted(set(batch.sample[rows, columns])), strict=True):
      row, column = np.nonzero(batch.sample == label)
      assert len(set(row)) == 1
      assert (np.diff(column) == 1).all()
      here = np.s_[row[0], column[0] : column[0] + len(piece)]
      np.testing.assert_array_equal(batch.tokens[here], piece.ids)
      np.testing.assert_array_equal(batch.position[here], np.arange(len(piece)))
      np.testing.assert_array_equal(batch.action[here], piece.column("action"))
      np.testing.assert_array_equal(batch.behavior_logp[here], piece.column("logp"))
      np.testing.assert_array_equal(batch.behavior_version[here], piece.column("version"))
      turn = piece.column("turn")
      np.testing.assert_array_equal(batch.turn[here], np.where(turn >= 0, turn + first_turn, -1))
    np.testing.assert_allclose(
      batch.turn_reward[batch.turn_traj == r], np.float32(one.turn_rewards)
    )
    assert batch.traj_truncated[r] == one.truncated
  assert seen == (batch.sample >= 0).sum(), "nothing else is labelled"
  for values, one in zip(unpack(batch.behavior_logp, packed), packed.episodes, strict=True):
    expected = np.concatenate([s.logp for s in one.segments() if s.kind is Kind.ACTION])
    np.testing.assert_array_equal(values, expected)


def test_a_truncated_trajectory_has_one_sentinel_after_its_last_token():
  rng = np.random.default_rng(0)
  cut, whole = episode(rng, "0/0", [2], truncated=True), episode(rng, "0/1", [2])
  batch = pack([[cut, whole]], row_length=64, micro_rows=2).batch
  for r, (one, extra) in enumerate([(cut, 1), (whole, 0)]):
    here = batch.traj == r
    assert here.sum() == len(one.samples[0]) + extra
  last = np.flatnonzero(batch.traj[0] == 0)[-1]
  assert not batch.action[0, last]
  assert batch.turn[0, last] == -1
  assert batch.position[0, last] == len(cut.samples[0])


def test_groups_without_two_scored_members_are_dropped_and_faults_counted():
  rng = np.random.default_rng(0)
  lone = [episode(rng, "0/0", [1]), episode(rng, "0/1", [1], fault=True)]
  pair = [episode(rng, "1/0", [1]), episode(rng, "1/1", [1])]
  packed = pack([lone, pair], row_length=64, micro_rows=1)
  assert (packed.dropped_groups, packed.faults) == (1, 1)
  assert [e.trajectory_id for e in packed.episodes] == ["1/0", "1/1"]
  assert packed.batch.traj_group.tolist() == [0, 0]
  with pytest.raises(
    ValueError, match="nothing to train on: 1 groups, 1 of them with fewer than 2"
  ):
    pack([lone], row_length=64, micro_rows=1)


def test_an_episode_that_is_there_twice_is_two_trajectories():
  one = episode(np.random.default_rng(0), "0/0", [1, 2])
  packed = pack([[one], [one]], row_length=128, micro_rows=1, min_members=1, share_prompts=False)
  batch, tokens = packed.batch, sum(map(len, one.samples))
  assert [int((batch.traj == r).sum()) for r in (0, 1)] == [tokens, tokens]
  owners = [set(batch.sample[batch.traj == r].tolist()) for r in (0, 1)]
  assert not owners[0] & owners[1] and len(owners[0]) == len(one.samples)
  turns = len(one.turn_rewards)
  assert batch.turn_traj[: 2 * turns].tolist() == [0] * turns + [1] * turns


def test_an_episode_that_does_not_fit_is_named_with_the_numbers():
  rng = np.random.default_rng(0)
  members = [episode(rng, "0/0", [1], prompt=70), episode(rng, "0/1", [1])]
  expected = r"episode 0/0 has samples of \[7\d\] tokens; .* 2 rows of 64"
  with pytest.raises(ValueError, match=expected):
    pack([members], row_length=64, micro_rows=2)


def test_packing_does_not_depend_on_the_order_of_groups_beyond_labels():
  made = groups(np.random.default_rng(3))
  forward = pack(made, row_length=96, micro_rows=3, min_members=1)
  backward = pack(made[::-1], row_length=96, micro_rows=3, min_members=1)
  count = lambda p: sorted(p.batch.tokens[p.batch.action].tolist())  # noqa: E731
  assert count(forward) == count(backward)
  assert forward.batch.turn_reward.sum() == pytest.approx(backward.batch.turn_reward.sum())


def test_room_changes_the_shape_and_nothing_else():
  made = groups(np.random.default_rng(4))
  plain = pack(made, row_length=96, micro_rows=2, min_members=1)
  roomy = pack(made, row_length=96, micro_rows=2, min_members=1, least=(13, 90))
  assert roomy.batch.tokens.shape == (16, 96)  # 7 micro-batches, in a bucket of 8
  assert len(roomy.batch.turn_traj) == 96
  rows, turns = len(plain.batch.tokens), len(plain.batch.turn_traj)
  for name in ("tokens", "position", "sample", "traj", "turn", "action", "behavior_logp"):
    same, more = getattr(plain.batch, name), getattr(roomy.batch, name)
    np.testing.assert_array_equal(more[:rows], same)
    assert (more[rows:] == (-1 if name in ("sample", "traj", "turn") else 0)).all()
  np.testing.assert_array_equal(roomy.batch.turn_reward[:turns], plain.batch.turn_reward)
  assert (roomy.batch.turn_traj[turns:] == -1).all()
