"""Attention on a mesh: the implementation for its platform, and rows cut over the `context` axis.

Everything else of a model looks at one position at a time, so a device computes it for its part of
the row. Attention trades: positions come together and heads are spread instead, by an all-to-all
before and after (Jacobs et al. 2023, DeepSpeed-Ulysses). Every device then has the same work,
whatever the mask, and memory stays linear in T / context.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from agentrl_jax.models import attention
from agentrl_jax.models.attention import AttendRows, Window
from agentrl_jax.models.sharding import BATCH


def attend_on(mesh: Mesh) -> AttendRows:
  """`attention.attend` for this mesh's platform and, where it has a context axis, over it."""
  local = functools.partial(attention.attend, platform=mesh.devices.flat[0].platform)
  if mesh.shape["context"] == 1:
    return local

  def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    sample: Int[Array, "B T"],
    parent: Int[Array, "B T"] | None = None,
    window: Window | None = None,
  ) -> Float[Array, "B T N H"]:
    axes, copies = head_axes(query.shape[2], key.shape[2], mesh)

    def place(x: Array, *spec: str | tuple[str, ...] | None) -> Array:
      placed = NamedSharding(mesh, PartitionSpec(BATCH[0], *spec))
      return jax.lax.with_sharding_constraint(x, placed)

    whole = functools.partial(jax.tree.map, place)
    if window is not None:
      window = Window(whole(window.position), window.size)
    query = place(query, None, axes)
    key, value = (place(jnp.repeat(x, copies, axis=2), None, axes) for x in (key, value))
    mixed = local(query, key, value, whole(sample), whole(parent), window)
    mixed = place(mixed, None, axes)
    return place(mixed, "context", *(axis for axis in axes if axis != "context"))

  return attend


def head_axes(heads: int, kv_heads: int, mesh: Mesh) -> tuple[tuple[str, ...], int]:
  """(mesh axes that heads are cut over, how often each key-value head is laid beside itself so that
  they divide).

  Raises ValueError where query heads cannot be cut over the context axis.
  """
  for axes in (("tensor", "context"), ("context",)):
    parts = mesh.shape["context"] * (mesh.shape["tensor"] if "tensor" in axes else 1)
    for copies in range(1, heads // kv_heads + 1):
      if heads % (kv_heads * copies) == 0 and kv_heads * copies % parts == 0:
        return axes, copies
  raise ValueError(
    f"{heads} query heads cannot be cut over a context axis of {mesh.shape['context']} devices"
  )
