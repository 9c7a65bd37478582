"""What is read out of compiled programs, against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.analysis.planning import hlo, hlo_cost
from agentrl_jax.analysis.planning.hlo_cost import device_groups
from agentrl_jax.models.sharding import make_mesh


def counted(function, *shapes, mesh=None, **options):
  compiled = jax.jit(function).lower(*shapes).compile()
  sizes = dict(mesh.shape) if mesh is not None else {"data": 1}
  return hlo_cost.count(hlo.parse(compiled.as_text()), sizes, **options)


def shape(mesh, spec, *dims):
  return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_collectives_of_a_tensor_parallel_product():
  """x [B/fsdp, D] @ up [D, F/tensor] @ down [F/tensor, D]: one all-reduce of [B/2, D] over tensor.

  A ring of 4 sends 2 * (4 - 1) / 4 of the array: 1.5 * 8 * 64 * 4 bytes = 3072.
  """
  mesh = make_mesh(fsdp=2, tensor=4)

  def product(x, up, down):
    y = jnp.einsum("bf,fd->bd", jnp.einsum("bd,df->bf", x, up), down)
    return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec("fsdp")))

  args = (
    shape(mesh, ("fsdp", None), 16, 64),
    shape(mesh, (None, "tensor"), 64, 128),
    shape(mesh, ("tensor", None), 128, 64),
  )
  cost = counted(product, *args, mesh=mesh)
  (one,) = cost.collectives
  assert (one.kind, one.axes, one.group, one.count) == ("all-reduce", "tensor", 4, 1)
  assert one.nbytes == 3072
  assert cost.flops == 2 * (8 * 64 * 32) + 2 * (8 * 32 * 64)


def test_an_all_gather_sends_its_part_to_all_others():
  mesh = make_mesh(fsdp=8)
  sharding = NamedSharding(mesh, PartitionSpec())
  whole = lambda x: jax.lax.with_sharding_constraint(x * 2, sharding)  # noqa: E731
  (one,) = counted(whole, shape(mesh, ("fsdp",), 64, 3), mesh=mesh).collectives
  assert (one.kind, one.axes, one.nbytes) == ("all-gather", "fsdp", 7 * 8 * 3 * 4)


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
  def stack(x, weights):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]

  x, weights = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))
  assert counted(stack, x, weights).flops == 5 * 2 * 8 * 16 * 16


def test_a_loop_that_depends_on_data_counts_as_told_or_is_named():
  def repeat(x, n):
    return jax.lax.fori_loop(0, n, lambda i, h: h @ x, x)

  args = jnp.zeros((8, 8)), jnp.int32(3)
  once = 2 * 8**3
  unknown = counted(repeat, *args)
  assert unknown.flops == once and len(unknown.unknown) == 1
  told = counted(repeat, *args, trips=lambda name: 7.0)
  assert told.flops == 7 * once and told.unknown == ()


def test_a_slice_in_a_loop_does_not_read_the_whole_array():
  """Rows of a [1000, 1000] array, one an iteration: 4 MB once, not a thousand times."""

  def total(x):
    return jax.lax.fori_loop(0, 1000, lambda i, s: s + jnp.sin(x[i]), jnp.zeros(1000))

  read = counted(total, jnp.zeros((1000, 1000))).nbytes
  assert 4e6 < read < 50e6


HEADS = """HloModule heads
ENTRY %main (a: f32[4,4,128,64], b: f32[4,128,64,1]) -> f32[4,4,128,128] {
  %a = f32[4,4,128,64]{3,2,1,0:T(8,128)S(1)} parameter(0)
  %b = f32[4,128,64,1]{3,2,1,0:T(8,128)} parameter(1)
  ROOT %c = f32[4,4,128,128]{2,3,1,0:T(8,128)} convolution(%a, %b), window={size=4x1 stride=3x1 lhs_dilate=4x1}, dim_labels=01bf_0oi1->01bf, metadata={op_name="jit(step)/dot"}
}
"""  # noqa: E501


def test_a_product_that_tpu_writes_as_a_convolution():
  """Four batched products of [4 * 128, 64] by [64, 128]: the window picks out the batch axis.

  Of its own bytes on a TPU, those in memory space 1 are not memory traffic.
  """
  program = hlo.parse(HEADS)
  cost = hlo_cost.count(program, {"data": 1}, on_chip_spaces=True)
  assert cost.flops == 2 * 4 * (4 * 128) * 64 * 128
  assert cost.nbytes == 4 * (4 * 128 * 64 + 4 * 4 * 128 * 128)
  assert hlo_cost.count(program, {"data": 1}).nbytes == cost.nbytes + 4 * 4 * 4 * 128 * 64


def test_spellings_of_replica_groups():
  mesh = {"data": 1, "fsdp": 4, "tensor": 2}
  by_tensor = [[0, 1], [2, 3], [4, 5], [6, 7]]
  by_fsdp = [[0, 2, 4, 6], [1, 3, 5, 7]]
  assert device_groups("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x=1", mesh) == by_tensor
  assert device_groups("replica_groups=[4,2]<=[8], x", mesh) == by_tensor
  assert device_groups("replica_groups=[2,4]<=[4,2]T(1,0), x", mesh) == by_fsdp
  named = "replica_groups=mesh['data'=1,'fsdp'=4,'tensor'=2] {'fsdp'}, x"
  assert device_groups(named, mesh) == by_fsdp
  assert device_groups("source_target_pairs={{0,2},{2,0}}", mesh) == [[0, 2], [2, 0]]
  assert device_groups("replica_groups={}", mesh) == [list(range(8))]


def test_largest_values_come_first():
  def f(x):
    return jnp.outer(jnp.sin(x), jnp.cos(x)) @ jnp.ones((300, 2))

  program = hlo.parse(jax.jit(f).lower(jnp.zeros(300)).compile().as_text())
  sizes = [array.nbytes for array, _, _ in hlo_cost.largest_arrays(program)]
  assert sizes[0] == 300 * 300 * 4 and sizes == sorted(sizes, reverse=True)


def test_a_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match="no entry computation"):
    hlo.parse("HloModule nothing")


@functools.cache
def step_length(n):
  def f(x):
    return jax.lax.fori_loop(2, n, lambda i, h: h @ x, x)

  return counted(f, jnp.zeros((4, 4))).flops


def test_a_loop_starts_where_it_says():
  assert step_length(7) == 5 * 2 * 4**3
  assert np.isclose(step_length(3), 1 * 2 * 4**3)


KERNEL = """
HloModule planned

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %k.1 = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "{\\"q\\": 512}"
}}, metadata={op_name="jit(f)/shard_map/k/pallas_call"}, backend_config={"body": "TUzv"}
  ROOT %y = bf16[8,128]{1,0} copy(%k.1)
}
"""  # noqa: E501


def test_a_kernel_costs_what_the_caller_says_of_its_name():
  """The text gives its attributes lines of their own; unknown it is named, and moves its arrays."""
  program = hlo.parse(KERNEL)
  known = hlo_cost.count(program, {"data": 1}, kernels={
    "jit(f)/shard_map/k/pallas_call": (1000.0, 10.0)
  }.get)  # fmt: skip
  copied = 2 * 8 * 128 * 2
  assert (known.flops, known.nbytes, known.uncounted) == (1000.0, 10.0 + copied, ())
  unknown = hlo_cost.count(program, {"data": 1})
  assert (unknown.flops, unknown.nbytes) == (0.0, 2 * copied)
  assert unknown.uncounted == ("jit(f)/shard_map/k/pallas_call",)
