"""One GRPO step of SmolLM2-135M beside TRL's, on the same batch, weights and float32.

    bash benchmarks/install_trl.sh
    python -m benchmarks.train_step --model=models/smollm2-135m-instruct [--smoke]

32 sequences of 160 tokens, 16 to 60 of them sampled. Ours is evaluate (old log-probs) + prepare +
step; TRL's is its GRPOTrainer's loss, backward, clip and AdamW, without a pass for old log-probs
and with one. The two take turns, so that other work on the machine slows both.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
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
from rich.table import Table

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.model import Model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux, TrajectoryBatch

MODEL = flags.DEFINE_string("model", "models/smollm2-135m-instruct", "A Hugging Face directory.")
TRL_PYTHON = flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "Made by install_trl.sh.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds, after one that is not.", lower_bound=1)
MICRO_ROWS = flags.DEFINE_integer("micro_rows", 8, "Rows of a micro-batch, for both.")
SMOKE = flags.DEFINE_bool("smoke", False, "One round, nothing written: does it run?")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/train_step.json", "Where results go.")

ROWS, LENGTH, PROMPT, GROUP = 32, 160, 100, 8
Sample = dict[str, float]


def make_batch(vocabulary: int) -> TrajectoryBatch:
  """Full rows: a prompt, then sampled tokens with tool results among them; rewards 0 or 1."""
  rng = np.random.default_rng(0)
  action = np.zeros((ROWS, LENGTH), bool)
  for row in action:
    row[PROMPT + rng.permutation(LENGTH - PROMPT)[: rng.integers(16, 61)]] = True
  index = np.broadcast_to(np.arange(ROWS, dtype=np.int32)[:, None], (ROWS, LENGTH))
  fields = dict(
    tokens=rng.integers(0, vocabulary, (ROWS, LENGTH), dtype=np.int32),
    position=np.broadcast_to(np.arange(LENGTH, dtype=np.int32)[None], (ROWS, LENGTH)),
    sample=index,
    traj=index,
    turn=np.where(action, index, -1).astype(np.int32),
    action=action,
    behavior_logp=np.zeros((ROWS, LENGTH), np.float32),
    behavior_version=np.zeros((ROWS, LENGTH), np.int32),
    turn_reward=rng.integers(0, 2, ROWS).astype(np.float32),
    turn_traj=np.arange(ROWS, dtype=np.int32),
    traj_group=(np.arange(ROWS) // GROUP).astype(np.int32),
    traj_truncated=np.zeros(ROWS, bool),
  )
  return TrajectoryBatch(**jax.tree.map(jnp.asarray, fields))


def for_trl(batch: TrajectoryBatch, advantage: np.ndarray) -> dict[str, np.ndarray]:
  """The same batch as TRL's trainer holds it after generation."""
  completion = np.ones((ROWS, LENGTH - PROMPT), np.int64)
  tokens = np.asarray(batch.tokens, np.int64)
  return {
    "prompt_ids": tokens[:, :PROMPT],
    "prompt_mask": np.ones((ROWS, PROMPT), np.int64),
    "completion_ids": tokens[:, PROMPT:],
    "completion_mask": completion,
    "tool_mask": np.asarray(batch.action[:, PROMPT:], np.int64),
    "advantages": np.where(batch.action, advantage, 0).sum(1) / batch.action.sum(1),
  }


