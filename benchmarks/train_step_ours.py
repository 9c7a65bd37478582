"""This project's side of benchmarks/train_step.py.

    python -m benchmarks.train_step_ours MODEL BATCH.npz MICRO_ROWS

Gradient, clipping and AdamW update of `make_step`. For each line read from stdin it makes a step
and answers with a line of JSON.
"""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux, TrajectoryBatch


def packed(batch: dict[str, np.ndarray]) -> TrajectoryBatch:
  """A row an episode, one turn each, in groups of 8 with the rewards of `batch`."""
  tokens = np.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1)
  rows, length = tokens.shape
  column = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], tokens.shape)
  action = column >= batch["prompt_ids"].shape[1]
  return TrajectoryBatch(
    tokens=jnp.asarray(tokens, jnp.int32),
    position=jnp.asarray(column),
    sample=jnp.asarray(row),
    traj=jnp.asarray(row),
    turn=jnp.asarray(np.where(action, row, -1)),
    action=jnp.asarray(action),
    behavior_logp=jnp.zeros(tokens.shape),
    behavior_version=jnp.where(action, 0, -1),
    turn_reward=jnp.asarray(batch["rewards"], jnp.float32),
    turn_traj=jnp.arange(rows),
    traj_group=jnp.asarray(batch["groups"], jnp.int32),
    traj_truncated=jnp.zeros(rows, bool),
  )


def main() -> None:
  directory, path, micro_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
  given = dict(np.load(path))
  batch = packed(given)
  model, mesh, optimizer, algorithm = load_model(directory), make_mesh(), adamw(1e-5), grpo()
  state = make_state(model, optimizer, mesh, directory=directory)
  aux = Aux(old_logp=jnp.asarray(given["old_logp"]))
  loss_batch = make_prepare(algorithm)(batch, aux)
  step = make_step(model, optimizer, algorithm, mesh, micro_rows=micro_rows)
  print(json.dumps({"versions": {"jax": jax.__version__}}), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    state, metrics = jax.block_until_ready(step(state, loss_batch))
    answer = {
      "wall_seconds": time.perf_counter() - wall,
      "cpu_seconds": time.process_time() - cpu,
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    answer |= {name: float(metrics[name].total) for name in ("loss", "gradient_norm")}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
