"""Seconds of a reinforcement learning step on a 0.6M-parameter model, and where they go.

    python -m benchmarks.tiny_rl [--model=DIRECTORY] [--smoke]
    bash benchmarks/install_trl.sh && python -m benchmarks.tiny_rl --trl_python=.venv-trl/bin/python

Each step is 128 episodes in groups of 8 and four updates:

- `mpo`: the step of `experiments/mpo`, turns with environments and a critic of its own;
- `grpo`: the same without the critic, as that experiment's arm;
- `one_turn`: GRPO on one turn of 54 tokens after a prompt of 10, an environment that counts words.

`mpo` and `grpo` lie as in the experiment, micro-batches of one row of 256 positions, and once more
as wide as the episodes are (`*_short_rows`): a row each, four of them a micro-batch. Without
`--model` the model is new, so that nearly every episode runs to the limit of 64 tokens. The first
two rounds compile and are left out; medians are of the others. One more step of `mpo` runs under
the profiler, which slows Python down, so its seconds are shares only. With `--trl_python` TRL's
GRPOTrainer takes turns with ours: one turn, and turns with the same environment, see
`tiny_rl_trl.py`. It has no critic.
"""

import contextlib
import cProfile
import dataclasses
import json
import os
import platform
import pstats
import random
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
from agentrl_jax.envs.datasets import TaskSource
from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.experiment import Experiment, Taskset
from agentrl_jax.orchestrate.metrics import Progressing, read_metrics
from agentrl_jax.orchestrate.run import Run, open_run
from agentrl_jax.orchestrate.sync_loop import take_step
from agentrl_jax.rollout.environment import Action, Malformed, Message, Opening, Step
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.rollout.records import Task
from agentrl_jax.rollout.symbols import SymbolRenderer
from benchmarks.peer import Peer
from experiments.mpo import config
from launch import command

MODEL = flags.DEFINE_string("model", None, "A model of turn_chain's symbols; default: a new one.")
TRL_PYTHON = flags.DEFINE_string("trl_python", None, "Of install_trl.sh: compare with TRL.")
STEPS = flags.DEFINE_integer("steps", 5, "Measured steps.", lower_bound=1)
SMOKE = flags.DEFINE_bool("smoke", False, "Small, one step: does it run? Nothing is written.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/tiny_rl.json", "JSON file.")
COMPILING = 2
PROMPT, CONTEXT, TURN = 10, 64, 6  # tokens
SHORT = CONTEXT + 2  # positions of a row for one episode, as many as `Experiment` asks for
TOGETHER = 4  # rows of a micro-batch then: as many episodes as one of 256 holds
AREAS = ("sampler", "rollout", "envs", "orchestrate", "learner", "transfer", "models")
# Whose step is how many times which of ours.
PEERS = {"trl_one_turn": "one_turn", "trl_turns": "grpo"}
Seconds = dict[str, list[dict[str, float]]]


def experiments(model: str, smoke: bool) -> dict[str, Experiment]:
  """What is measured, by name."""
  found = {}
  for arm in ("mpo", "grpo"):
    planned = config.experiment(arm, "smoke" if smoke else "cpu")
    planned.model, planned.checkpoint_every = model, 1_000
    found[arm] = fdl.build(planned)
  for arm in ("mpo", "grpo"):
    found[f"{arm}_short_rows"] = _in_short_rows(found[arm])
  grpo = found["grpo"]
  limits = Limits(turn_tokens=CONTEXT - PROMPT, context_tokens=CONTEXT + 1)
  one_turn = dataclasses.replace(grpo, tasks=words(len(grpo.tasks.train.tasks)), limits=limits)
  return found | {"one_turn": _in_short_rows(one_turn)}


def _in_short_rows(experiment: Experiment) -> Experiment:
  batch = experiment.batch
  episodes = batch.groups * batch.members
  return dataclasses.replace(
    experiment,
    batch=dataclasses.replace(batch, row_length=SHORT, micro_rows=TOGETHER, least_rows=episodes),
  )


def words(count: int) -> Taskset:
  """Tasks of one turn after a prompt of random symbols; the reward counts different words."""
  draw = random.Random(0)
  tasks = [
    Task("words", "train", i, {"prompt": " ".join(draw.choices(turn_chain.SYMBOLS[1:], k=PROMPT))})
    for i in range(count)
  ]

  async def build(task: Task) -> Opening:
    return Opening(_Words(), [Message("user", task.params["prompt"])], (), 1, "")

  def renderer(directory: Path) -> SymbolRenderer:
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    made = SymbolRenderer(
      turn_chain.SYMBOLS,
      end=turn_chain.END,
      read=turn_chain.read_words,
      write=turn_chain.write_words,
      vocab_size=size,
    )
    made.stop_token_ids = ()  # every turn is as long as it may be
    return made

  return Taskset(
    build, TaskSource(tasks, 0), (), renderer, lambda parts: parts.get("words", 0.0), CONTEXT
  )


class _Words:
  async def step(self, action: Action) -> Step:
    assert isinstance(action, Malformed)  # nothing stops it, so it runs out of tokens
    return Step((), {"words": float(len(set(action.text.split())))}, terminated=True)

  async def cut(self, reason: str) -> Step:
    raise AssertionError(f"a turn of one is not cut, but met {reason}")

  async def close(self) -> None:
    pass


