"""Element-by-element meanings of layouts and plans: loops that share no code with the package."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np


def random_weights(model, seed=0):
  """Float32 weights of a model from numpy, which compiles nothing."""
  rng = np.random.default_rng(seed)
  specs, tree = jax.tree.flatten(model.abstract(), is_leaf=lambda node: hasattr(node, "axes"))
  return tree.unflatten([jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in specs])


def published(assembly, sources):
  """The published array, one element at a time; raises if an element has not exactly one source."""
  out = {}
  for piece in assembly.pieces:
    spans = [range(start, stop) for start, stop in piece.src_box]
    for where in itertools.product(*spans):
      view = []
      for axis, (origin, _) in zip(piece.perm, piece.dst_box, strict=True):
        view.append(origin + where[axis] - piece.src_box[axis][0])
      assert tuple(view) not in out, f"{assembly.dst}{view} has two sources"
      out[tuple(view)] = sources[piece.src][where]
  flat = [out[view] for view in itertools.product(*(range(n) for n in assembly.view))]
  return np.array(flat).reshape(assembly.shape)


def run(plan, shards):
  """Executes a plan from `shards[(name, rank)] = (box, values)`.

  Returns for each segment (values, how often each element was written).
  """
  values = [np.zeros(segment.shape) for segment in plan.segments]
  paint = [np.zeros(segment.shape, int) for segment in plan.segments]
  for copy in plan.copies:
    box, held = shards[copy.src_name, copy.src_rank]
    for where in itertools.product(*(range(start, stop) for start, stop in copy.src_index)):
      local = tuple(w - start for w, (start, _) in zip(where, box, strict=True))
      offset = [where[axis] - copy.src_index[axis][0] for axis in copy.perm]
      in_view = [o + start for o, (start, _) in zip(offset, copy.dst_index, strict=True)]
      flat = 0
      for index, size in zip(in_view, copy.view, strict=True):
        assert 0 <= index < size
        flat = flat * size + index
      sizes = [stop - start for start, stop in copy.tile]
      element = []
      for size in reversed(sizes):
        flat, rest = divmod(flat, size)
        element.append(rest)
      element = tuple(e + start for e, (start, _) in zip(reversed(element), copy.tile, strict=True))
      values[copy.segment][element] = held[local]
      paint[copy.segment][element] += 1
  return values, paint
