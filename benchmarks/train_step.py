"""One GRPO step of a small Llama beside google-tunix's and TRL's: same shapes, weights and float32.

    bash benchmarks/install_trl.sh && bash benchmarks/install_tunix.sh
    python -m benchmarks.train_step [--smoke]

8 layers of width 256 (MLP 768, 4 heads of 64, 2 of keys and values), a vocabulary of 4096, 32
episodes of 512 tokens in groups of 8 with loss on the last 384. Each side computes loss, gradient,
clipping and AdamW of given completions in a process of its own, whose high-water mark is its
memory, without a pass for old log-probs; the sides take turns, so that other work on the machine
slows all. Ours runs micro-batches, with prompts laid once a group (the default of `launch.train`)
and once an episode; the peers run the whole batch at once and in micro-batches.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax.models import llama
from agentrl_jax.models.decoder import Config
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.model import initialize
from benchmarks.peer import Peer

TRL_PYTHON = flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "Of install_trl.sh.")
TUNIX_PYTHON = flags.DEFINE_string("tunix_python", ".venv-tunix/bin/python", "Of install_tunix.sh.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds, after one that is not.", lower_bound=1)
MICRO_ROWS = flags.DEFINE_integer(
  "micro_rows", 2, "Rows of our micro-batch, prompts apart.", lower_bound=1
)
PEER_ROWS = flags.DEFINE_multi_integer("peer_rows", [32, 4], "Rows of the peers' micro-batches.")
SMOKE = flags.DEFINE_bool("smoke", False, "One round, nothing written: does it run?")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/train_step.json", "Where results go.")

ROWS, LENGTH, PROMPT, GROUP = 32, 512, 128, 8
SHARED_ROWS = 1  # a row holds half a group
OURS = "agentrl_jax"
CONFIG = Config(
  vocab_size=4096, embed=256, ffw=768, layers=8, heads=4, kv_heads=2, head_dim=64,
  max_position=LENGTH, rope_theta=10000.0, norm_epsilon=1e-6, tied=True,
)  # fmt: skip
Sample = dict[str, Any]


def make_model(directory: Path) -> None:
  """Random weights as a Hugging Face directory, with the tokenizer that TRL asks for."""
  model = llama.bind(CONFIG)
  save_weights(model, initialize(model, jax.random.key(0)), directory)
  words = {"<|im_end|>": 0} | {str(i): i for i in range(1, CONFIG.vocab_size)}
  Tokenizer(WordLevel(words, unk_token="<|im_end|>")).save(str(directory / "tokenizer.json"))


def make_batch() -> dict[str, np.ndarray]:
  """Random tokens, a group's prompts alike; rewards 0 or 1; advantages as ours prepares them."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, CONFIG.vocab_size, (ROWS, LENGTH))
  tokens[:, :PROMPT] = np.repeat(tokens[::GROUP, :PROMPT], GROUP, axis=0)
  rewards = rng.integers(0, 2, ROWS).astype(np.float32)
  groups = np.arange(ROWS) // GROUP
  each = rewards.reshape(-1, GROUP)
  centred = each - each.mean(1, keepdims=True)
  advantage = (centred / (each.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)
  return {
    "prompt_ids": tokens[:, :PROMPT],
    "prompt_mask": np.ones((ROWS, PROMPT), np.int64),
    "completion_ids": tokens[:, PROMPT:],
    "completion_mask": np.ones((ROWS, LENGTH - PROMPT), np.int64),
    "tool_mask": np.ones((ROWS, LENGTH - PROMPT), np.int64),
    "advantages": advantage,
    "rewards": rewards,
    "groups": groups,
  }


def peak() -> float:
  """GFLOP/s of a float32 2048 x 2048 product, on all cores, best of four."""
  import time

  a = jnp.ones((2048, 2048))
  product = jax.jit(jnp.matmul)
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * 2.048**3 / min(seconds)


def start(model: Path, batch: Path) -> dict[str, Peer]:
  here = Path(__file__).parent
  ours = [sys.executable, "-m", "benchmarks.train_step_ours", model, batch]
  sides = {
    OURS: Peer([*ours, SHARED_ROWS, "shared"]),
    f"{OURS}, prompts apart": Peer([*ours, MICRO_ROWS.value, "apart"]),
  }
  for rows in PEER_ROWS.value:
    for name, python in (("tunix", TUNIX_PYTHON.value), ("trl", TRL_PYTHON.value)):
      script = here / f"train_step_{name}.py"
      sides[f"{name}, {rows} rows"] = Peer([python, "-W", "ignore", script, model, batch, rows])
  return sides


def main(argv: list[str]) -> None:
  del argv
  for python, script in ((TRL_PYTHON.value, "trl"), (TUNIX_PYTHON.value, "tunix")):
    if not Path(python).exists():
      raise SystemExit(f"{python} is absent: run `bash benchmarks/install_{script}.sh`")
  with tempfile.TemporaryDirectory() as directory:
    model, batch = Path(directory) / "model", Path(directory) / "batch.npz"
    make_model(model)
    np.savez(batch, allow_pickle=False, **make_batch())
    sides = start(model, batch)
    first = {name: side("step") for name, side in sides.items()}  # compiles; equal weights
    rounds: list[dict[str, Sample]] = []
    peaks = []
    for _ in track(range(1 if SMOKE.value else ROUNDS.value), "rounds"):
      rounds.append({name: side("step") for name, side in sides.items()})
      peaks.append(peak())
    for side in sides.values():
      side.close()
  report(first, rounds, max(peaks), {name: side.about for name, side in sides.items()})


def report(
  first: dict[str, Sample], rounds: list[dict[str, Sample]], gflops: float, about: dict[str, Any]
) -> None:
  table = Table("side", "wall s", "CPU-s", "peak GiB", "our wall / its", "our memory / its", "norm")
  measured = ("wall_seconds", "cpu_seconds", "peak_bytes")
  found: dict[str, Sample] = {}
  for name in first:
    found[name] = {key: statistics.median(r[name][key] for r in rounds) for key in measured}
    wall = statistics.median(r[OURS]["wall_seconds"] / r[name]["wall_seconds"] for r in rounds)
    found[name]["our_wall_ratio"] = wall
    found[name]["our_memory_ratio"] = found[OURS]["peak_bytes"] / found[name]["peak_bytes"]
    norm = first[name].get("gradient_norm")
    table.add_row(
      name, f"{found[name]['wall_seconds']:.2f}", f"{found[name]['cpu_seconds']:.2f}",
      f"{found[name]['peak_bytes'] / 2**30:.2f}", f"{wall:.2f}",
      f"{found[name]['our_memory_ratio']:.2f}", "" if norm is None else f"{norm:.6g}",
    )  # fmt: skip
  Console().print(table)
  Console().print(f"float32 matmul of 2048: {gflops:.0f} GFLOP/s on all cores")
  if not SMOKE.value:
    setting = {
      "micro_rows": MICRO_ROWS.value, "load_average": os.getloadavg()[0], "cpus": os.cpu_count(),
      "python": platform.python_version(), "sides": about, "matmul_gflops": gflops,
    }  # fmt: skip
    results = {"medians": found, "first_round": first, "rounds": rounds, "setting": setting}
    Path(OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
    Path(OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)