async def measure(
  planned: Mapping[str, Experiment], workdir: Path, rounds: int, peers: Mapping[str, Peer]
) -> dict[str, Any]:
  """Wall and CPU seconds of each kind of step, in turn round by round; ours with the loop's own
  laps, and one step's profile.
  """
  seconds: Seconds = {name: [] for name in (*planned, *peers)}
  with Progressing(Console(quiet=True)) as progress:
    async with contextlib.AsyncExitStack() as opened:
      runs: dict[str, Run] = {}
      for name, experiment in planned.items():
        runs[name] = await opened.enter_async_context(
          open_run(experiment, workdir / name, progress)
        )
      for _ in range(COMPILING + rounds):
        for name, run in runs.items():
          start = time.monotonic(), time.process_time()
          await take_step(run)
          wall, cpu = time.monotonic() - start[0], time.process_time() - start[1]
          seconds[name].append({"wall_seconds": wall, "cpu_seconds": cpu})
        for name, peer in peers.items():
          seconds[name].append(peer("step"))
      profile = cProfile.Profile()
      profile.enable()
      await take_step(runs["mpo"])
      profile.disable()
  found: dict[str, Any] = {name: medians(seconds[name]) for name in seconds}
  for name in planned:
    rows = read_metrics(workdir / name / "metrics.jsonl")[COMPILING : COMPILING + rounds]
    laps = [lap for lap in rows[0] if lap.startswith("seconds/")]
    found[name]["phases"] = {
      lap.removeprefix("seconds/"): statistics.median(row[lap] for row in rows) for lap in laps
    }
    for key in ("context_tokens", "turns"):
      found[name][f"{key}_an_episode"] = statistics.median(row[key] for row in rows)
  for name, peer in peers.items():
    found[name] |= peer.about | {"over_ours": over(seconds, name, PEERS[name])}
    short = f"{PEERS[name]}_short_rows"
    if short in planned:
      found[name]["over_ours_short_rows"] = over(seconds, name, short)
  return {"steps": found, "profile": shares(profile)}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
  names = ("wall_seconds", "cpu_seconds")
  return {name: statistics.median(row[name] for row in rows[COMPILING:]) for name in names}


def over(seconds: Seconds, theirs: str, ours: str) -> dict[str, float]:
  """How many times ours a peer's seconds are: the median over rounds."""
  pairs = list(zip(seconds[theirs], seconds[ours], strict=True))[COMPILING:]
  return {
    name: statistics.median(t[name] / o[name] for t, o in pairs)
    for name in ("wall_seconds", "cpu_seconds")
  }


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
  with tempfile.TemporaryDirectory() as scratch:
    directory = Path(MODEL.value) if MODEL.value else Path(scratch) / "model"
    if MODEL.value is None:
      tiny.symbol_llama(turn_chain.SYMBOLS)(directory)
    peers: dict[str, Peer] = {}
    if TRL_PYTHON.value:
      script = Path(__file__).with_name("tiny_rl_trl.py")
      started = ["env", f"PYTHONPATH={script.parents[1]}", TRL_PYTHON.value, "-W", "ignore"]
      for name, what, *sizes in (
        ("trl_one_turn", "words", PROMPT, CONTEXT - PROMPT),
        ("trl_turns", "turn_chain", TURN, CONTEXT),
      ):
        peers[name] = Peer([*started, script, directory, what, *sizes])
    planned = experiments(str(directory), SMOKE.value)
    rounds = 1 if SMOKE.value else STEPS.value
    found = command.run_async(measure(planned, Path(scratch) / "runs", rounds, peers))
    for peer in peers.values():
      peer.close()
  if not SMOKE.value:
    about = {"model": MODEL.value, "cores": len(os.sched_getaffinity(0))}
    about |= {"load": os.getloadavg()[0], "machine": platform.machine()}
    Path(OUTPUT.value).write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
  report(found)
  return 0


def report(found: Mapping[str, Any]) -> None:
  names = ("rollout", "evaluate", "update", "publish")
  table = Table("step", "wall s", "CPU-s", *names, "tokens", "turns", box=None)
  for step, row in found["steps"].items():
    laps = [f"{row['phases'][name]:.2f}" if "phases" in row else "" for name in names]
    sizes = [f"{row[key]:.1f}" if key in row else "" for key in _SIZES]
    table.add_row(step, f"{row['wall_seconds']:.2f}", f"{row['cpu_seconds']:.2f}", *laps, *sizes)
  console = Console(highlight=False)
  console.print(table)
  for step, ours in PEERS.items():
    for key, name in (("over_ours", ours), ("over_ours_short_rows", f"{ours}_short_rows")):
      if key in found["steps"].get(step, {}):
        times = found["steps"][step][key]
        wall, cpu = times["wall_seconds"], times["cpu_seconds"]
        console.print(f"{step} takes {wall:.1f} times the wall seconds of {name}, {cpu:.1f} CPU-s")
  parts = ", ".join(f"{name} {share:.0%}" for name, share in found["profile"].items())
  console.print(f"profile of mpo: {parts}")


_SIZES = ("context_tokens_an_episode", "turns_an_episode")


if __name__ == "__main__":
  command.run(main)
