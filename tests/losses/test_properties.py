"""The property table of CONVENTIONS, run for every member of every slot and every recipe.

All layouts of a seed have one shape, so an algorithm compiles once however many properties it has.
"""

import collections
import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.types import LossBatch
from tests.losses.members import ALL, UNNORMALISED
from tests.reference import batches

ROWS, LENGTH = 24, 40
# Compiling for eight devices is slow; between them these hold every kind of scan, sort and sum.
SHARDED = ("grpo-kl", "reinforce_pp", "gspo", "minirl", "ppo", "turn_ppo", "gigpo", "mpo", "ac2")
TRACES = collections.Counter()
QUICK = {"xla_backend_optimization_level": 0}  # compiles faster; nothing here is about speed


@functools.cache
def preparing(advantage, weight):
  """Compiled once for all algorithms that share both slots."""

  def prepare(batch, aux):
    TRACES[advantage, weight] += 1
    credit = advantage(batch, aux)
    return LossBatch(batch, aux, credit, weight(batch, aux, credit))

  return prepare


@functools.cache
def differentiating(loss):
  def differentiate(policy, batch):
    TRACES[loss] += 1
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(policy, batch)
    return value, metrics, gradient

  return differentiate


@functools.cache
def quick(function):
  return jax.jit(function, compiler_options=QUICK)


def prepare(name, batch, aux):
  return quick(preparing(ALL[name].advantage, ALL[name].weight))(batch, aux)


def run(name, made, prepared=None):
  prepared = prepare(name, made.batch, made.aux) if prepared is None else prepared
  return jax.device_get(
    quick(differentiating(ALL[name].loss))(made.policy, prepared)
  ), jax.device_get(prepared)


@functools.cache
def trajectories():
  return batches.ragged(7)


@functools.cache
def base():
  made = trajectories()
  return batches.pack(made, batches.one_a_row(made, rows=ROWS, length=LENGTH))


@functools.cache
def expected(name):
  return run(name, base())


def per_action(tree, layout, which):
  """Each leaf's numbers at action tokens, trajectory by trajectory: comparable across layouts."""

  def read(x):
    return np.array([v for r in which for v in layout.actions(x, r, trajectories()[r])])

  return jax.tree.map(read, tree)


def assert_same(name, made, *, atol=1e-6, which=None):
  """The loss, gradient and prepared arrays equal the base layout's, at trajectories `which`."""
  which = which or range(len(trajectories()))
  (value, metrics, gradient), prepared = run(name, made)
  (value0, metrics0, gradient0), prepared0 = expected(name)
  np.testing.assert_allclose(value, value0, atol=atol)
  for key in metrics0:
    np.testing.assert_allclose(metrics[key], metrics0[key], rtol=1e-5, atol=1e-5, err_msg=key)
  for ours, theirs in [(gradient, gradient0), (prepared.weight, prepared0.weight),
                       (prepared.credit.advantage, prepared0.credit.advantage)]:  # fmt: skip
    ours, theirs = (
      per_action(x, layout, which) for x, layout in [(ours, made.layout), (theirs, base().layout)]
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), ours, theirs)
  return gradient


members = pytest.mark.parametrize("name", list(ALL))


@members
def test_gradient_is_not_zero_and_finite(name):
  (value, _, gradient), prepared = expected(name)
  assert np.isfinite(value)
  moved = sum(np.abs(g).sum() for g in jax.tree.leaves(gradient))
  assert 1e-3 < moved < 1e3
  assert np.abs(prepared.credit.advantage).sum() > 0.1


@members
@pytest.mark.parametrize("poison", [1e4, np.inf, np.nan])
def test_what_is_masked_is_never_read(name, poison):
  made = trajectories()
  layout = batches.one_a_row(made, rows=ROWS, length=LENGTH)
  with jax.debug_nans(False):  # the inputs hold NaN; the outputs are checked below
    gradient = assert_same(name, batches.pack(made, layout, poison=poison), atol=0)
  for g in jax.tree.leaves(gradient):
    assert (g[~base().batch.action] == 0).all()


LAYOUTS = {
  "several a row": lambda t: batches.place(t, rows=ROWS, length=LENGTH),
  "permuted": lambda t: batches.place(
    t, rows=ROWS, length=LENGTH, order=np.random.default_rng(0).permutation(len(t)).tolist()
  ),
  "gaps between samples": lambda t: batches.place(t, rows=ROWS, length=LENGTH, pad=3),
  "left padding": lambda t: batches.one_a_row(t, rows=ROWS, length=LENGTH, reverse=True),
}


@members
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layout_changes_nothing(name, layout):
  made = trajectories()
  assert_same(name, batches.pack(made, LAYOUTS[layout](made)))


