"""The sharding table as a reviewed snapshot, and what a mesh refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import gemma3, heads, llama, qwen2, sharding
from agentrl_jax.models.decoder import Config
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

QWEN2 = qwen2.bind(  # Qwen2.5-0.5B
  Config(
    vocab_size=151936, embed=896, ffw=4864, layers=24, heads=14, kv_heads=2, head_dim=64,
    max_position=32768, rope_theta=1e6, tied=True,
  )
)  # fmt: skip
GEMMA3 = gemma3.bind(  # 270M: one key-value head, which tensor=2 does not divide
  gemma3.Config(
    vocab_size=262144, embed=640, ffw=2048, layers=18, heads=4, kv_heads=1, head_dim=256,
    max_position=32768, local=(*(True,) * 5, False) * 3, window=512, query_scalar=256,
  )
)  # fmt: skip
QWEN2_SNAPSHOT = """
embedding vocab=151936/tensor, embed=896/fsdp 136,134,656
layers.attention_norm layers=24, -=896 86,016
layers.attention.query layers=24, embed=896/fsdp, heads=896/tensor 19,267,584
layers.attention.key layers=24, embed=896/fsdp, kv_heads=128/tensor 2,752,512
layers.attention.value layers=24, embed=896/fsdp, kv_heads=128/tensor 2,752,512
layers.attention.output layers=24, heads=896/tensor, embed=896/fsdp 19,267,584
layers.attention.query_bias layers=24, heads=896/tensor 43,008
layers.attention.key_bias layers=24, kv_heads=128/tensor 6,144
layers.attention.value_bias layers=24, kv_heads=128/tensor 6,144
layers.mlp_norm layers=24, -=896 86,016
layers.mlp.gate layers=24, embed=896/fsdp, ffw=4864/tensor 104,595,456
layers.mlp.up layers=24, embed=896/fsdp, ffw=4864/tensor 104,595,456
layers.mlp.down layers=24, ffw=4864/tensor, embed=896/fsdp 104,595,456
final_norm -=896 3,584
total 494,192,128
"""
GEMMA3_SNAPSHOT = """
embedding vocab=262144/tensor, embed=640/fsdp 167,772,160
layers.attention_norm layers=18, -=640 46,080
layers.attention.query layers=18, embed=640/fsdp, heads=1024/tensor 11,796,480
layers.attention.key layers=18, embed=640/fsdp, kv_heads=256 5,898,240
layers.attention.value layers=18, embed=640/fsdp, kv_heads=256 5,898,240
layers.attention.output layers=18, heads=1024/tensor, embed=640/fsdp 11,796,480
layers.attention.query_norm layers=18, -=256 18,432
layers.attention.key_norm layers=18, -=256 18,432
layers.attention_output_norm layers=18, -=640 46,080
layers.mlp_norm layers=18, -=640 46,080
layers.mlp.gate layers=18, embed=640/fsdp, ffw=2048/tensor 23,592,960
layers.mlp.up layers=18, embed=640/fsdp, ffw=2048/tensor 23,592,960
layers.mlp.down layers=18, ffw=2048/tensor, embed=640/fsdp 23,592,960
layers.mlp_output_norm layers=18, -=640 46,080
final_norm -=640 2,560
total 274,164,224
"""


def words(table):
  return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize(
  ("model", "snapshot"),
  [(SMOLLM2, SNAPSHOT), (QWEN2, QWEN2_SNAPSHOT), (GEMMA3, GEMMA3_SNAPSHOT)],
  ids=["smollm2", "qwen2", "gemma3"],
)
def test_table_snapshot(model, snapshot):
  mesh = sharding.make_mesh(fsdp=2, tensor=2)
  assert words(sharding.table(model, mesh)) == words(snapshot)


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
  with pytest.raises(ValueError, match=r"needs 16 devices, have 8: .* {'fsdp': 8}"):
    sharding.make_mesh(tensor=16)
  mesh = sharding.make_mesh(tensor=2)
  twice = ParamSpec((4, 4), jnp.float32, ("heads", "ffw"), ones)
  with pytest.raises(ValueError, match="put mesh axis 'tensor' on two axes"):
    sharding.partition(twice, mesh)
  with pytest.raises(ValueError, match="logical axis 'mystery'"):
    sharding.partition(twice._replace(axes=("mystery", None)), mesh)


@dataclasses.dataclass(frozen=True)
class Chip:
  """What JAX reads of a TPU to lay a mesh."""

  id: int
  coords: tuple[int, int, int]
  platform: str = "tpu"
  device_kind: str = "TPU v6 lite"
  core_on_chip: int = 0
  slice_index: int = 0
  process_index: int = 0


def test_a_mesh_whose_axes_cut_those_of_the_torus():
  chips = [Chip(4 * y + x, (x, y, 0)) for y in range(4) for x in range(4)]
  mesh = sharding.make_mesh(devices=chips, fsdp=8, tensor=2)
  assert mesh.shape["fsdp"] == 8 and mesh.shape["tensor"] == 2
  for one, other in mesh.devices.reshape(8, 2):
    assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1


def test_value_head_is_a_float32_dot_product():
  hidden = jnp.asarray([[[1.0, 2.0], [3.0, 4.0]]], jnp.bfloat16)
  head = heads.ValueHead(weight=jnp.asarray([0.5, -1.0]), bias=jnp.asarray(0.25))
  np.testing.assert_allclose(heads.value(head, hidden), [[0.5 - 2 + 0.25, 1.5 - 4 + 0.25]])
  specs = jax.tree.leaves(heads.abstract_value_head(2), is_leaf=lambda x: isinstance(x, ParamSpec))
  assert [(spec.shape, spec.axes) for spec in specs] == [((2,), ("embed",)), ((), ())]
