"""One GRPO step of SmolLM2-135M beside TRL's, on the same batch, weights and float32.

    bash benchmarks/install_trl.sh
    python -m benchmarks.train_step_smollm2 --model=models/smollm2-135m-instruct [--smoke]

32 episodes of 160 tokens in groups of 8: a prompt of 100 that the group shares, an action, a tool's
result, an action. Ours is evaluate (old log-probs) + prepare + step, with prompts laid once a row
(the default of `launch.train`) and once an episode; TRL's is its GRPOTrainer's loss, backward, clip
and AdamW, without a pass for old log-probs and with one. They take turns, so that other work on the
machine slows all.
"""

import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.model import Model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.pack import Packed, pack, unpack
from agentrl_jax.rollout.records import Episode, Kind, Outcome, Sample, Segment, Task
from agentrl_jax.types import Aux, TrajectoryBatch
from benchmarks.peer import Peer

MODEL = flags.DEFINE_string("model", "models/smollm2-135m-instruct", "A Hugging Face directory.")
TRL_PYTHON = flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "Made by install_trl.sh.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds, after one that is not.", lower_bound=1)
MICRO_ROWS = flags.DEFINE_integer("micro_rows", 8, "Rows of a micro-batch, for both.")
SMOKE = flags.DEFINE_bool("smoke", False, "One round, nothing written: does it run?")
OUTPUT = flags.DEFINE_string(
  "output", "benchmarks/results/train_step_smollm2.json", "Where results go."
)

ROWS, LENGTH, PROMPT, GROUP = 32, 160, 100, 8
SHARED_LENGTH, SHARED_ROWS = 640, 1  # a row that holds a group; a micro-batch as long as TRL's
Timing = dict[str, float]


