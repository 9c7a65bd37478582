"""The sharding table as a reviewed snapshot, and what a mesh refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import heads, llama, sharding
from agentrl_jax.models.layers import ones
from agentrl_jax.models.model import ParamSpec

SMOLLM2 = llama.bind(
  llama.Config(
    vocab_size=49152, embed=576, ffw=1536, layers=30, heads=9, kv_heads=3, head_dim=64,
    max_position=8192, tied=True,
  )
)  # fmt: skip

# tensor=2 does not divide nine query and three key-value heads: they stay whole on each device.
SNAPSHOT = """
embedding               vocab=49152/tensor, embed=576/fsdp      28,311,552
layers.attention_norm   layers=30, -=576                            69,120
layers.attention.query  layers=30, embed=576/fsdp, heads=576    19,906,560
layers.attention.key    layers=30, embed=576/fsdp, kv_heads=192  6,635,520
layers.attention.value  layers=30, embed=576/fsdp, kv_heads=192  6,635,520
layers.attention.output layers=30, heads=576, embed=576/fsdp    19,906,560
layers.mlp_norm         layers=30, -=576                            69,120
layers.mlp.gate         layers=30, embed=576/fsdp, ffw=1536/tensor 26,542,080
layers.mlp.up           layers=30, embed=576/fsdp, ffw=1536/tensor 26,542,080
layers.mlp.down         layers=30, ffw=1536/tensor, embed=576/fsdp 26,542,080
final_norm              -=576                                        2,304
total                                                           161,162,496
"""


def words(table):
  return [line.split() for line in table.strip().splitlines()]


def test_table_snapshot():
  mesh = sharding.make_mesh(fsdp=2, tensor=2)
  assert words(sharding.table(SMOLLM2, mesh)) == words(SNAPSHOT)


def test_heads_are_cut_between_heads_only():
  mesh = sharding.make_mesh(tensor=3)
  placed = sharding.shardings(SMOLLM2, mesh)
  assert tuple(placed.layers.attention.query.spec) == (None, None, "tensor")
  assert tuple(placed.layers.attention.key.spec) == (None, None, "tensor")
  assert placed.layers.mlp.up.shard_shape((30, 576, 1536)) == (30, 576, 512)
  assert tuple(sharding.make_mesh(fsdp=2, tensor=4).shape.values()) == (1, 2, 1, 4, 1)


def test_refusals():
  with pytest.raises(ValueError, match=r"unknown mesh axes \['model'\]"):
    sharding.make_mesh(model=2)
  with pytest.raises(ValueError, match="needs 16 devices, have 8"):
    sharding.make_mesh(tensor=16)
  mesh = sharding.make_mesh(tensor=2)
  twice = ParamSpec((4, 4), jnp.float32, ("heads", "ffw"), ones)
  with pytest.raises(ValueError, match="put mesh axis 'tensor' on two axes"):
    sharding.partition(twice, mesh)
  with pytest.raises(ValueError, match="logical axis 'mystery'"):
    sharding.partition(twice._replace(axes=("mystery", None)), mesh)


def test_value_head_is_a_float32_dot_product():
  hidden = jnp.asarray([[[1.0, 2.0], [3.0, 4.0]]], jnp.bfloat16)
  head = heads.ValueHead(weight=jnp.asarray([0.5, -1.0]), bias=jnp.asarray(0.25))
  np.testing.assert_allclose(heads.value(head, hidden), [[0.5 - 2 + 0.25, 1.5 - 4 + 0.25]])
  specs = jax.tree.leaves(heads.abstract_value_head(2), is_leaf=lambda x: isinstance(x, ParamSpec))
  assert [(spec.shape, spec.axes) for spec in specs] == [((2,), ("embed",)), ((), ())]
