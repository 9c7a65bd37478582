"""What of a program decides how often its loops run, and that nothing else is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.analysis.planning import jaxpr_cost
from agentrl_jax.analysis.planning.deciding import deciding
from agentrl_jax.models.delta_rule import delta_rule


def arguments(function, *args):
  """Which arguments may decide."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  found = deciding(jaxpr)
  return [variable in found for variable in jaxpr.invars]


def loop(limit):
  return jax.lax.while_loop(lambda i: i < limit, lambda i: i + 1, 0)


def through_a_carry(steps, unused, first):
  """The bound of a loop is what an earlier iteration of a scan carried; `unused` is scanned too."""

  def step(carry, inputs):
    before, now = carry
    return (now, now + inputs[0]), inputs[1] + loop(before)

  return jax.lax.scan(step, (first, first), (steps, unused))


def through_a_branch(index, bound, value):
  limit = jax.lax.cond(index > 0, lambda b, v: b, lambda b, v: b + 1, bound, value)
  return jax.jit(loop)(limit) + value


def of_a_while(first, step, limit, value):
  """`step` decides as it moves what is tested, `value` is carried along."""
  moved = lambda carry: (carry[0] + step, carry[1] * value)  # noqa: E731
  return jax.lax.while_loop(lambda carry: carry[0] < limit, moved, (first, value))


SMALL = np.int32(2), np.int32(3), np.int32(4), np.int32(5)


@pytest.mark.parametrize(
  ("function", "args", "expected"),
  [
    (lambda x, y: loop(x) + y, SMALL[:2], [True, False]),
    (lambda x: jnp.cumsum(x), (np.arange(3),), [False]),
    (through_a_carry, (np.arange(3), np.arange(3), 1), [True, False, True]),
    (through_a_branch, SMALL[:3], [True, True, False]),
    (of_a_while, SMALL, [True, True, True, False]),
    (lambda x, y: jax.lax.cond(x > 0, lambda v: v, lambda v: v + 1, y), SMALL[:2], [True, False]),
    # One jaxpr, called twice.
    (lambda x, y: (loop(jnp.clip(x, 0, 9)), jnp.clip(y, 0, 9)), SMALL[:2], [True, False]),
    # A loop's own result decides how often another runs: so do its first value and its limit.
    (lambda x, y: loop(loop(x) + y), SMALL[:2], [True, True]),
  ],
)
def test_arguments_that_decide(function, args, expected):
  assert arguments(function, *args) == expected


def test_counts_are_those_of_the_data_all_the_same():
  """From 1 by steps of 1, 2 and 3, as it stood one iteration before: 1 + 1 + 2 iterations."""
  args = np.arange(1, 4), np.arange(3), 1
  jaxpr = jax.make_jaxpr(through_a_carry)(*args)
  counts = jaxpr_cost.count(jaxpr, jaxpr_cost.known_leaves((*args[:2], np.asarray(1))))
  assert counts.loops["while/while"] == (3.0, 4.0)


@pytest.mark.parametrize("backward", [False, True])
def test_masks_of_chunks_are_not_computed(monkeypatch, backward):
  """The gated delta rule scans over chunks with masks from ids, which decide nothing."""
  rows, length = 1, 256
  wide = [jax.ShapeDtypeStruct((rows, length, 2, *tail), jnp.float32)
          for tail in ((4,), (4,), (1, 4), (1,), (1,))]  # fmt: skip
  sample = np.repeat(np.arange(4, dtype=np.int32), length // 4)[None]

  def read(*parts):
    return jnp.sum(delta_rule(*parts, sample, sample)[0])

  jaxpr = jax.make_jaxpr(jax.grad(read) if backward else read)(*wide)
  computed, evaluate = [], jaxpr_cost._evaluate

  def seen(eqn, inputs):
    computed.append(eqn.primitive.name)
    return evaluate(eqn, inputs)

  monkeypatch.setattr(jaxpr_cost, "_evaluate", seen)
  assert jaxpr_cost.count(jaxpr, [None] * 5).flops > 0
  assert set(computed) <= {"lt", "add"}  # of the loop that doubles the inverse's blocks
