"""What a run says: a jsonl line, TensorBoard scalars and one line for a person, every step.

Lines are flushed as they are made. After a resume, lines of steps that will be done again are
dropped, so the file reads as one uninterrupted run.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore  (made at import)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore  (made at import)
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from agentrl_jax.types import Metrics


def to_floats(metrics: Metrics) -> dict[str, float]:
  """Each metric's mean on the host; metrics that counted nothing are left out."""
  counted = {name: m for name, m in metrics.items() if float(m.count)}
  return {name: float(m.total) / float(m.count) for name, m in counted.items()}


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events under a directory.

  Args:
    directory: the run's directory; made if absent.
    resume_step: lines of this step and later ones are dropped first.
  """

  def __init__(self, directory: Path, *, resume_step: int = 0):
    directory.mkdir(parents=True, exist_ok=True)
    self.path = directory / "metrics.jsonl"
    keep = [row for row in read_metrics(self.path) if row["step"] < resume_step]
    partial = self.path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in keep))
    partial.replace(self.path)
    self._file = self.path.open("a")
    self._events = EventFileWriter(str(directory / "tensorboard"))

  def write(self, step: int, values: Mapping[str, float], *, wall_time: float) -> None:
    """Appends one line; a value that is not finite is written as null, and kept out of
    TensorBoard.
    """
    clean = {k: float(v) if math.isfinite(v) else None for k, v in values.items()}
    self._file.write(json.dumps({"step": step, **clean}) + "\n")
    self._file.flush()
    scalars = [Summary.Value(tag=k, simple_value=v) for k, v in clean.items() if v is not None]
    self._events.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=scalars)))
    self._events.flush()

  def close(self) -> None:
    """Flushes and closes both files. Idempotent."""
    self._file.close()
    self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """The rows of a metrics file, in order; a last line cut by a kill is left out.

  Raises ValueError, naming file and line, for any other line that is no row.
  """
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")
  return [_row(line, f"{path}, line {n}") for n, line in enumerate(lines[:-1], 1) if line]


def _row(line: bytes, where: str) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except ValueError as error:  # bad UTF-8 is one too
    raise ValueError(f"{where}: not JSON: {error}") from error
  if not isinstance(row, dict) or not isinstance(row.get("step"), int):
    raise ValueError(f"{where}: {line[:60]!r}, expected an object with a step")
  return row


SECONDS_A_LINE = 60.0


class Progressing:
  """Progress bars on a terminal, elsewhere a line a minute; use as a context manager."""

  def __init__(self, console: Console | None = None):
    self.console = console or Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    self._bars = Progress(
      *columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal
    )
    self._tasks: dict[str, Any] = {}
    self._said = time.monotonic()

  def __enter__(self) -> "Progressing":
    self._bars.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bars.stop()

  def say(self, line: str) -> None:
    """One line above the bars."""
    self.console.print(line, markup=False, highlight=False, soft_wrap=True)

  def update(self, name: str, done: int, total: int) -> None:
    """Moves the bar `name` to done / total; a bar that is full goes away, except the outermost."""
    if not self.console.is_terminal and time.monotonic() - self._said > SECONDS_A_LINE:
      self._said = time.monotonic()
      self.say(f"{name}: {done} of {total}")
    if name not in self._tasks:
      self._tasks[name] = self._bars.add_task(name, total=total)
    self._bars.update(self._tasks[name], completed=done, total=total)
    if done >= total and len(self._tasks) > 1:
      self._bars.remove_task(self._tasks.pop(name))


_COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX reports after each program


@functools.cache
def _compilation() -> dict[str, float]:
  """Seconds that this process has spent on compiling since it was first asked."""
  spent = {_COMPILED: 0.0}

  def count(event: str, duration_secs: float, **_: Any) -> None:
    if event in spent:
      spent[event] += duration_secs

  jax.monitoring.register_event_duration_secs_listener(count)
  return spent


@dataclasses.dataclass
class Clock:
  """Seconds of each phase of a step; those of `compile` are a part of the others."""

  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  last: float = dataclasses.field(default_factory=time.monotonic)
  compiled: float = dataclasses.field(default_factory=lambda: _compilation()[_COMPILED])

  def lap(self, name: str) -> None:
    """The time since the last lap was spent on `name`."""
    now = time.monotonic()
    compiled = _compilation()[_COMPILED] - self.compiled
    self.seconds |= {f"seconds/{name}": now - self.last, "seconds/compile": compiled}
    self.last = now


def line(step: int, steps: int, values: Mapping[str, float]) -> str:
  """One step for a person to read."""
  seconds = " ".join(
    f"{name.removeprefix('seconds/')} {value:.1f}"
    for name, value in values.items()
    if name.startswith("seconds/") and name != "seconds/compile"
  )
  compiling = values.get("seconds/compile", 0.0)
  if compiling >= 0.05:
    seconds += f" (of it compiling {compiling:.1f})"
  return (
    f"step {step}/{steps}: reward {values['reward']:.3f} success {values['success']:.3f} "
    f"finished {values['finished']:.3f} | loss {values.get('loss', 0.0):+.4f} "
    f"clip {values.get('clip_fraction', 0.0):.3f} grad {values.get('gradient_norm', 0.0):.3f} "
    f"mismatch {values['mismatch_max']:.1e} | s: {seconds}"
  )
