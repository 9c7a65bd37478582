"""Arms times seeds as resumable jobs: each in a process of its own, alone on its core.

An experiment's `run.py` is a `Study` and `arms.main(STUDY)`. Every job writes
`results/<arm>_<seed>.json` as it goes; a complete one is not done again, and a killed one goes on
from what lies in its work directory. JAX is not imported here: the process that watches the jobs is
light.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from absl import flags
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.study import (
  ROOT,
  Files,
  Place,
  Study,
  files_of,
  read_result,
  try_lock,
  work,
  write_json,
)
from launch import command

__all__ = ["Place", "Study", "files_of", "main", "read_result", "write_json"]

flags.disclaim_key_flags()  # `--help` of a paper's command shows them

SCALES = ("cpu", "smoke")
# One thread a job and the same program everywhere: what makes a result repeat bit for bit.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# A smoke run is mostly compilation, and that is 2.5 times as fast without optimisations.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclasses.dataclass
class Worker:
  """A running job; its cores are its own until it and this process have let go of `held`."""

  arm: str
  seed: int
  process: subprocess.Popen
  held: Sequence[IO]
  started: float

  def let_go(self) -> None:
    for file in self.held:
      file.close()


def main(study: Study) -> None:
  """The command: `--arms`, `--seeds`, `--scale`, `--results`, `--runs`, `--cores`."""
  arms = flags.DEFINE_list("arms", list(study.arms), "Which arms.")
  given = ",".join(map(str, study.seeds))
  seeds = flags.DEFINE_list(
    "seeds", None, f"Which seeds; default {given}, of a smoke run {study.seeds[0]}."
  )
  scale = flags.DEFINE_enum("scale", "cpu", SCALES, "cpu: the experiment; smoke: does it run?")
  results = flags.DEFINE_string(
    "results", None, f"Default: experiments/{study.paper}/results; for smoke within --runs."
  )
  runs = flags.DEFINE_string("runs", None, f"Work directories; default runs/{study.paper}-SCALE.")
  cores = flags.DEFINE_integer("cores", None, "Jobs at a time; default: one on each allowed core.")
  only = flags.DEFINE_string("job", None, "ARM_SEED: this one job, in this process.")

  def body(arguments: object) -> int:
    del arguments
    files = files_of(study.paper, scale.value, results.value, runs.value)
    if only.value is not None:
      arm, _, seed = only.value.rpartition("_")
      work(study, arm, int(seed), scale.value, files)
      return 0
    some = study.seeds[:1] if scale.value == "smoke" else study.seeds
    wanted = chosen(study, arms.value, seeds.value or [str(seed) for seed in some])
    return run_all(study, wanted, scale.value, files, limit=cores.value)

  command.run(body)


def chosen(study: Study, arms: list[str], seeds: list[str]) -> list[tuple[str, int]]:
  """The jobs in order, with the arms that others begin from. Raises ValueError for an unknown."""
  known = (*study.first, *study.arms, *study.recorded)
  unknown = sorted(set(arms) - set(known))
  if unknown:
    raise ValueError(f"unknown arm {unknown[0]!r}; there are {', '.join(known)}")
  if not all(seed.isdecimal() for seed in seeds):
    raise ValueError(f"--seeds is {','.join(seeds)!r}, expected whole numbers")
  begun = study.first if set(arms) - set(study.recorded) else ()
  order = dict.fromkeys([*begun, *arms])
  return [(arm, int(seed)) for seed in seeds for arm in order]


# --- All jobs, from the process that the user started.


class Bars:
  """One bar for all jobs and one for each that runs, on a terminal; plain lines elsewhere."""

  def __init__(self):
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    self._bars = Progress(*columns, TimeElapsedColumn(), disable=not sys.stdout.isatty())
    self._tasks: dict[str, Any] = {}

  def __enter__(self) -> "Bars":
    self._bars.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bars.stop()

  def say(self, line: str) -> None:
    self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

  def update(self, name: str, done: int, total: int) -> None:
    if name not in self._tasks:
      self._tasks[name] = self._bars.add_task(name, total=total)
    self._bars.update(self._tasks[name], completed=done, total=total)

  def remove(self, name: str) -> None:
    if name in self._tasks:
      self._bars.remove_task(self._tasks.pop(name))


def run_all(
  study: Study, wanted: list[tuple[str, int]], scale: str, files: Files, *, limit: int | None = None
) -> int:
  """Runs what is not complete, never two jobs on one core; returns the number of failed jobs.

  A core is taken by a lock that all studies of this user share.
  """
  pending = to_do(study, wanted, scale, files)
  running: list[Worker] = []
  failed: list[tuple[str, int]] = []
  limit = limit or len(os.sched_getaffinity(0))
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with Bars() as progress:
    skipped = len(wanted) - len(pending)
    progress.say(f"{study.paper}: {len(pending)} jobs to do, {skipped} complete")
    try:
      while pending or running:
        pending = _give_up(study, pending, failed, progress)
        if len(running) < limit:
          pending = _start_one(study, pending, running, scale, files, progress, limit)
        time.sleep(0.2)
        for worker in list(running):
          if _ended(study, worker, files, progress):
            running.remove(worker)
            if worker.process.returncode:
              failed.append((worker.arm, worker.seed))
        progress.update("jobs", len(wanted) - len(pending) - len(running), len(wanted))
    finally:
      for worker in running:
        _stop(worker)
  return min(len(failed), 100)


def to_do(
  study: Study, wanted: list[tuple[str, int]], scale: str, files: Files
) -> list[tuple[str, int]]:
  """The jobs without a complete result, and what they begin from where its files are not there, as
  in a clone that has the results alone.
  """
  undone = {job for job in wanted if not complete(study, job, scale, files)}
  seeds = {seed for arm, seed in undone if waits(study, arm)}
  begun = [(arm, seed) for arm in study.first for seed in seeds]
  undone |= {job for job in begun if not files.kept(*job).exists()}
  return [job for job in wanted if job in undone]


def complete(study: Study, job: tuple[str, int], scale: str, files: Files) -> bool:
  """Whether the job's result is there. Raises ValueError where other settings made it."""
  path = files.result(*job)
  found = read_result(path)
  if found is None or not found["complete"]:
    return False
  settings = json.loads(json.dumps(study.settings(job[0], scale)))
  if found["settings"] != settings or found["scale"] != scale:
    raise ValueError(f"{path} was made with other settings; remove it, or give another --results")
  return True