@members
def test_ids_are_only_names(name):
  made = trajectories()
  order = np.random.default_rng(1).permutation(len(made)).tolist()
  assert_same(name, batches.pack(made, base().layout, order=order, gap=2))


@members
def test_micro_batches_add_to_the_whole(name):
  (value, metrics, gradient), prepared = expected(name)
  rows = {key: row for key, (row, _) in base().layout.places.items()}
  total = None
  for part in batches.split(trajectories(), 4):
    mine = np.isin(np.arange(ROWS), [row for (r, _), row in rows.items() if r in part])
    blank = lambda x, fill: np.where(mine[:, None], x, fill)  # noqa: E731, B023
    traj = prepared.traj.replace(
      action=blank(prepared.traj.action, False),
      **{k: blank(getattr(prepared.traj, k), -1) for k in ("sample", "traj", "turn")},
    )
    micro = prepared.replace(traj=traj, weight=blank(prepared.weight, np.float32(0)))
    (one, _) = run(name, base(), micro)
    total = one if total is None else jax.tree.map(np.add, total, one)
  np.testing.assert_allclose(total[0], value, atol=1e-6)
  for key in metrics:
    np.testing.assert_allclose(total[1][key], metrics[key], rtol=1e-4, atol=1e-5, err_msg=key)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), total[2], gradient)


@members
def test_without_jit_it_is_the_same(name):
  prepared = preparing(ALL[name].advantage, ALL[name].weight)(base().batch, base().aux)
  value, _, gradient = differentiating(ALL[name].loss)(base().policy, prepared)
  np.testing.assert_allclose(value, expected(name)[0][0], atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, expected(name)[0][2]
  )


@members
@pytest.mark.parametrize("shift", [50.0, -50.0])
def test_far_off_policy_is_finite(name, shift):
  made = base()
  aux = made.aux.replace(old_logp=np.where(made.batch.action, made.aux.old_logp - shift, 0.0))
  value, metrics, gradient = run(name, made, prepare(name, made.batch, aux))[0]
  for x in jax.tree.leaves((value, metrics, gradient)):
    assert np.isfinite(x).all()


@members
def test_weights_sum_to_one(name):
  weight = expected(name)[1].weight
  assert (weight >= 0).all()
  assert (weight[~base().batch.action] == 0).all()
  if name not in UNNORMALISED:
    np.testing.assert_allclose(weight.sum(), 1.0, atol=1e-6)


@members
def test_a_faulted_trajectory_might_as_well_be_absent(name):
  made = trajectories()
  layout = batches.one_a_row(made, rows=ROWS, length=LENGTH)
  which = [r for r, one in enumerate(made) if one.group >= 0]
  assert len(which) < len(made)
  present = {key: at for key, at in layout.places.items() if key[0] in which}
  without = batches.pack(made, batches.Layout(present, layout.shape), order=which)
  assert_same(name, without, atol=1e-7, which=which)


@members
def test_nothing_to_learn_from_is_zero(name):
  made = base()
  empty = made.batch.replace(action=np.zeros_like(made.batch.action))
  value, _, gradient = run(name, made, prepare(name, empty, made.aux))[0]
  assert value == 0
  assert all((g == 0).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", [f"recipe-{name}" for name in SHARDED])
def test_eight_devices_equal_one(name):
  mesh = Mesh(np.array(jax.devices()), ("data",))
  rows = NamedSharding(mesh, PartitionSpec("data"))
  everywhere = NamedSharding(mesh, PartitionSpec())
  put = lambda x: jax.device_put(x, rows if x.ndim == 2 else everywhere)  # noqa: E731
  batch, aux, policy = jax.tree.map(put, (base().batch, base().aux, base().policy))
  value, _, gradient = run(name, batches.Made(batch, aux, policy, base().layout))[0]
  np.testing.assert_allclose(value, expected(name)[0][0], atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, expected(name)[0][2]
  )


@members
def test_other_data_is_not_traced_again(name):
  expected(name)
  slots = ALL[name]
  before = TRACES.copy()
  run(name, batches.pack(trajectories(), LAYOUTS["permuted"](trajectories())))
  assert before == TRACES and TRACES[slots.loss] and TRACES[slots.advantage, slots.weight]


def test_the_batch_is_as_ragged_as_it_should_be():
  made = trajectories()
  sizes = [sum(t.group == g for t in made) for g in range(4)]
  assert min(sizes) == 1 and len(set(sizes)) > 1
  assert any(t.group < 0 for t in made) and any(t.truncated for t in made)
  assert any(not t.rewards for t in made) and any(len(t.streams) > 1 for t in made)
  runs = [k for t in made for s in t.streams for k in s.turn]
  assert any(a >= 0 and b >= 0 and a != b for a, b in itertools.pairwise(runs))
  assert base().batch.action.sum() > 60