class Trl:
  """TRL's process, driven a line at a time."""

  def __init__(self, python: str, model: str, batch: Path, micro_rows: int):
    script = Path(__file__).with_name("train_step_trl.py")
    self._process = subprocess.Popen(
      [python, "-W", "ignore", script, model, batch, str(micro_rows)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    self.about = self._read()

  def __call__(self, command: str) -> Sample:
    assert self._process.stdin is not None
    self._process.stdin.write(command + "\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(timeout=60)

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      if line.startswith("{"):  # its libraries may print as well
        return json.loads(line)
    raise RuntimeError(f"TRL's process ended with code {self._process.wait()}")


def timed(function: Callable[[], Any]) -> tuple[Any, Sample]:
  wall, cpu = time.perf_counter(), time.process_time()
  out = jax.block_until_ready(function())
  return out, {
    "wall_seconds": time.perf_counter() - wall,
    "cpu_seconds": time.process_time() - cpu,
  }


class Ours:
  """State and compiled functions of our side."""

  def __init__(self, model: Model, directory: str, batch: TrajectoryBatch, micro_rows: int):
    mesh, optimizer, algorithm = make_mesh(data=1), adamw(1e-5), grpo()
    self.batch = batch
    self.state = make_state(model, optimizer, mesh, directory=directory)
    self.evaluate = make_evaluate(model, mesh, rows=micro_rows)
    self.prepare = make_prepare(algorithm)
    self.step = make_step(model, optimizer, algorithm, mesh, micro_rows=micro_rows)

  def round(self) -> dict[str, Sample]:
    policy, evaluate = timed(lambda: self.evaluate(self.state.weights, self.batch))
    loss_batch, prepare = timed(lambda: self.prepare(self.batch, Aux(old_logp=policy.logp)))
    (self.state, metrics), step = timed(lambda: self.step(self.state, loss_batch))
    step |= {name: float(metrics[name].total) for name in ("loss", "gradient_norm")}
    whole = {
      name: evaluate[name] + prepare[name] + step[name] for name in ("wall_seconds", "cpu_seconds")
    }
    return {"evaluate": evaluate, "prepare": prepare, "step": step, "whole": whole}


def peak() -> float:
  """GFLOP/s a CPU-second of a float32 2048 x 2048 product."""
  a = jnp.ones((2048, 2048))
  product = jax.jit(jnp.matmul)
  product(a, a).block_until_ready()
  _, sample = timed(lambda: [product(a, a) for _ in range(4)])
  return 4 * 2 * 2.048**3 / sample["cpu_seconds"]


def gflop(model: Model, sampled: int) -> dict[str, float]:
  """Matmul work: layers for all tokens and head for sampled ones; backward is twice forward."""
  config = model.config
  width = config.heads * config.head_dim + config.kv_heads * config.head_dim
  layer = 2 * config.embed * width + 3 * config.embed * config.ffw
  attention = 2 * LENGTH * config.heads * config.head_dim  # scores and mixing, unmasked
  forward = 2 * config.layers * (layer + attention) * ROWS * LENGTH
  forward += 2 * config.embed * config.vocab_size * sampled
  return {"evaluate": forward / 1e9, "step": 3 * forward / 1e9}


def median(samples: list[Sample], name: str) -> float:
  return statistics.median(sample[name] for sample in samples)


def main(argv: list[str]) -> None:
  del argv
  if not Path(TRL_PYTHON.value).exists():
    raise SystemExit(f"{TRL_PYTHON.value} is absent: run `bash benchmarks/install_trl.sh`")
  model = load_model(MODEL.value)
  batch = make_batch(model.config.vocab_size)
  ours = Ours(model, MODEL.value, batch, MICRO_ROWS.value)
  zero = jnp.zeros((ROWS, LENGTH), jnp.float32)
  advantage = np.asarray(ours.prepare(batch, Aux(old_logp=zero)).credit.advantage)
  with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "batch.npz"
    np.savez(path, allow_pickle=False, **for_trl(batch, advantage))
    trl = Trl(TRL_PYTHON.value, MODEL.value, path, MICRO_ROWS.value)
    first = {"ours": ours.round()["step"], "trl": trl("step")}  # compiles; weights are equal here
    rounds: list[dict[str, Sample]] = []
    for _ in range(1 if SMOKE.value else ROUNDS.value):
      rounds.append(ours.round() | {"trl step": trl("step"), "trl old": trl("old")})
    peaks = {"jax": peak(), "torch": trl("peak")["gflops"]}
    trl.close()
  report(model, int(batch.action.sum()), first, rounds, peaks, trl.about)


def report(
  model: Model,
  sampled: int,
  first: dict[str, Sample],
  rounds: list[dict[str, Sample]],
  peaks: dict[str, float],
  about: dict[str, Any],
) -> None:
  table = Table("part", "CPU-s", "wall s", "GFLOP/s per CPU-s")
  work = gflop(model, sampled)
  work |= {"whole": work["evaluate"] + work["step"], "trl step": work["step"]}
  medians = {
    part: {
      name: median([r[part] for r in rounds], name) for name in ("cpu_seconds", "wall_seconds")
    }
    for part in rounds[0]
  }
  for part, sample in medians.items():
    rate = f"{work[part] / sample['cpu_seconds']:.0f}" if part in work else ""
    table.add_row(part, f"{sample['cpu_seconds']:.2f}", f"{sample['wall_seconds']:.2f}", rate)
  ratio = statistics.median(
    r["whole"]["cpu_seconds"] / r["trl step"]["cpu_seconds"] for r in rounds
  )
  memory = {
    "ours": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "trl": max(r["trl step"]["peak_bytes"] for r in rounds),
  }
  results = {
    "medians": medians, "cpu_ratio_ours_to_trl": ratio, "matmul_gflops_per_cpu_second": peaks,
    "matmul_gflop": work, "peak_bytes": memory, "first_step": first, "rounds": rounds,
    "setting": {"rows": ROWS, "length": LENGTH, "sampled": sampled, "micro_rows": MICRO_ROWS.value,
                "load_average": os.getloadavg()[0], "cpus": os.cpu_count(),
                "python": platform.python_version(), "jax": jax.__version__, **about},
  }  # fmt: skip
  console = Console()
  console.print(table)
  console.print(
    f"ours / TRL (no pass for old log-probs): {ratio:.2f} CPU-seconds (bar: at most 1.0); "
    f"matmul peak {peaks['jax']:.0f} (jax), {peaks['torch']:.0f} (torch) GFLOP/s per CPU-s; "
    f"peak memory {memory['ours'] / 2**30:.1f} and {memory['trl'] / 2**30:.1f} GiB"
  )
  for name in ("loss", "gradient_norm"):
    console.print(f"first step, {name}: {first['ours'][name]:.6g} and {first['trl'][name]:.6g}")
  if not SMOKE.value:
    Path(OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)
