"""Where each weight and each batch axis lies on the mesh, from one table of logical axes.

Mesh axes: `data` (replicas of the batch), `fsdp` (batch and weights), `context` (positions),
`tensor` (heads, MLP width, vocabulary), `expert` (batch and experts).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agentrl_jax.models.model import Model, ParamSpec, is_spec, parameter_path

MESH_AXES = ("data", "fsdp", "context", "tensor", "expert")

Rules = Mapping[str, str | None]
RULES: Rules = {
  "layers": None,
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "value_heads": "tensor",
  "ffw": "tensor",
  "experts": "expert",
}
BATCH = PartitionSpec(("data", "fsdp", "expert"), "context")  # of [B T] arrays


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
  """A mesh with all five axes; those not named have size one.

  Raises:
    ValueError: an unknown axis, or sizes whose product is not the number of devices given (of all,
      by default, when more than one is asked for; one device otherwise).
  """
  unknown = sorted(set(sizes) - set(MESH_AXES))
  if unknown:
    raise ValueError(f"unknown mesh axes {unknown}, expected some of {list(MESH_AXES)}")
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  count = math.prod(shape)
  devices = jax.devices()[:count] if devices is None else devices
  if len(devices) != count:
    have = len(devices)
    raise ValueError(
      f"mesh {dict(sizes)} needs {count} devices, have {have}: sizes must have that product, as "
      f"{{'fsdp': {have}}} has"
    )
  kinds = (AxisType.Auto,) * len(shape)
  try:
    return jax.make_mesh(shape, MESH_AXES, kinds, devices=list(devices))
  except NotImplementedError:  # an axis of the torus would be cut: fsdp 8 x tensor 2 on 4x4 chips
    cut = mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
    return Mesh(cut, MESH_AXES, axis_types=kinds)


def partition(
  spec: ParamSpec, mesh: Mesh, *, rules: Rules = RULES, units: Mapping[str, int] | None = None
) -> PartitionSpec:
  """The partition of one weight; an axis that its mesh axis does not divide is replicated.

  Args:
    units: indivisible parts of a logical axis where they are not its elements, such as heads.

  Raises:
    ValueError: a logical axis without a rule, or two axes of one weight on the same mesh axis.
  """
  chosen: list[str | None] = []
  for size, axis in zip(spec.shape, spec.axes, strict=True):
    if axis is not None and axis not in rules:
      raise ValueError(f"logical axis {axis!r} of {spec.axes} has no rule, known: {sorted(rules)}")
    target = None if axis is None else rules[axis]
    parts = (units or {}).get(axis, size) if axis else size
    if target is not None and (mesh.shape[target] == 1 or parts % mesh.shape[target]):
      target = None
    if target is not None and target in chosen:
      raise ValueError(f"axes {spec.axes} put mesh axis {target!r} on two axes of one weight")
    chosen.append(target)
  while chosen and chosen[-1] is None:
    chosen.pop()
  return PartitionSpec(*chosen)


def shardings(model: Model, mesh: Mesh, *, rules: Rules = RULES) -> Any:
  """The weights' tree with a `NamedSharding` for each array. Raises ValueError as `partition`."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, partition(spec, mesh, rules=rules, units=model.units)),
    model.abstract(),
    is_leaf=is_spec,
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """For [B T] arrays: rows over data, fsdp and expert, positions over context."""
  return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def table(model: Model, mesh: Mesh, *, rules: Rules = RULES) -> str:
  """One line a weight: name, shape, partition and bytes a device; the last line is their sum."""
  lines, total = [], 0
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.abstract(), is_leaf=is_spec)
  for path, spec in leaves:
    spread = NamedSharding(mesh, partition(spec, mesh, rules=rules, units=model.units))
    nbytes = math.prod(spread.shard_shape(spec.shape)) * jax.numpy.dtype(spec.dtype).itemsize
    total += nbytes
    padded = (*spread.spec, *[None] * (len(spec.shape) - len(spread.spec)))
    axes = ", ".join(
      f"{axis or '-'}={size}" + (f"/{target}" if target else "")
      for axis, size, target in zip(spec.axes, spec.shape, padded, strict=True)
    )
    lines.append((".".join(parameter_path(path)), axes, f"{nbytes:,}"))
  lines.append(("total", "", f"{total:,}"))
  widths = [max(len(line[column]) for line in lines) for column in range(3)]
  return "\n".join(
    f"{name:<{widths[0]}}  {axes:<{widths[1]}}  {nbytes:>{widths[2]}}"
    for name, axes, nbytes in lines
  )
