"""The layer: grouped matmul and the work it does, routers, experts, losses, placement on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import grouped, layers, moe
from agentrl_jax.models.sharding import BATCH, make_mesh
from agentrl_jax.ops import routing
from tests.models.test_dense import assert_same_sums
from tests.reference import moe as loops

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
EMBED, WIDTH, EXPERTS = 8, 6, 6
ROUTERS = {
  "softmax": moe.Softmax(2, normalized=False),
  "softmax_normalized": moe.Softmax(3, normalized=True),
  "sigmoid": moe.Sigmoid(2, normalized=True, groups=1, groups_kept=1, scale=1.0),
  "sigmoid_groups": moe.Sigmoid(3, normalized=False, groups=3, groups_kept=2, scale=2.5),
}


def normal(seed, *shape, scale=1.0):
  return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


def weights_of(router, shared=False):
  def gated(seed, width, *leading):
    shapes = (EMBED, width), (EMBED, width), (width, EMBED)
    return [normal(seed + i, *leading, *shape, scale=0.4) for i, shape in enumerate(shapes)]

  return moe.MoE(
    router=normal(9, EMBED, EXPERTS, scale=0.4),
    correction=normal(8, EXPERTS, scale=0.1) if isinstance(router, moe.Sigmoid) else None,
    experts=moe.Experts(*gated(0, WIDTH, EXPERTS)),
    shared=layers.MLP(*gated(5, 4)) if shared else None,
  )


def batch(seed=20, rows=2, length=9):
  """(x, which positions are real): the second row ends in padding."""
  real = np.ones((rows, length), bool)
  real[1, 6:] = False
  return normal(seed, rows, length, EMBED), real


def run(router, weights, x, real, replay=None, compute=moe.compute_experts):
  return moe.moe(router, weights, x, real, replay, compute=compute, matmul=layers.matmul)


def chosen(router, weights, x):
  """{expert: weight} of one token, by the loops."""
  logits = x.astype(np.float64) @ weights.router
  if isinstance(router, moe.Softmax):
    return loops.route_softmax(logits, router.experts_per_token, router.normalized)
  return loops.route_sigmoid(
    logits,
    weights.correction,
    router.experts_per_token,
    router.normalized,
    router.groups,
    router.groups_kept,
    router.scale,
  )


SIZES = [[3, 0, 21, 1, 9], [0, 0, 0, 0, 0], [0, 40, 0, 0, 0], [8, 8, 8, 8, 8]]


@jax.jit
def product_and_gradients(x, weight, sizes, cotangent):
  made, pullback = jax.vjp(lambda x, w: grouped.grouped_matmul(x, w, sizes), x, weight)
  return made, *pullback(cotangent)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_matmul_and_gradients(sizes):
  """40 rows, of which those past the last group are not multiplied."""
  x, weight, cotangent = normal(1, 40, 5), normal(2, 5, 5, 7), normal(3, 40, 7)
  counts = np.asarray(sizes, np.int32)
  made, x_grad, weight_grad = product_and_gradients(x, weight, counts, cotangent)
  np.testing.assert_allclose(made, loops.grouped_matmul(x, weight, sizes), **TOLERANCE)
  transposed = weight.transpose(0, 2, 1)
  expected = loops.grouped_matmul(cotangent, transposed, sizes)
  np.testing.assert_allclose(x_grad, expected, **TOLERANCE)
  group = np.repeat(np.arange(5), sizes)
  expected = np.zeros_like(weight)
  for row, g in enumerate(group):
    expected[g] += np.outer(x[row], cotangent[row])
  np.testing.assert_allclose(weight_grad, expected, **TOLERANCE)


def dots(text):
  """(inside a loop, multiply-adds) of each matmul in compiled HLO."""
  sizes = {}
  found = []
  for line in text.splitlines():
    if match := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]", line):
      sizes[match[1]] = [int(n) for n in match[2].split(",") if n]
    if match := re.search(
      r"= \w+\[([\d,]*)\]\S* dot\(%?([\w.-]+), .*lhs_contracting_dims={(\d)}", line
    ):
      out = np.prod([int(n) for n in match[1].split(",")])
      found.append(("/while/body" in line, int(out * sizes[match[2]][int(match[3])])))
  return found


def test_work_is_that_of_the_rows_there_are():
  """Every matmul of the compiled forward and backward passes lies in a loop over tiles, and tiles
  are few enough: at most 1.1 times the multiply-adds of each row with its own expert's matrix.
  """
  rows, groups, inputs, outputs = 4096, 8, 16, 24
  sizes = np.random.default_rng(0).multinomial(rows, np.ones(groups) / groups)
  x, weight = normal(1, rows, inputs), normal(2, groups, inputs, outputs)

  def loss(x, weight):
    made = grouped.grouped_matmul(x, weight, jnp.asarray(sizes, jnp.int32))
    return jnp.sum(jnp.square(made))

  compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile()
  block = grouped.block_rows(rows, groups)
  each = block * inputs * outputs
  assert dots(compiled.as_text()) == [(True, each)] * 3  # forward, gradients of rows and weights
  tiles = grouped.tiles(jnp.asarray(sizes, jnp.int32), rows, block)
  assert int(tiles.count) == sum(-(-size // block) for size in sizes)
  assert rows * inputs * outputs <= int(tiles.count) * each <= 1.1 * rows * inputs * outputs


@pytest.mark.parametrize("name", ROUTERS)
def test_layer_equals_loops(name):
  """Experts, weights, sums and losses, token by token; padding goes nowhere and counts nowhere."""
  router = ROUTERS[name]
  weights, (x, real) = weights_of(router, shared=name == "sigmoid"), batch()
  mixed, (sums, expert) = jax.jit(lambda w, x: run(router, w, x, real))(weights, x)
  expert, logits, sets = np.asarray(expert), [], []
  for row, position in np.ndindex(*real.shape):
    token = x[row, position].astype(np.float64)
    expected = np.zeros(EMBED)
    if real[row, position]:
      routed = chosen(router, weights, token)
      expected = loops.mix(token, routed, *jax.tree.leaves(weights.experts))
      assert set(expert[row, position]) == set(routed)
      logits.append(token @ weights.router)
      sets.append(set(routed))
    else:
      assert set(expert[row, position]) == {moe.NOWHERE}
    if weights.shared is not None:
      shared = [value[None].astype(np.float64) for value in vars(weights.shared).values()]
      expected = expected + loops.mix(token, {0: 1.0}, *shared)
    np.testing.assert_allclose(mixed[row, position], expected, **TOLERANCE)
  assert float(sums.tokens) == len(sets)
  np.testing.assert_array_equal(sums.assigned, [sum(e in s for s in sets) for e in range(EXPERTS)])
  if isinstance(router, moe.Softmax):
    balance, z = loops.router_losses(np.array(logits), sets)
    layer = jax.tree.map(lambda a: a[None], sums)
    np.testing.assert_allclose(routing.load_balance_loss(layer, layer), balance, **TOLERANCE)
    np.testing.assert_allclose(routing.router_z_loss(layer, layer), z, **TOLERANCE)


def test_a_balanced_router_costs_its_experts_per_token():
  # 4 experts, 2 a token, 10 tokens: each is chosen 5 times and has mean probability 1/4:
  # 4 * 4 * (5/10 * 1/4) = 2, in each of two layers. Log totals of 3: z = 9.
  each = jnp.ones((2, 4))
  sums = routing.RouterSums(
    assigned=5 * each, probability=2.5 * each,
    squared_log_total=jnp.asarray([90.0, 90.0]), tokens=jnp.asarray([10.0, 10.0]),
  )  # fmt: skip
  assert float(routing.load_balance_loss(sums, sums)) == 2.0
  assert float(routing.router_z_loss(sums, sums)) == 9.0


def test_router_losses_of_micro_batches_add_up():
  """Value and gradient: what depends on all tokens is a constant known beforehand."""
  router = ROUTERS["sigmoid_groups"]
  weights, (x, real) = weights_of(router), batch(rows=4)

  def losses(weights, x, real, whole):
    _, (sums, _) = run(router, weights, x, real)
    sums = jax.tree.map(lambda a: a[None], sums)
    whole = sums if whole is None else whole
    whole = jax.lax.stop_gradient(whole)  # else the loss would reward using few tokens' logits
    loss = routing.load_balance_loss(sums, whole) + 0.1 * routing.router_z_loss(sums, whole)
    return loss, sums

  grad = jax.jit(jax.value_and_grad(losses, has_aux=True))
  (value, whole), expected = grad(weights, x, real, None)
  parts = [grad(weights, x[i : i + 1], real[i : i + 1], whole) for i in range(4)]
  np.testing.assert_allclose(sum(part[0][0] for part in parts), value, **TOLERANCE)
  added = jax.tree.map(lambda *a: sum(a), *(part[1] for part in parts))
  jax.tree.map(assert_same_sums, added, expected)
  assert np.abs(expected.router).max() > 1e-3


@pytest.mark.parametrize("name", ["softmax_normalized", "sigmoid_groups"])
def test_replayed_routing(name):
  """The computed routing, in another order, changes nothing; another routing is obeyed, with the
  router's own weights for it; where none is told the router chooses.
  """
  router = ROUTERS[name]
  weights, (x, real) = weights_of(router), batch()

  def loss(weights, replay):
    mixed, (_, expert) = run(router, weights, x, real, replay)
    return jnp.sum(jnp.sin(mixed)), (mixed, expert)

  grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
  expected, own = grad(weights, jnp.full((*real.shape, 3), moe.NOWHERE))
  again, back = grad(weights, expected[1][1][..., ::-1])
  np.testing.assert_allclose(again[1][0], expected[1][0], **TOLERANCE)
  jax.tree.map(assert_same_sums, back, own)

  told = np.full((*real.shape, 3), moe.NOWHERE)
  told[0, 2] = [5, 0, 3]
  (_, (mixed, expert)), _ = grad(weights, jnp.asarray(told))
  assert expert[0, 2].tolist() == [5, 0, 3]
  logits = x[0, 2].astype(np.float64) @ weights.router
  if isinstance(router, moe.Softmax):
    score = loops.softmax(logits)[told[0, 2]]
    score = score / score.sum()
  else:
    score = router.scale * loops.sigmoid(logits)[told[0, 2]]
  routed = dict(zip(told[0, 2], score, strict=True))
  by_hand = loops.mix(x[0, 2].astype(np.float64), routed, *jax.tree.leaves(weights.experts))
  np.testing.assert_allclose(mixed[0, 2], by_hand, **TOLERANCE)
  elsewhere = np.delete(np.asarray(mixed), 2, axis=1)
  np.testing.assert_allclose(elsewhere, np.delete(expected[1][0], 2, axis=1), **TOLERANCE)


MESHES = [
  {"data": 2, "expert": 4},  # does not divide six experts: each device has them all
  {"expert": 3, "context": 2},
  pytest.param({"expert": 2}, marks=pytest.mark.slow),
  pytest.param({"expert": 2, "fsdp": 2}, marks=pytest.mark.slow),
  pytest.param({"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_experts_on_a_mesh_equal_those_on_one_device(axes):
  router = ROUTERS["softmax_normalized"]
  mesh = make_mesh(**axes)
  weights = weights_of(router)
  x, real = batch(rows=24 if "context" not in axes else 3, length=10)

  def loss(compute, weights, x):
    mixed, (sums, _) = run(router, weights, x, real, compute=compute)
    return jnp.sum(jnp.sin(mixed)), (mixed, sums)

  def grad(compute):
    return jax.jit(jax.value_and_grad(lambda *a: loss(compute, *a), (0, 1), has_aux=True))

  expected = grad(moe.compute_experts)(weights, x)
  placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*BATCH, None)))
  found = grad(moe.sharded_experts(mesh))(weights, placed)
  jax.tree.map(assert_same_sums, found, expected)
