"""What an experiment's jobs are: a `Study`, the `Place` of one job, and the file of its result.

`result` in that file depends on arm, seed, scale and kind of machine only; whatever else there is
to say (time, commit, command) is in `about`.
"""

import dataclasses
import datetime
import fcntl
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Place:
  """Where one job runs and what it may write.

  `workdir` is the job's own; what a killed attempt left there is to be gone on from. `save` takes
  what is known of the result so far, `progress` steps done and in all.
  """

  arm: str
  seed: int
  scale: str
  workdir: Path
  save: Callable[[Mapping[str, Any]], None]
  progress: Callable[[int, int], None]

  def workdir_of(self, arm: str) -> Path:
    """The work directory of another arm with the same seed, as one of `Study.first`."""
    return self.workdir.parents[1] / f"{arm}_{self.seed}" / "run"


@dataclasses.dataclass
class Reporting:
  """What a run says, as a job's progress: lines to its log, steps to its result."""

  place: Place

  def say(self, line: str) -> None:
    print(line, flush=True)

  def update(self, name: str, done: int, total: int) -> None:
    if name.endswith("steps") and done:
      self.place.progress(done, total)


@dataclasses.dataclass(frozen=True)
class Study:
  """One paper's jobs. `job` returns the result, as JSON values.

  The arms in `first` (a supervised start, say) run before the others of their seed. Those in
  `recorded` read logs that were made elsewhere: they wait for none, and run only when named.
  `settings` of
  (arm, scale), as JSON values, are kept with the result; one that was made with other settings is
  refused. A job is stopped after `hours`.
  """

  paper: str  # its folder in experiments/
  job: Callable[[Place], Mapping[str, Any]]
  arms: tuple[str, ...]
  seeds: tuple[int, ...] = (0, 1, 2)
  first: tuple[str, ...] = ()
  recorded: tuple[str, ...] = ()
  settings: Callable[[str, str], Mapping[str, Any]] = lambda arm, scale: {}
  hours: float = 4.0


@dataclasses.dataclass(frozen=True)
class Files:
  """What a study reads and writes at one scale."""

  results: Path
  runs: Path

  def result(self, arm: str, seed: int) -> Path:
    return self.results / f"{arm}_{seed}.json"

  def job(self, arm: str, seed: int) -> Path:
    return self.runs / f"{arm}_{seed}"

  def kept(self, arm: str, seed: int) -> Path:
    """There once the job has ended, and what others begin from lies beside it."""
    return self.job(arm, seed) / "ended"


def files_of(paper: str, scale: str, results: str | None = None, runs: str | None = None) -> Files:
  """Results of the experiment itself lie beside its code; those of a smoke run do not."""
  work_in = Path(runs or f"runs/{paper}-{scale}").absolute()
  beside = ROOT / "experiments" / paper / "results" if scale == "cpu" else work_in / "results"
  return Files(Path(results).absolute() if results else beside, work_in)


def work(study: Study, arm: str, seed: int, scale: str, files: Files) -> None:
  """Runs one job to its end in this process. Raises BlockingIOError where another one has it."""
  path, started = files.result(arm, seed), time.monotonic()
  about: dict[str, Any] = {
    "command": f"python -m experiments.{study.paper}.run --arms={arm} --seeds={seed}"
    + ("" if scale == "cpu" else f" --scale={scale}"),
    "date": datetime.date.today().isoformat(),
    "commit": commit(),
    "machine": machine(),
  }
  head = {"paper": study.paper, "arm": arm, "seed": seed, "scale": scale}
  settings = study.settings(arm, scale)
  known: dict[str, Any] = {}

  def save(result: Mapping[str, Any], *, complete: bool = False) -> None:
    known["result"] = result
    about["seconds"] = round(time.monotonic() - started, 1)
    body = {"settings": settings, "result": result, "about": about}
    write_json(path, {**head, "complete": complete, **body})

  def progress(done: int, total: int) -> None:
    about["progress"] = [done, total]
    save(known.get("result", {}))

  folder = files.job(arm, seed)
  folder.mkdir(parents=True, exist_ok=True)
  held = try_lock(folder / "lock")
  if held is None:
    raise BlockingIOError(f"{folder} is in use by another process")
  with held:
    place = Place(arm, seed, scale, folder / "run", save, progress)
    place.workdir.mkdir(exist_ok=True)
    result = study.job(place)
    about.pop("progress", None)
    save(result, complete=True)
    files.kept(arm, seed).touch()


def try_lock(path: Path) -> IO | None:
  """The file, locked for as long as this process or one that inherited it lives; None if taken."""
  file = path.open("w")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    file.close()
    return None
  return file


def write_json(path: Path, value: Mapping[str, Any]) -> None:
  """Whole or not at all; numbers that are not finite are refused."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix(".partial")
  partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
  partial.replace(path)


def read_result(path: Path) -> dict[str, Any] | None:
  """A result file, complete or not; None where there is none. Raises ValueError naming it."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error})") from error


def commit() -> str:
  """The short hash of HEAD, with + where code differs from it; "unknown" outside a repository."""

  def git(*arguments: str) -> str:
    done = subprocess.run(
      ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()

  try:
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.SubprocessError):
    return "unknown"


def machine() -> str:
  """The processor's name, as the kernel gives it."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return "unknown"
  return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")
