"""Tasks as data: read from a file, kept as a tensorflow-datasets array_record, drawn by an integer
cursor.

The cursor is all the state there is: task i of an endless shuffled order is a pure function of
(data, seed, i), so a resumed run draws exactly what the uninterrupted one would have.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl_jax.rollout.records import Task


class RowToTask(Protocol):
  """A row of a file and its index to a task; raises ValueError with the reason if it cannot."""

  def __call__(self, row: Mapping[str, Any], *, index: int) -> Task: ...


def read_tasks(path: str | Path, row_to_task: RowToTask) -> list[Task]:
  """All tasks of a jsonl or parquet file, in its order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: another kind of file, no row at all, or a bad row: named with file, line and reason.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"no task file {path}")
  match path.suffix:
    case ".jsonl":
      rows = _jsonl_rows(path)
    case ".parquet":
      rows = _parquet_rows(path)
    case suffix:
      raise ValueError(f"{path}: kind {suffix!r}, expected .jsonl or .parquet")
  tasks = []
  for where, row in rows:
    try:
      tasks.append(row_to_task(row, index=len(tasks)))
    except ValueError as error:
      raise ValueError(f"{path}, {where}: {error}") from error
  if not tasks:
    raise ValueError(f"{path}: no tasks")
  return tasks


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
  with path.open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      where = f"line {number}"
      try:
        row = json.loads(line.decode("utf-8"))
      except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise ValueError(f"{path}, {where}: not JSON: {error}") from error
      if not isinstance(row, dict):
        raise ValueError(f"{path}, {where}: {type(row).__name__}, expected a JSON object")
      yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
  import pyarrow  # only where a parquet file is read
  import pyarrow.parquet

  try:
    table = pyarrow.parquet.read_table(path)
  except pyarrow.ArrowException as error:
    raise ValueError(f"{path}: not parquet: {error}") from error
  for number, row in enumerate(table.to_pylist(), 1):
    yield f"row {number}", row


# --- storage --------------------------------------------------------------------------------------


def task_to_json(task: Task) -> str:
  """One line that `task_from_json` turns back into an equal task."""
  return json.dumps(dataclasses.asdict(task), sort_keys=True, allow_nan=False)


def task_from_json(line: str) -> Task:
  return Task(**json.loads(line))


def task_fingerprint(tasks: Sequence[Task]) -> str:
  """Tells sets of tasks apart by their number and up to 64 tasks spread over them."""
  places = sorted({len(tasks) * i // 64 for i in range(64)}) if len(tasks) else []
  lines = [task_to_json(tasks[i]) for i in places]
  digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
  return f"{len(tasks)}-{digest}"


def store_tasks(tasks: Sequence[Task], data_dir: str | Path, name: str) -> Sequence[Task]:
  """Writes tasks below `data_dir` as array_record, unless they are there, and returns them from
  disk.

  Prepared beside its final place and renamed, so that an interrupted start leaves nothing half
  written and concurrent starts agree.

  Args:
    name: of the set, for people: letters, digits, `_` and `-`.

  Raises:
    ValueError: no tasks, or a name that is no file name.
  """
  if not tasks or not re.fullmatch(r"[\w-]+", name):
    raise ValueError(
      f"task set {name!r} with {len(tasks)} tasks: expected a plain name and some tasks"
    )
  from agentrl_jax.envs import task_records  # slow to import

  lines = [task_to_json(task) for task in tasks]
  digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
  root, config_name = Path(data_dir), f"{name}-{digest}"
  final = root / config_name
  if not final.is_dir():
    root.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".preparing-", dir=root)
    try:
      _rename_unless_there(Path(task_records.prepare(lines, config_name, scratch)), final)
    finally:
      shutil.rmtree(scratch, ignore_errors=True)
  return _Stored(task_records.open_records(str(final)))


def _rename_unless_there(source: Path, target: Path) -> None:
  try:
    os.rename(source, target)
  except OSError:
    if not target.is_dir():  # another start was first, with the same content
      raise


class _Stored(Sequence[Task]):
  """Random access to stored tasks."""

  def __init__(self, source: Any):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Task:
    if not -len(self) <= index < len(self):
      raise IndexError(f"task {index} of {len(self)}")
    record = self._source[index % len(self)]["task"]
    return task_from_json(record.decode() if isinstance(record, bytes) else record)


# --- order ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TaskSource:
  """Tasks in an endless order, newly shuffled each epoch, every task once an epoch.

  Holds no position: the caller keeps the cursor and stores it with its checkpoint.
  """

  tasks: Sequence[Task]
  seed: int

  def __post_init__(self):
    if not len(self.tasks):
      raise ValueError("a task source needs at least one task")

  def next(self, cursor: int, n: int) -> tuple[list[Task], int]:
    """The n tasks from `cursor` on, and the cursor after them. Raises ValueError below 0."""
    if cursor < 0 or n < 0:
      raise ValueError(f"cursor {cursor}, {n} tasks: expected neither below 0")
    return [self._order[i] for i in range(cursor, cursor + n)], cursor + n

  def epoch(self, cursor: int) -> int:
    """How many times every task was drawn before `cursor`."""
    return cursor // len(self.tasks)

  @functools.cached_property
  def _order(self) -> Any:
    import grain  # slow to import

    return grain.MapDataset.source(self.tasks).shuffle(seed=self.seed).repeat()
