"""This project's side of benchmarks/train_step.py.

    python -m benchmarks.train_step_ours MODEL BATCH.npz MICRO_ROWS apart|shared

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

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.pack import pack
from agentrl_jax.rollout.records import Episode, Kind, Outcome, Sample, Segment, Task
from agentrl_jax.types import Aux, TrajectoryBatch

MEMBERS = 4  # of a group in one row that shares the prompt


def episodes(batch: dict[str, np.ndarray]) -> list[list[Episode]]:
  """Groups of episodes of one turn."""
  groups: dict[int, list[Episode]] = {}
  for row, group in enumerate(batch["groups"].tolist()):
    ids, made = batch["prompt_ids"][row], batch["completion_ids"][row]
    size = len(made)
    prompt = Segment(Kind.PROMPT, ids.astype(np.int32))
    action = Segment(
      Kind.ACTION, made.astype(np.int32), 0, np.zeros(size), np.zeros(size, np.int64)
    )
    name, reward = str(row), float(batch["rewards"][row])
    one = Episode(
      task=Task("random", "train", group, {}), trajectory_id=name, group_id=str(group),
      samples=(Sample((prompt, action), 1 << 30, name),),
      reward_parts=({"correct": reward},), turn_rewards=(reward,),
      outcome=Outcome.SUCCESS if reward else Outcome.FAILURE, terminated=True, truncated=False,
    )  # fmt: skip
    groups.setdefault(group, []).append(one)
  return list(groups.values())


def packed(batch: dict[str, np.ndarray], layout: str, micro_rows: int) -> TrajectoryBatch:
  """A row an episode (`apart`), or one for MEMBERS of a group, the prompt laid once (`shared`)."""
  groups = episodes(batch)
  prompt, made = (batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
  # The last id of the prompt, which the first action is read from, is each episode's own.
  together = prompt - 1 + MEMBERS * (made + 1)
  length = together if layout == "shared" else prompt + made
  found = pack(groups, row_length=length, micro_rows=micro_rows, share_prompts=layout == "shared")
  return jax.tree.map(jnp.asarray, found.batch)


def main() -> None:
  directory, path, micro_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
  batch = packed(dict(np.load(path)), sys.argv[4], micro_rows)
  model, mesh, optimizer, algorithm = load_model(directory), make_mesh(), adamw(1e-5), grpo()
  state = make_state(model, optimizer, mesh, directory=directory)
  policy = make_evaluate(model, mesh, rows=micro_rows)(state.weights, batch)
  loss_batch = make_prepare(algorithm)(batch, Aux(old_logp=policy.logp))
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