def make_episodes(vocabulary: int) -> list[list[Episode]]:
  """Groups of episodes of random tokens, all of the same length; rewards 0 or 1."""
  rng = np.random.default_rng(0)

  def ids(size: int) -> np.ndarray:
    return rng.integers(0, vocabulary, size, dtype=np.int32)

  def action(turn: int, size: int) -> Segment:
    return Segment(Kind.ACTION, ids(size), turn, -np.ones(size), np.zeros(size, int))

  def episode(group: int, member: int, prompt: Segment) -> Episode:
    result, call = int(rng.integers(5, 31)), int(rng.integers(10, 21))
    rest = LENGTH - PROMPT - result - call
    middle = Segment(Kind.OBSERVATION, ids(result))
    name, reward = f"{group}/{member}", float(rng.integers(0, 2))
    sample = Sample((prompt, action(0, call), middle, action(1, rest)), vocabulary, name)
    return Episode(
      task=Task("random", "train", group, {}), trajectory_id=name, group_id=str(group),
      samples=(sample,), reward_parts=({}, {"correct": reward}), turn_rewards=(0.0, reward),
      outcome=Outcome.SUCCESS if reward else Outcome.FAILURE, terminated=True, truncated=False,
    )  # fmt: skip

  prompts = [Segment(Kind.PROMPT, ids(PROMPT)) for _ in range(ROWS // GROUP)]
  return [[episode(g, m, prompt) for m in range(GROUP)] for g, prompt in enumerate(prompts)]


def for_trl(packed: Packed, advantage: np.ndarray) -> dict[str, np.ndarray]:
  """The same batch as TRL's trainer holds it after generation."""
  samples = [one.samples[0] for one in packed.episodes]
  tokens = np.stack([sample.ids for sample in samples]).astype(np.int64)
  action = np.stack([sample.column("action") for sample in samples])
  return {
    "prompt_ids": tokens[:, :PROMPT],
    "prompt_mask": np.ones((ROWS, PROMPT), np.int64),
    "completion_ids": tokens[:, PROMPT:],
    "completion_mask": np.ones((ROWS, LENGTH - PROMPT), np.int64),
    "tool_mask": action[:, PROMPT:].astype(np.int64),
    "advantages": np.array([x.mean() for x in unpack(advantage, packed)]),
  }


def timed(function: Callable[[], Any]) -> tuple[Any, Timing]:
  wall, cpu = time.perf_counter(), time.process_time()
  out = jax.block_until_ready(function())
  return out, {
    "wall_seconds": time.perf_counter() - wall,
    "cpu_seconds": time.process_time() - cpu,
  }


class Ours:
  """State and compiled functions of our side."""

  def __init__(self, model: Model, directory: str, packed: Packed, micro_rows: int):
    mesh, optimizer, algorithm = make_mesh(data=1), adamw(1e-5), grpo()
    self.batch: TrajectoryBatch = jax.tree.map(jnp.asarray, packed.batch)
    self.state = make_state(model, optimizer, mesh, directory=directory)
    self.evaluate = make_evaluate(model, mesh, rows=micro_rows)
    self.prepare = make_prepare(algorithm)
    self.step = make_step(model, optimizer, algorithm, mesh, micro_rows=micro_rows)

  def round(self, name: str) -> dict[str, Timing]:
    policy, evaluate = timed(lambda: self.evaluate(self.state.weights, self.batch))
    loss_batch, prepare = timed(lambda: self.prepare(self.batch, Aux(old_logp=policy.logp)))
    (self.state, metrics), step = timed(lambda: self.step(self.state, loss_batch))
    step |= {key: float(metrics[key].total) for key in ("loss", "gradient_norm")}
    whole = {
      key: evaluate[key] + prepare[key] + step[key] for key in ("wall_seconds", "cpu_seconds")
    }
    return {f"{name} evaluate": evaluate, f"{name} step": step, name: whole}


def peak() -> float:
  """GFLOP/s a CPU-second of a float32 2048 x 2048 product."""
  a = jnp.ones((2048, 2048))
  product = jax.jit(jnp.matmul)
  product(a, a).block_until_ready()
  _, sample = timed(lambda: [product(a, a) for _ in range(4)])
  return 4 * 2 * 2.048**3 / sample["cpu_seconds"]


def median(samples: list[Timing], name: str) -> float:
  return statistics.median(sample[name] for sample in samples)


def main(argv: list[str]) -> None:
  del argv
  if not Path(TRL_PYTHON.value).exists():
    raise SystemExit(f"{TRL_PYTHON.value} is absent: run `bash benchmarks/install_trl.sh`")
  model = load_model(MODEL.value)
  groups = make_episodes(model.config.vocab_size)
  apart = pack(groups, row_length=LENGTH, micro_rows=MICRO_ROWS.value)
  shared = pack(groups, row_length=SHARED_LENGTH, micro_rows=SHARED_ROWS, share_prompts=True)
  ours = {
    "shared": Ours(model, MODEL.value, shared, SHARED_ROWS),
    "apart": Ours(model, MODEL.value, apart, MICRO_ROWS.value),
  }
  zero = jnp.zeros((ROWS, LENGTH), jnp.float32)
  advantage = ours["apart"].prepare(apart.batch, Aux(old_logp=zero)).credit.advantage
  with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "batch.npz"
    np.savez(path, allow_pickle=False, **for_trl(apart, np.asarray(advantage)))
    script = Path(__file__).with_name("train_step_trl.py")
    trl = Peer([TRL_PYTHON.value, "-W", "ignore", script, MODEL.value, path, MICRO_ROWS.value])

    def one_round() -> dict[str, Timing]:
      found: dict[str, Timing] = {}
      for name, side in ours.items():
        found |= side.round(name)
      return found | {"trl step": trl("step"), "trl old": trl("old")}

    first = one_round()  # compiles; weights are equal here
    rounds = []
    for _ in track(range(1 if SMOKE.value else ROUNDS.value), "rounds"):
      rounds.append(one_round())
    peaks = {"jax": peak(), "torch": trl("peak")["gflops"]}
    trl.close()
  report(first, rounds, peaks, trl.about)


def report(
  first: dict[str, Timing],
  rounds: list[dict[str, Timing]],
  peaks: dict[str, float],
  about: dict[str, Any],
) -> None:
  table = Table("part", "CPU-s", "wall s", "CPU-s / TRL's step", "first loss", "gradient norm")
  parts: dict[str, Timing] = {}
  for part in rounds[0]:
    samples = [r[part] for r in rounds]
    parts[part] = {name: median(samples, name) for name in ("cpu_seconds", "wall_seconds")}
    parts[part]["cpu_ratio_to_trl_step"] = statistics.median(
      r[part]["cpu_seconds"] / r["trl step"]["cpu_seconds"] for r in rounds
    )
    values = (first[part].get(name) for name in ("loss", "gradient_norm"))
    numbers = (f"{parts[part][name]:.2f}" for name in parts[part])
    table.add_row(part, *numbers, *("" if v is None else f"{v:.6g}" for v in values))
  memory = {
    "ours, both": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "trl": max(r["trl step"]["peak_bytes"] for r in rounds),
  }
  setting = {
    "episodes": ROWS, "length": LENGTH, "prompt": PROMPT, "micro_rows": MICRO_ROWS.value,
    "load_average": os.getloadavg()[0], "cpus": os.cpu_count(),
    "python": platform.python_version(), "jax": jax.__version__, **about,
  }  # fmt: skip
  Console().print(table)
  Console().print(
    f"matmul peak {peaks['jax']:.0f} (jax), {peaks['torch']:.0f} (torch) GFLOP/s per CPU-second; "
    f"peak memory {memory['ours, both'] / 2**30:.1f} (both of ours) and "
    f"{memory['trl'] / 2**30:.1f} GiB"
  )
  if not SMOKE.value:
    results = {
      "medians": parts, "matmul_gflops_per_cpu_second": peaks, "peak_bytes": memory,
      "first_round": first, "rounds": rounds, "setting": setting,
    }  # fmt: skip
    Path(OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)
