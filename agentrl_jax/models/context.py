"""Attention on a mesh: the implementation for its platform, and rows cut over the `context` axis.

Everything else of a model looks at one position at a time, so a device computes it for its part of
the row. Attention trades: positions come together and heads are spread instead, by an all-to-all
before and after (Jacobs et al. 2023, DeepSpeed-Ulysses). Every device then has the same work,
whatever the mask, and memory stays linear in T / context.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from agentrl_jax.models import attention
from agentrl_jax.models.attention import AttendRows, Window
from agentrl_jax.models.kernels import PROVEN, Kernels
from agentrl_jax.models.sharding import BATCH


class Choice(NamedTuple):
  """An implementation of packed attention; `fused` if it is a kernel that XLA cannot spread over
  devices, `said` in words.
  """

  attend: AttendRows
  fused: bool
  said: str


def choose(
  query: Any,
  key: Any,
  value: Any,
  parent: Any = None,
  window: Any = None,
  *,
  platform: str,
  kernels: Kernels = PROVEN,
) -> Choice:
  """The one place where an implementation of packed attention is chosen: the platform's kernel
  where it can do what is asked, else blocks, or all scores at once of short rows.

  Args:
    query, key, value, parent, window: as of `AttendRows`; only shapes and dtypes are looked at.
    platform: of the devices, as jax calls it.
    kernels: those that may be used, by platform.
  """
  own = functools.partial(attention.attend, platform=platform)
  length = query.shape[1]
  if length <= attention.PLAIN_LENGTH:
    return Choice(own, False, f"all scores at once, rows of {length}")
  blocks = f"blocks of {attention.block_of(length, platform)}"
  kernel = kernels.get(platform)
  if kernel is None:
    return Choice(own, False, blocks)
  refused = kernel.refuses(query, key, value, parent, window)
  if refused:
    return Choice(own, False, f"{blocks}; not {kernel.name}: {refused}")
  return Choice(kernel.attend, True, kernel.name)


def attend_on(mesh: Mesh, kernels: Kernels = PROVEN) -> AttendRows:
  """What `choose` says for this mesh's platform, on all its devices."""
  platform = mesh.devices.flat[0].platform

  def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    sample: Int[Array, "B T"],
    parent: Int[Array, "B T"] | None = None,
    window: Window | None = None,
  ) -> Float[Array, "B T N H"]:
    chosen = choose(query, key, value, parent, window, platform=platform, kernels=kernels)
    if mesh.size == 1 or (mesh.shape["context"] == 1 and not chosen.fused):
      return chosen.attend(query, key, value, sample, parent, window)
    axes, copies = head_axes(query.shape[2], key.shape[2], mesh)

    def place(x: Array, *spec: str | tuple[str, ...] | None) -> Array:
      placed = NamedSharding(mesh, PartitionSpec(BATCH[0], *spec))
      return jax.lax.with_sharding_constraint(x, placed)

    whole = functools.partial(jax.tree.map, place)
    if window is not None:
      window = Window(whole(window.position), window.size)
    query = place(query, None, axes)
    key, value = (place(jnp.repeat(x, copies, axis=2), None, axes) for x in (key, value))
    rows = whole(sample), whole(parent), window
    run = _on_each_device(chosen.attend, mesh, axes) if chosen.fused else chosen.attend
    mixed = place(run(query, key, value, *rows), None, axes)
    return place(mixed, "context", *(axis for axis in axes if axis != "context"))

  return attend


def _on_each_device(attend: AttendRows, mesh: Mesh, axes: tuple[str, ...]) -> AttendRows:
  """`attend` by every device on its rows and heads; a window's position goes with the rows."""

  def run(query: Array, key: Array, value: Array, sample: Array, parent: Any, window: Any) -> Array:
    rows = PartitionSpec(BATCH[0])
    heads = PartitionSpec(BATCH[0], None, axes)
    of_window = None if window is None else Window(rows, PartitionSpec())  # pyright: ignore
    of_parent = None if parent is None else rows
    spread = jax.shard_map(
      attend,
      mesh=mesh,
      in_specs=(heads, heads, heads, rows, of_parent, of_window),
      out_specs=heads,
      check_vma=False,
    )
    return spread(query, key, value, sample, parent, window)

  return run


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
