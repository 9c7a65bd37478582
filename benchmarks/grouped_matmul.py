"""The grouped matmul of a mixture of experts: `python -m benchmarks.grouped_matmul`.

Forward and gradient on a CPU of rows sorted into groups, in turns: the loop over tiles that the
library takes there, `jax.lax.ragged_dot`, and one matrix for all rows, which is as many
multiply-adds as the rows need. Writes benchmarks/results/grouped_matmul.json.

With `--topology=v5e:2x2` (and `jax[tpu]` installed, no TPU needed) it compiles a layer's experts
ahead of time instead and prints FLOPs as that compiler counts them, over those needed.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from typing import Any

if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.models import moe
from agentrl_jax.models.grouped import block_rows, grouped_matmul, tiles
from agentrl_jax.models.sharding import BATCH, make_mesh

RESULTS = pathlib.Path(__file__).with_name("results") / "grouped_matmul.json"
ROWS, GROUPS, INPUTS, OUTPUTS = 4096, 16, 256, 512


def measure(repeats: int) -> dict[str, object]:
  """Medians of wall and CPU seconds of each form."""
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(ROWS, rng.dirichlet(np.full(GROUPS, 4.0))).astype(np.int32)
  x = jnp.asarray(rng.normal(size=(ROWS, INPUTS)), jnp.float32)
  weight = jnp.asarray(rng.normal(size=(GROUPS, INPUTS, OUTPUTS)), jnp.float32)
  forms = {
    "tiles": lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes)),
    "ragged_dot": lambda x, w: jax.lax.ragged_dot(x, w, jnp.asarray(sizes)),
    "one matrix": lambda x, w: x @ w[0],
  }
  steps = {
    name: jax.jit(jax.grad(lambda x, w, form=form: jnp.sum(jnp.square(form(x, w))), (0, 1)))
    for name, form in forms.items()
  }
  taken = {name: [] for name in steps}
  for turn in range(repeats + 1):
    for name, step in steps.items():
      wall, cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(step(x, weight))
      if turn:  # the first compiles
        taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
  block = block_rows(ROWS, GROUPS)
  work = int(tiles(jnp.asarray(sizes), ROWS, block).count) * block / ROWS
  medians = {
    name: dict(
      zip(("wall_s", "cpu_s"), map(statistics.median, zip(*pairs, strict=True)), strict=True)
    )
    for name, pairs in taken.items()
  }
  return {"rows": ROWS, "groups": GROUPS, "inputs": INPUTS, "outputs": OUTPUTS,
          "work_over_needed": work, **medians}  # fmt: skip


def plan(topology: str, **axes: int) -> None:
  """FLOPs of a layer's experts, forward and with gradient, on all devices over those needed."""
  count = int(np.prod(list(axes.values())))
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:count]
  mesh = make_mesh(devices=devices, **axes)
  rows, length, embed, width, experts, each = 4, 1024, 512, 256, 16, 4

  def array(*shape: int, spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

  weights, tokens = PartitionSpec("expert"), PartitionSpec(*BATCH, None)
  wide = array(experts, embed, width, spec=weights)
  arguments = (
    moe.Experts(gate=wide, up=wide, down=array(experts, width, embed, spec=weights)),
    array(rows, length, embed, spec=tokens),
    array(rows, length, each, spec=tokens, dtype=jnp.int32),
    array(rows, length, each, spec=tokens, dtype=jnp.float32),
  )
  compute = moe.sharded_experts(mesh) if count > 1 else moe.compute_experts

  def loss(weights, x, expert, weight):
    return jnp.sum(jnp.square(compute(weights, x, expert, weight).astype(jnp.float32)))

  needed = 2 * rows * length * each * 3 * embed * width
  for name, function, passes in (("forward", compute, 1), ("gradient", jax.grad(loss, (0, 1)), 3)):
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis: Any = compiled.cost_analysis()
    flops = analysis["flops"] * count
    print(f"{topology} {axes} {name}: {flops / needed / passes:.3f} of the FLOPs needed")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--topology")
  parser.add_argument("--smoke", action="store_true", help="one turn; nothing is written")
  chosen = parser.parse_args()
  if chosen.topology:
    plan(chosen.topology, data=1)
    plan(chosen.topology, expert=2)
    return
  found = measure(1 if chosen.smoke else 5)
  print(json.dumps(found, indent=2))
  if not chosen.smoke:
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
  main()
