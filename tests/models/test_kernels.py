"""Fused kernels of attention compute what its other forms do, and are chosen where they can."""

import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.analysis.planning import jaxpr_cost, pallas_cost
from agentrl_jax.models import attention, context, kernels, remat
from agentrl_jax.models.sharding import make_mesh
from configs import tiny_rl, tiny_sft, use_cudnn

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 300, 4, 2, 64
BLOCKS = 3  # of 128, of rows padded to 384

splash = functools.partial(kernels.attend_splash, interpret=True)
ON_CPU = {"cpu": kernels.SPLASH._replace(attend=splash)}
by_blocks = functools.partial(attention.attend_blockwise, block=64)


def arrays(value_dim=HEAD_DIM, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  widths = (HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, value_dim), (HEADS, value_dim)
  return [jnp.asarray(rng.normal(size=(ROWS, LENGTH, *w)), dtype) for w in widths]


def packed():
  """Two samples a row, of which the second continues the first in row 0; padding at the end."""
  cuts = np.asarray([[130, 290], [7, 256]])
  index = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
  sample = np.where(index < cuts[:, :1], np.asarray([[0], [2]]), np.asarray([[1], [3]]))
  sample = np.where(index < cuts[:, 1:], sample, -1)
  parent = np.where(sample == 1, 0, sample)
  position = np.where(sample == 3, index - 7, index)
  return tuple(jnp.asarray(x, jnp.int32) for x in (sample, parent, position))


def both_ways(form, query, key, value, weight, *rest):
  """(gradients of queries, keys and values; what was mixed)."""

  def loss(*qkv):
    mixed = form(*qkv, *rest)
    return jnp.sum(mixed * weight), mixed

  return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, value)


def close(found, expected, atol=2e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 2 * HEAD_DIM])
def test_splash_is_attention_forward_and_backward(value_dim):
  args = *arrays(value_dim), packed()[0]
  found = both_ways(splash, *args)
  close(found, both_ways(by_blocks, *args))
  padding = np.asarray(args[-1]) < 0
  assert all(np.all(np.asarray(x)[padding] == 0) for x in jax.tree.leaves(found))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"tensor": 4}, {"context": 4}])
def test_a_kernel_runs_on_every_device_of_a_mesh(sizes):
  """Key-value heads are laid beside themselves where four devices share two."""
  mesh = make_mesh(**sizes)
  args = *arrays(), packed()[0]
  found = both_ways(context.attend_on(mesh, ON_CPU), *args)
  close(found, both_ways(by_blocks, *args))


def test_what_splash_mixed_is_kept_when_asked_for():
  query, _, _, weight = arrays()
  sample = packed()[0]

  def kernels_run(keep):
    def layer(x, _):
      return splash(x, x[:, :, :KV_HEADS], x[:, :, :KV_HEADS], sample), None

    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(keep(layer)(x, None)[0] * weight)))(query)
    return str(traced).count("pallas_call[")

  # Forward, two backward; and forward again.
  assert [kernels_run(keep) for keep in (remat.save_attention, remat.save_nothing)] == [3, 4]


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_the_mask_for_cudnn_is_attention(continued, windowed):
  """Through the implementation of `jax.nn.dot_product_attention` that needs no GPU."""
  sample, parent, position = packed()
  window = attention.Window(position, jnp.asarray(50)) if windowed else None
  args = *arrays(), sample, parent if continued else None, window
  form = functools.partial(kernels.attend_cudnn, implementation="xla")
  close(both_ways(form, *args), both_ways(attention.attend_plain, *args))


def test_jax_takes_what_cudnn_is_given(monkeypatch):
  """Its own checks of shapes, dtypes and layouts, and its lowering for CUDA, without a GPU."""
  from jax._src.cudnn import fused_attention_stablehlo

  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
  *qkv, weight = arrays(dtype=jnp.bfloat16)
  assert kernels.CUDNN.refuses(*qkv, None, None) == ""

  def loss(*qkv):
    return jnp.sum(kernels.attend_cudnn(*qkv, *packed()[:2]) * weight)

  lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*qkv).lower(lowering_platforms=("cuda",))
  called = re.findall(r"custom_call @(__cudnn\S+?)\(", lowered.as_text())
  assert called == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


def shaped(length=4096, heads=(128, 128), dtype="bfloat16"):
  return [
    jax.ShapeDtypeStruct((1, length, n, size), jnp.dtype(dtype))
    for n, size in ((32, heads[0]), (8, heads[0]), (8, heads[1]))
  ]


