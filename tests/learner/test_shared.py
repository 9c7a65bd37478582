"""Two optimizers at one set of weights: each remembers its own gradients, both move the same."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.optim import adamw, set_rate, with_rate
from agentrl_jax.learner.shared import abstract_shared, make_shared, memories_of, turn_of
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import sft
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.learner.toy import random_batch, toy_model

MODEL = toy_model()
FAST = with_rate(lambda rate: adamw(rate, clip_norm=0.2), 1e-2)
SLOW = adamw(1e-3)


def lesson(seed):
  batch = random_batch(seed)
  return make_prepare(sft())(batch, Aux(old_logp=np.zeros(batch.tokens.shape, np.float32)))


def steps(mesh, *optimizers):
  return [make_step(MODEL, o, sft(), mesh, micro_rows=8) for o in optimizers]


def host(state):
  return jax.device_get(state)


def same(one, two):
  jax.tree.map(np.testing.assert_array_equal, host(one), host(two))


def test_turns_are_those_of_separate_states_whose_weights_are_handed_on():
  mesh = make_mesh(data=1)
  slow, fast = steps(mesh, SLOW, FAST)
  shared = make_shared(MODEL, (SLOW, FAST), mesh, seed=3)
  one, two = (make_state(MODEL, o, mesh, seed=3) for o in (SLOW, FAST))
  for seed, (step, index) in enumerate([(slow, 0), (fast, 1), (slow, 0), (fast, 1)]):
    batch = lesson(seed)
    shared, _ = turn_of(step, index)(shared, batch)
    mine = (one, two)[index]
    mine, _ = step(mine, batch)
    other = (one, two)[1 - index]
    handed = jax.tree.map(lambda x: x.copy(), mine.weights)
    other = dataclasses.replace(other, weights=handed)
    one, two = (mine, other) if index == 0 else (other, mine)
  same(shared.weights, one.weights)
  same(memories_of(shared), [one.opt_state, two.opt_state])
  assert int(shared.step) == 4


def test_the_rate_is_part_of_the_state():
  mesh = make_mesh(data=1)
  (step,) = steps(mesh, FAST)
  moved = []
  for rate in (1e-2, 5e-3):
    state = make_state(MODEL, FAST, mesh, seed=3)
    state = dataclasses.replace(state, opt_state=set_rate(state.opt_state, rate))
    before = host(state.weights)
    after, metrics = step(state, lesson(0))
    moved.append(jax.tree.map(np.subtract, host(after.weights), before))
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved[-1])))
    assert float(metrics["update_norm"].total) == pytest.approx(norm, rel=1e-4)
  # Differences of weights near 1: each is known to an ulp of those, 1.2e-7.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, atol=5e-7), *moved)
  fixed = make_state(MODEL, with_rate(lambda rate: adamw(rate, clip_norm=0.2), 1e-2), mesh, seed=3)
  plain = make_state(MODEL, adamw(1e-2, clip_norm=0.2), mesh, seed=3)
  (usual,) = steps(mesh, adamw(1e-2, clip_norm=0.2))
  same(step(fixed, lesson(1))[0].weights, usual(plain, lesson(1))[0].weights)


def test_another_optimizer_has_no_rate_to_set():
  state = optax.sgd(1.0).init({"w": np.zeros(2, np.float32)})
  with pytest.raises(ValueError, match="holds no learning rate, expected with_rate's"):
    set_rate(state, 0.1)


def test_one_optimizer_has_no_turns():
  state = make_state(MODEL, FAST, make_mesh(data=1), seed=3)
  with pytest.raises(ValueError, match="InjectStatefulHyperparamsState, expected a tuple"):
    memories_of(state)


def test_a_checkpoint_holds_both_memories(tmp_path):
  mesh = make_mesh(data=1)
  slow, fast = steps(mesh, SLOW, FAST)
  state = make_shared(MODEL, (SLOW, FAST), mesh, seed=3)
  state, _ = turn_of(slow, 0)(state, lesson(0))
  state = dataclasses.replace(
    state, opt_state=(state.opt_state[0], set_rate(state.opt_state[1], 2.5e-3))
  )
  state, _ = turn_of(fast, 1)(state, lesson(1))
  path = checkpoint.save(tmp_path, state, checkpoint.HostState(0, 2, {}))
  again, _ = checkpoint.restore(path, abstract_shared(MODEL, (SLOW, FAST), mesh))
  same(again, state)
  assert float(again.opt_state[1].hyperparams["learning_rate"]) == np.float32(2.5e-3)
