"""Small whole runs of `launch.sft` and `launch.train`, and how to read what they wrote.

Configurations, for `--config=config:tests.launch.small_runs.NAME`, apart from the tests, as those
import commands, whose flags exist once a process.
"""

import json
import os
import pathlib
import subprocess
import time

import fiddle as fdl

from agentrl_jax.learner import checkpoint
from agentrl_jax.orchestrate import tiny
from configs import tiny_rl, tiny_sft

STEPS = 4


def experiment():
  """Four steps of four groups of four episodes on a tiny model, a checkpoint every two."""
  config = tiny_rl()
  config.model = os.environ["AGENTRL_TEST_MODEL"]
  config.tasks.data_dir = os.environ["AGENTRL_TEST_DATA"]
  config.tasks.train_tasks, config.tasks.held_out_tasks = 64, 8
  config.steps, config.concurrency, config.checkpoint_every = STEPS, 16, 2
  config.engine.slots = 16
  config.batch.groups, config.batch.members = 4, 4
  config.batch.row_length, config.batch.micro_rows, config.batch.only_mixed = 160, 4, False
  config.evaluation.tasks, config.evaluation.samples = 4, 2
  config.limits.turn_tokens = 8
  return config


def supervised():
  """Enough of the task's form for rewards to differ."""
  config = tiny_sft()
  config.model = os.environ["AGENTRL_TEST_MODEL"] + "-base"
  config.make_model = fdl.Config(
    tiny.tiny_llama, vocab_size=300, embed=64, layers=2, heads=2, kv_heads=1, ffw=128
  )
  config.episodes.tasks.data_dir = os.environ["AGENTRL_TEST_DATA"]
  config.episodes.tasks.train_tasks, config.episodes.tasks.held_out_tasks = 64, 8
  config.episodes.count, config.steps, config.episodes_per_step = 64, 60, 16
  config.row_length, config.micro_rows = 160, 4
  return config


def command(workdir: pathlib.Path, *more: str) -> list[str]:
  config = "--config=config:tests.launch.small_runs.experiment"
  return ["launch.train", config, f"--workdir={workdir}", *more]


def wait_for_steps(process: subprocess.Popen, workdir: pathlib.Path, steps: int) -> None:
  """Until the run has recorded so many."""
  metrics = workdir / "metrics.jsonl"
  deadline = time.monotonic() + 240
  while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
    assert process.poll() is None, process.communicate()[0][-3000:]
    assert time.monotonic() < deadline, f"no {steps} steps within 240 s"
    time.sleep(0.02)


def wait_for_checkpoint(process: subprocess.Popen, workdir: pathlib.Path) -> int:
  """Until the run has a complete one; after how many steps it is."""
  deadline = time.monotonic() + 240
  while (path := checkpoint.latest(workdir / "checkpoints")) is None:
    assert process.poll() is None, process.communicate()[0][-3000:]
    assert time.monotonic() < deadline, "no checkpoint within 240 s"
    time.sleep(0.02)
  return checkpoint.read_host(path).weight_version


def rows(workdir: pathlib.Path) -> list[dict]:
  """The metrics without clocks."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith("seconds/")} for line in lines
  ]


def episodes(workdir: pathlib.Path) -> list[dict]:
  """Every episode of every step, without clocks."""
  found = []
  for path in sorted((workdir / "trajectories").glob("step_??????.jsonl")):
    found += [json.loads(line) | {"timings": None} for line in path.read_text().splitlines()]
  return found


def sampled(workdir: pathlib.Path) -> list[tuple]:
  """The ids of every episode."""
  samples = [(e["trajectory_id"], e["samples"]) for e in episodes(workdir)]
  return [(name, [s["ids"] for x in all for s in x["segments"]]) for name, all in samples]