THERE = object()  # a parent or window, of which only the presence counts


@pytest.mark.parametrize(
  ("platform", "asked", "fused", "said"),
  [
    ("cpu", {}, False, "blocks of 128"),
    ("tpu", {}, True, "splash"),
    ("tpu", {"length": 900}, True, "splash"),
    ("tpu", {"length": 256}, False, "all scores at once, rows of 256"),
    ("tpu", {"heads": (192, 128)}, True, "splash"),
    ("tpu", {"heads": (96, 96)}, False, "blocks of 512; not splash: heads of 96"),
    ("tpu", {"parent": THERE}, False, "blocks of 512; not splash: prompts laid once"),
    ("tpu", {"window": THERE}, False, "blocks of 512; not splash: windows"),
    ("gpu", {}, False, "blocks of 512"),
    ("gpu", {"asked": True, "parent": THERE, "window": THERE}, True, "cuDNN"),
    ("gpu", {"asked": True, "dtype": "float32"}, False, "blocks of 512; not cuDNN: float32"),
    ("gpu", {"asked": True, "heads": (192, 128)}, False, "not cuDNN: heads of 192 and 128"),
    ("gpu", {"asked": True, "length": 16384}, False, "not cuDNN: rows of 16384, as its mask"),
    ("tpu", {"asked": True}, True, "splash"),
  ],
)
def test_the_choice(platform, asked, fused, said):
  asked = dict(asked)
  may = kernels.with_cudnn() if asked.pop("asked", False) else kernels.PROVEN
  seen = asked.pop("parent", None), asked.pop("window", None)
  found = context.choose(*shaped(**asked), *seen, platform=platform, kernels=may)
  assert found.fused is fused and said in found.said


def test_a_configuration_asks_for_cudnn():
  config = tiny_rl()
  use_cudnn(config)
  assert fdl.build(config.kernels) == kernels.with_cudnn()
  with pytest.raises(ValueError, match="builds Supervised, only an Experiment has kernels"):
    use_cudnn(tiny_sft())


def test_products_and_bytes_of_splash():
  """Of the 9 blocks of 128 x 128 the 6 of the triangle; bytes as the kernel pipelines them."""
  args = *arrays(), packed()[0]
  traced = jax.make_jaxpr(lambda *args: both_ways(splash, *args))(*args)
  found = jaxpr_cost.count(traced, [None] * len(args)).kernels
  block = 2.0 * ROWS * HEADS * 6 * 128 * 128 * HEAD_DIM  # a product of all computed blocks
  names = {re.search(r"splash_mha_(\w+?)_", path)[1]: path for path in found}
  assert {name: found[path][0] for name, path in names.items()} == {
    "fwd": 2 * block, "dq": 3 * block, "dkv": 4 * block,
  }  # fmt: skip
  row = 4.0 * ROWS * HEADS * 128 * HEAD_DIM  # a block of queries, keys or values of all heads
  # Queries and the output once; keys and values for each computed block. Ids and sums besides:
  # ids and places of queries 128 wide, ids of keys 8 high; sums 128 wide.
  wide, high = 4.0 * ROWS * HEADS * 128 * 128, 4.0 * ROWS * HEADS * 8 * 128
  expected = 2 * BLOCKS * row + 2 * 6 * row + 3 * BLOCKS * wide + 6 * high
  # An older jax lays accumulators of one block outside, too.
  assert found[names["fwd"]][1] == pytest.approx(expected, rel=0.05)


def test_blocks_are_fetched_when_what_chooses_them_moves():
  from jax.experimental import pallas as pl

  def body(x, y, out):
    out[...] = x[...] + y[...]

  def spec(index):
    return pl.BlockSpec((8, 128), index)

  x = jax.ShapeDtypeStruct((16, 512), jnp.float32)
  call = pl.pallas_call(
    body,
    grid=(2, 4),
    in_specs=[spec(lambda i, j: (i, 0)), spec(lambda i, j: (0, j))],
    out_specs=spec(lambda i, j: (i, j)),
    out_shape=x,
    interpret=True,
  )
  eqn = next(e for e in jax.make_jaxpr(call)(x, x).jaxpr.eqns if e.primitive.name == "pallas_call")
  assert pallas_cost.traffic(eqn, 1.0) == (2 + 8 + 8) * 8 * 128 * 4
