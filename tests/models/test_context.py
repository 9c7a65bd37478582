"""Attention over the `context` axis of a mesh is that of one device, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import attention, context
from agentrl_jax.models.sharding import BATCH, make_mesh

ROWS, LENGTH, HEAD_DIM = 2, 320, 4


def packed():
  """Two streams a row, of which the second continues the first in row 0; padding at the end."""
  cuts = np.asarray([[130, 300], [7, 311]])
  index = np.arange(LENGTH)
  sample = np.where(index < cuts[:, :1], np.asarray([[0], [2]]), np.asarray([[1], [3]]))
  sample = np.where(index < cuts[:, 1:], sample, -1)
  parent = np.where(sample == 1, 0, sample)
  position = np.where(sample == 3, index - 7, index)
  return tuple(jnp.asarray(x, jnp.int32) for x in (sample, parent, position))


@pytest.mark.parametrize(
  ("sizes", "heads", "kv_heads", "windowed"),
  [
    ({"context": 8}, 8, 2, True),  # each key-value head on four devices
    ({"context": 2, "tensor": 2, "fsdp": 2}, 4, 4, False),
    ({"context": 4, "data": 2}, 12, 3, False),  # copies, before they are a multiple of the axis
  ],
)
def test_context_parallel_attention_is_attention(sizes, heads, kv_heads, windowed):
  mesh = make_mesh(**sizes)
  rng = np.random.default_rng(0)
  shapes = [(ROWS, LENGTH, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
  query, key, value, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
  sample, parent, position = packed()
  window = attention.Window(position, jnp.asarray(50)) if windowed else None
  cut = jax.NamedSharding(mesh, jax.P(BATCH[0], "context"))

  def run(form):
    def loss(*qkv):
      mixed = form(*qkv, sample, parent, window)
      return jnp.sum(mixed * weight), mixed

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

  expected = run(attention.attend_plain)(query, key, value)
  placed = jax.device_put((query, key, value), cut)
  compiled = run(context.attend_on(mesh)).lower(*placed).compile()
  assert "all-to-all" in compiled.as_text()
  found = compiled(*placed)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)
  assert found[1].sharding.spec[1] == "context"


def test_heads_that_cannot_be_cut_are_refused():
  with pytest.raises(ValueError, match="6 query heads cannot be cut over a context axis of 4"):
    context.head_axes(6, 2, make_mesh(context=4))


def test_heads_lie_over_tensor_and_context_where_they_divide():
  mesh = make_mesh(context=2, tensor=2)
  assert context.head_axes(8, 4, mesh) == (("tensor", "context"), 1)
  assert context.head_axes(8, 2, mesh) == (("tensor", "context"), 2)
  assert context.head_axes(6, 2, mesh) == (("context",), 1)
