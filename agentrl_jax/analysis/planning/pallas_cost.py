"""Bytes that a Pallas kernel moves: a block is fetched when an index that chooses it has moved.

The grid is walked with its last axis fastest, so a block stays on the chip while only axes behind
the last one that chooses it move.
"""

import math
from typing import Any

from jax.extend import core


def grid_of(eqn: Any) -> tuple[int, ...]:
  """The grid of a `pallas_call`; 1 where a size is data."""
  return tuple(g if isinstance(g, int) else 1 for g in eqn.params["grid_mapping"].grid)


def traffic(eqn: Any, share: float) -> float:
  """Bytes of one call, reads and writes.

  Args:
    share: of the grid's steps those that do something. A block that prefetched numbers choose is
      fetched for these alone: a step that does nothing is told the block of the next that does.
  """
  grid, total = grid_of(eqn), 0.0
  for mapping in eqn.params["grid_mapping"].block_mappings:
    axes, told = _chosen_by(mapping.index_map_jaxpr, len(grid))
    fetches = math.prod(grid[: max(axes, default=-1) + 1]) * (share if told else 1.0)
    array = mapping.array_aval
    total += fetches * math.prod(map(_size, mapping.block_shape)) * array.dtype.itemsize
  return total


def _size(dim: Any) -> int:
  return dim if isinstance(dim, int) else getattr(dim, "block_size", 1)


def _chosen_by(index_map: Any, axes: int) -> tuple[list[int], bool]:
  """(axes of the grid that a block's index depends on, whether prefetched numbers are among it)."""
  jaxpr = getattr(index_map, "jaxpr", index_map)
  needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  for eqn in reversed(jaxpr.eqns):
    if needed.intersection(eqn.outvars):
      needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
  places = [place for place, variable in enumerate(jaxpr.invars) if variable in needed]
  return [p for p in places if p < axes], any(p >= axes for p in places)
