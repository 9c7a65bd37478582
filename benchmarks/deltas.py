"""How small a delta of a model is, and how fast it is made and applied, on one core.

    python -m benchmarks.deltas --model=DIR

A step adds +-STEP to every float32 weight, as Adam's first does with that learning rate; weights
are then compared in bfloat16. The float32 weights are drawn from those that round to the model's,
as they lie after some training. MB/s are of the bytes of the weights.
"""

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.transfer.delta import decode, encode, overwrite, xor

MODEL = flags.DEFINE_string("model", None, "Hugging Face directory.", required=True)
STEPS = flags.DEFINE_multi_float("step", [1e-7, 1e-6, 1e-5, 1e-4], "Sizes of a step.")


def main(_) -> None:
  files = TensorFiles(Path(MODEL.value))
  rng = np.random.default_rng(0)
  weights = {name: unrounded(rng, files.read(name)) for name in files.names()}
  for step in STEPS.value:
    pairs = [(as_bytes(w), as_bytes(w + signs(rng, w.shape) * step)) for w in weights.values()]
    nbytes = sum(len(old) for old, _ in pairs)
    changed = sum(np.count_nonzero(a.view("u2") != b.view("u2")) for a, b in pairs) / (nbytes / 2)
    for how in (xor, overwrite):
      start = time.perf_counter()
      made = [encode(how, new, old, 2) for old, new in pairs]
      middle = time.perf_counter()
      for (encoding, data), (old, new) in zip(made, pairs, strict=True):
        assert (decode(encoding, np.frombuffer(data, np.uint8), old, 2) == new).all()
      end = time.perf_counter()
      share = sum(len(data) for _, data in made) / nbytes
      print(
        f"step {step:g}: {changed:.4f} of the elements change, {how.__name__} is {share:.4f} of "
        f"{nbytes / 1e6:.0f} MB, made at {nbytes / 1e6 / (middle - start):.0f} MB/s, applied at "
        f"{nbytes / 1e6 / (end - middle):.0f} MB/s"
      )


def unrounded(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
  """float32 values that round to these in bfloat16: their lower 16 bits are drawn."""
  size = np.abs(array.astype(np.float32)).view(np.int32).astype(np.int64)
  size = np.maximum(size + rng.integers(-(1 << 15), 1 << 15, size.shape), 0)
  return np.copysign(size.astype(np.int32).view(np.float32), array.astype(np.float32))


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  return rng.integers(0, 2, shape).astype(np.float32) * 2 - 1


def as_bytes(array: np.ndarray) -> np.ndarray:
  return array.astype(jnp.bfloat16).reshape(-1).view(np.uint8)


if __name__ == "__main__":
  app.run(main)