def waits(study: Study, arm: str) -> bool:
  """Whether the arm begins from what is in `first`."""
  return arm not in study.first and arm not in study.recorded


def _give_up(
  study: Study, pending: list[tuple[str, int]], failed: list, progress: Bars
) -> list[tuple[str, int]]:
  """What can still run; jobs whose start failed fail with it."""
  lost = [
    (arm, seed)
    for arm, seed in pending
    if waits(study, arm) and any((first, seed) in failed for first in study.first)
  ]
  for arm, seed in lost:
    progress.say(f"{arm} {seed}: not run, as what it begins from failed")
  failed.extend(lost)
  return [job for job in pending if job not in lost]


def _start_one(
  study: Study,
  pending: list[tuple[str, int]],
  running: list[Worker],
  scale: str,
  files: Files,
  progress: Bars,
  limit: int,
) -> list[tuple[str, int]]:
  """Starts the first job that may start, if a core is free; returns those still pending.

  A smoke run mostly compiles, which keeps many cores busy: a job alone has all that may be had.
  Neighbours in a study's list are the most alike, so beside a job the last one starts: what
  neighbours share is then compiled once, and read by the second.
  """
  undone = {*pending, *((worker.arm, worker.seed) for worker in running)}

  def may_start(arm: str, seed: int) -> bool:
    return not (waits(study, arm) and any((first, seed) in undone for first in study.first))

  ready = [job for job in pending if may_start(*job)]
  alone = scale == "smoke" and len(ready) == 1 and not running
  cores = free_cores(limit if alone else 1) if ready else {}
  if not cores:
    return pending
  arm, seed = ready[-1 if scale == "smoke" and running else 0]
  running.append(_start(arm, seed, scale, files, cores))
  progress.say(f"{arm} {seed}: started on core {' and '.join(map(str, cores))}")
  return [job for job in pending if job != (arm, seed)]


