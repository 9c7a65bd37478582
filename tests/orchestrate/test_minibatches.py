"""Updates on parts of a step: every token once, weights that add up, the same shares by seed."""

import numpy as np
import pytest

from agentrl_jax.orchestrate.minibatches import minibatches
from agentrl_jax.types import Aux, Credit, LossBatch

ROWS, MICRO, LENGTH = 12, 2, 5


def batch(values: bool):
  rng = np.random.default_rng(0)
  weight = rng.random((ROWS, LENGTH)).astype(np.float32)
  weight[6:8] = 0.0  # micro-batch 3 has nothing to do
  weight /= weight.sum()
  critic = weight[:, ::-1].copy() if values else None
  return LossBatch(None, Aux(weight), Credit(weight, critic, critic), weight)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_micro_batch_is_in_one_part_with_count_times_its_weight(count, values):
  whole = batch(values)
  parts = list(minibatches(whole, count, MICRO, (7, 1)))
  assert len(parts) == count
  held = np.array([(p.weight.reshape(-1, MICRO, LENGTH) != 0).any((1, 2)) for p in parts])
  assert held.sum(0).tolist() == [1, 1, 1, 0, 1, 1]
  assert held.sum(1).max() - held.sum(1).min() <= 1
  np.testing.assert_allclose(sum(p.weight for p in parts), count * whole.weight, rtol=1e-6)
  if values:
    total = sum(p.credit.value_weight for p in parts)
    np.testing.assert_allclose(total, count * whole.credit.value_weight, rtol=1e-6)
    for part in parts:
      assert ((part.weight != 0).any(1) == (part.credit.value_weight != 0).any(1)).all()


def test_shares_follow_the_seed():
  def shares(*seed):
    return [p.weight.tobytes() for p in minibatches(batch(False), 3, MICRO, seed)]

  assert shares(7, 1) == shares(7, 1) != shares(7, 2)


def test_one_part_is_the_batch_itself_and_there_are_no_empty_ones():
  whole = batch(False)
  assert next(iter(minibatches(whole, 1, MICRO, (0,)))) is whole
  assert len(list(minibatches(whole, 8, MICRO, (0,)))) == 5


def test_the_credit_is_of_the_whole_batch():
  whole = batch(True)
  for part in minibatches(whole, 2, MICRO, (0,)):
    assert part.credit.advantage is whole.credit.advantage
    assert part.credit.value_target is whole.credit.value_target
