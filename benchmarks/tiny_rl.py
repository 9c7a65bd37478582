"""Seconds of a reinforcement learning step on a 0.6M-parameter model, and where they go.

    python -m benchmarks.tiny_rl [--model=DIRECTORY] [--arm=mpo] [--smoke]
    bash benchmarks/install_trl.sh && python -m benchmarks.tiny_rl --trl_python=.venv-trl/bin/python

128 episodes a step, four updates, a critic of its own: the step of `experiments/mpo`. Without
`--model` the model is new, so that every episode runs to the limit of 64 tokens. The first two
steps compile and are left out; medians are of the others. One more step runs under the profiler,
which slows Python down, so its seconds are shares only. With `--trl_python` TRL's GRPOTrainer takes
turns with ours: completions of as many tokens by its own generate, in one turn and without
environments and critic, and as many updates.
"""

import cProfile
import json
import os
import platform
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
from absl import flags
from rich.console import Console
from rich.table import Table

from agentrl_jax.envs import turn_chain
from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import Progressing, read_metrics
from agentrl_jax.orchestrate.run import open_run
from agentrl_jax.orchestrate.sync_loop import take_step
from benchmarks.peer import Peer
from experiments.mpo import config
from launch import command

MODEL = flags.DEFINE_string("model", None, "A model of turn_chain's symbols; default: a new one.")
ARM = flags.DEFINE_enum("arm", "mpo", list(config.ARMS), "Whose step.")
TRL_PYTHON = flags.DEFINE_string("trl_python", None, "Of install_trl.sh: compare with TRL.")
STEPS = flags.DEFINE_integer("steps", 5, "Measured steps.", lower_bound=1)
SMOKE = flags.DEFINE_bool("smoke", False, "Small, one step: does it run? Nothing is written.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/tiny_rl.json", "JSON file.")
COMPILING = 2
PROMPT_TOKENS = 10  # of the peer; the rest of our limit is its completion
AREAS = ("sampler", "rollout", "envs", "orchestrate", "learner", "transfer", "models")


async def measure(
  experiment: Experiment, workdir: Path, steps: int, peer: Peer | None
) -> dict[str, Any]:
  """Wall and CPU seconds of each step, the loop's own laps, and one step's profile; and of a peer,
  which takes turns.
  """
  wall, cpu, theirs = [], [], []
  with Progressing(Console(quiet=True)) as progress:
    async with open_run(experiment, workdir, progress) as run:
      for _ in range(COMPILING + steps):
        start = time.monotonic(), time.process_time()
        await take_step(run)
        wall.append(time.monotonic() - start[0])
        cpu.append(time.process_time() - start[1])
        if peer is not None:
          theirs.append(peer("step"))
      profile = cProfile.Profile()
      profile.enable()
      await take_step(run)
      profile.disable()
  rows = read_metrics(workdir / "metrics.jsonl")[COMPILING : COMPILING + steps]
  phases = [name for name in rows[0] if name.startswith("seconds/")]
  versus = {} if peer is None else {"trl": compared(wall, cpu, theirs) | peer.about}
  return versus | {
    "wall_seconds": statistics.median(wall[COMPILING:]),
    "cpu_seconds": statistics.median(cpu[COMPILING:]),
    "phases": {n.removeprefix("seconds/"): statistics.median(r[n] for r in rows) for n in phases},
    "tokens_an_episode": statistics.median(r["context_tokens"] for r in rows),
    "profile": shares(profile),
  }


def compared(
  wall: Sequence[float], cpu: Sequence[float], theirs: Sequence[Mapping[str, float]]
) -> dict[str, float]:
  """A peer's medians and how many times ours they are, round by round."""
  found = {}
  for name, ours in (("wall_seconds", wall), ("cpu_seconds", cpu)):
    pairs = [(t[name], o) for t, o in zip(theirs, ours, strict=True)][COMPILING:]
    found[name] = statistics.median(t for t, _ in pairs)
    found[f"{name}_over_ours"] = statistics.median(t / o for t, o in pairs)
  return found


def shares(profile: cProfile.Profile) -> dict[str, float]:
  """Share of the time within functions of each part of the package, and of what they stand on."""
  total: dict[str, float] = defaultdict(float)
  for (path, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # pyright: ignore
    part = next((a for a in AREAS if f"agentrl_jax/{a}/" in path), None)
    if part is None:
      named = ("jax", "asyncio", "numpy")
      part = next((n for n in named if f"/{n}/" in path or n in name), "other")
    total[part] += own
  whole = sum(total.values())
  return {part: own / whole for part, own in sorted(total.items(), key=lambda item: -item[1])}


def main(arguments: object) -> int:
  del arguments
  planned = config.experiment(ARM.value, "smoke" if SMOKE.value else "cpu")
  planned.checkpoint_every = 1_000
  with tempfile.TemporaryDirectory() as scratch:
    directory = Path(MODEL.value) if MODEL.value else Path(scratch) / "model"
    if MODEL.value is None:
      tiny.symbol_llama(turn_chain.SYMBOLS)(directory)
    planned.model = str(directory)
    steps = 1 if SMOKE.value else STEPS.value
    peer = None
    if TRL_PYTHON.value:
      script = Path(__file__).with_name("tiny_rl_trl.py")
      tokens = planned.limits.context_tokens - PROMPT_TOKENS
      peer = Peer([TRL_PYTHON.value, "-W", "ignore", script, directory, PROMPT_TOKENS, tokens])
    found = command.run_async(measure(fdl.build(planned), Path(scratch) / "run", steps, peer))
    if peer is not None:
      peer.close()
  report(found)
  if not SMOKE.value:
    about = {"arm": ARM.value, "model": MODEL.value, "cores": len(os.sched_getaffinity(0))}
    about |= {"load": os.getloadavg()[0], "machine": platform.machine()}
    Path(OUTPUT.value).write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
  return 0


def report(found: dict[str, Any]) -> None:
  table = Table("", "seconds", box=None)
  for name in ("wall_seconds", "cpu_seconds"):
    table.add_row(name.replace("_", " "), f"{found[name]:.2f}")
  for name, seconds in found["phases"].items():
    table.add_row(f"  {name}", f"{seconds:.2f}")
  console = Console(highlight=False)
  console.print(table)
  if "trl" in found:
    times = found["trl"]["wall_seconds_over_ours"], found["trl"]["cpu_seconds_over_ours"]
    console.print("TRL takes {:.1f} times our wall seconds, {:.1f} times our CPU-s".format(*times))
  parts = ", ".join(f"{name} {share:.0%}" for name, share in found["profile"].items())
  console.print(f"tokens an episode {found['tokens_an_episode']:.0f}; profile: {parts}")


if __name__ == "__main__":
  command.run(main)