def free_cores(most: int) -> dict[int, IO]:
  """Up to `most` cores that no job has, with the locks that make them ours."""
  folder = Path(tempfile.gettempdir()) / f"agentrl-cores-{os.getuid()}"
  folder.mkdir(mode=0o700, exist_ok=True)
  found: dict[int, IO] = {}
  for core in sorted(os.sched_getaffinity(0)):
    if len(found) < most and (file := try_lock(folder / str(core))) is not None:
      found[core] = file
  return found


def _start(arm: str, seed: int, scale: str, files: Files, cores: Mapping[int, IO]) -> Worker:
  """This same module with `--job`, on its cores."""
  spec = sys.modules["__main__"].__spec__
  if spec is None:
    raise RuntimeError("start an experiment as a module: python -m experiments.PAPER.run")
  folder = files.job(arm, seed)
  folder.mkdir(parents=True, exist_ok=True)
  arguments = [f"--job={arm}_{seed}", f"--scale={scale}"]
  arguments += [f"--results={files.results}", f"--runs={files.runs}"]
  allowed = os.sched_getaffinity(0)
  with (folder / "log.txt").open("a") as log:
    os.sched_setaffinity(0, set(cores))  # a child has its parent's, from its first thread on
    try:
      process = subprocess.Popen(
        [sys.executable, "-m", spec.name, *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=_environment(scale, files),
        # The cores stay taken if this process is killed first.
        pass_fds=[file.fileno() for file in cores.values()],
      )
    finally:
      os.sched_setaffinity(0, allowed)
  return Worker(arm, seed, process, list(cores.values()), time.monotonic())


def _environment(scale: str, files: Files) -> dict[str, str]:
  """One thread, on a CPU; what one job compiled the others read."""
  path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
  xla = ONE_THREAD if scale == "cpu" else f"{ONE_THREAD} {QUICK_COMPILE}"
  fixed = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
  threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
  cache = {
    "JAX_COMPILATION_CACHE_DIR": str((files.runs / "compiled").resolve()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return {**cache, **os.environ, **fixed, **threads}


def _ended(study: Study, worker: Worker, files: Files, progress: Bars) -> bool:
  """Moves the job's bar, says how it ended; a job past its time is stopped."""
  name = f"{worker.arm} {worker.seed}"
  found = read_result(files.result(worker.arm, worker.seed)) or {"about": {}}
  if worker.process.poll() is None:
    if time.monotonic() - worker.started > 3600 * study.hours:
      progress.say(f"{name}: stopped after {study.hours:g} hours")
      _stop(worker)
      return True
    progress.update(name, *found["about"].get("progress", (0, 1)))
    return False
  worker.let_go()
  progress.remove(name)
  seconds = time.monotonic() - worker.started
  if worker.process.returncode:
    log = files.job(worker.arm, worker.seed) / "log.txt"
    last = (log.read_text().strip().splitlines() or ["no output"])[-1]
    progress.say(f"{name}: failed after {seconds:.0f} s: {last} (log: {log})")
  else:
    progress.say(f"{name}: complete after {seconds:.0f} s")
  return True


def _stop(worker: Worker) -> None:
  worker.process.terminate()
  try:
    worker.process.wait(timeout=20)
  except subprocess.TimeoutExpired:
    worker.process.kill()
    worker.process.wait()
  worker.let_go()
