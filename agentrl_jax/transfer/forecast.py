"""What a plan will move, before any weight exists: bytes by link, fan-in, time on the wire."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from agentrl_jax.models.model import Model, is_spec, parameter_path
from agentrl_jax.models.sharding import MESH_AXES, partition
from agentrl_jax.transfer.layout import Box
from agentrl_jax.transfer.plan import Plan, Shard, Tensor


class Forecast(NamedTuple):
  """Bytes are payload. A host is a group of ranks that shares one network link each way."""

  links: Mapping[tuple[int, int], int]  # (source host, destination host) -> bytes
  sent: Mapping[int, int]  # by source host
  received: Mapping[int, int]  # by destination host
  fan_in: int  # most source ranks that write to one destination rank
  buckets: int
  largest_bucket: int


def source_on_mesh(model: Model, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
  """The layout of a model's weights on a mesh of these sizes, without devices.

  Ranks count the mesh in the order of its axes, as `models.sharding.make_mesh` lays out devices.

  Raises:
    ValueError: an axis that meshes do not have.
  """
  unknown = sorted(set(sizes) - set(MESH_AXES))
  if unknown:
    raise ValueError(f"unknown mesh axes {unknown}, expected some of {list(MESH_AXES)}")
  shape = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
  mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
  places = [
    dict(zip(shape, place, strict=True))
    for place in itertools.product(*(range(n) for n in shape.values()))
  ]
  tensors = []
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.abstract(), is_leaf=is_spec)
  for path, spec in leaves:
    axes = tuple(partition(spec, mesh, units=model.units))  # pyright: ignore[reportArgumentType]
    axes += (None,) * (len(spec.shape) - len(axes))
    shards = tuple(
      Shard(rank, _box(spec.shape, axes, place, shape)) for rank, place in enumerate(places)
    )
    name = ".".join(parameter_path(path))
    tensors.append(Tensor(name, tuple(spec.shape), jax.numpy.dtype(spec.dtype).name, shards))
  return tuple(tensors)


def forecast(plan: Plan, *, source_host: int, target_host: int) -> Forecast:
  """What a plan moves between hosts of `source_host` and `target_host` ranks each."""
  links: Counter[tuple[int, int]] = Counter()
  senders: dict[int, set[int]] = {}
  for copy in plan.copies:
    rank = plan.segments[copy.segment].rank
    links[copy.src_rank // source_host, rank // target_host] += copy.nbytes
    senders.setdefault(rank, set()).add(copy.src_rank)
  sent: Counter[int] = Counter()
  received: Counter[int] = Counter()
  for (source, target), nbytes in links.items():
    sent[source] += nbytes
    received[target] += nbytes
  return Forecast(
    links,
    sent,
    received,
    max(map(len, senders.values()), default=0),
    len(plan.buckets),
    max((bucket.nbytes for bucket in plan.buckets), default=0),
  )


def seconds(forecast: Forecast, gigabytes_a_second: float) -> float:
  """The least time of the wire when every host has one link of this speed each way: the busiest end
  decides. Nothing else is in it: no cast, no pause, no verification.
  """
  busiest = max([*forecast.sent.values(), *forecast.received.values()], default=0)
  return busiest / (gigabytes_a_second * 1e9)


def report(plan: Plan, found: Forecast, speeds: Sequence[float], *, most_links: int = 8) -> str:
  """The forecast as lines of text."""
  lines = [
    f"plan {plan.digest}",
    f"{len(plan.segments)} segments, {len(plan.copies)} copies, {plan.nbytes / 1e9:.3f} GB in "
    f"{found.buckets} buckets (largest {found.largest_bucket / 1e6:.1f} MB)",
    f"largest fan-in: {found.fan_in} source ranks into one rank",
    _ends("sent by source host", found.sent),
    _ends("received by destination host", found.received),
  ]
  heaviest = sorted(found.links.items(), key=lambda item: (-item[1], item[0]))
  lines += [
    f"  link {source} -> {target}: {nbytes / 1e9:.3f} GB"
    for (source, target), nbytes in heaviest[:most_links]
  ]
  if len(heaviest) > most_links:
    lines.append(f"  and {len(heaviest) - most_links} more links")
  lines += [
    f"at {speed:g} GB/s a host and direction: {seconds(found, speed):.3f} s on the wire (predicted)"
    for speed in speeds
  ]
  return "\n".join(lines)


def _ends(what: str, by_host: Mapping[int, int]) -> str:
  values = [nbytes / 1e9 for nbytes in by_host.values()] or [0.0]
  return (
    f"{what}: {min(values):.3f} to {max(values):.3f} GB over {len(by_host)}, "
    f"mean {math.fsum(values) / len(values):.3f}"
  )


def _box(sizes: Sequence[int], axes: Sequence[Any], place: Mapping[str, int], shape) -> Box:
  out = []
  for size, axis in zip(sizes, axes, strict=True):
    step = size // shape[axis] if axis else size
    start = place[axis] * step if axis else 0
    out.append((start, start + step))
  return tuple(out)
