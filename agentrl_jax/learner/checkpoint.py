"""A training run on disk: each checkpoint is complete or is not there.

`DIRECTORY/step_00000012/` holds `state/` (orbax), `host.json`, and last of all `COMPLETE` with a
digest of every file. Whatever lacks the marker was cut short; it is never read, and the next save
removes it. What differs from its digest is refused.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from agentrl_jax.learner.state import TrainState

MARKER = "COMPLETE"
HOST = "host.json"
STATE = "state"
NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read; the message says which, why, and what is left."""


@dataclasses.dataclass(frozen=True)
class HostState:
  """What a run needs besides the train state to go on as if it had never stopped. JSON values only.

  Random keys are derived from `seed` and the step, so the seed is all there is to store of them.
  """

  seed: int
  weight_version: int  # that the engine was given last
  cursor: Mapping[str, Any]  # of the data source
  run: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # whose state it is
  carry: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # unfinished work


def complete(directory: str | Path) -> list[Path]:
  """The complete checkpoints in `directory`, oldest first; empty if it does not exist."""
  return [path for path in _all(Path(directory)) if (path / MARKER).exists()]


def latest(directory: str | Path) -> Path | None:
  """The newest complete checkpoint, or None."""
  return next(reversed(complete(directory)), None)


def save(directory: str | Path, state: TrainState, host: HostState, *, keep: int = 2) -> Path:
  """Writes a checkpoint named after `state.step`; returns when it is complete. See `Saver.save`."""
  with Saver(directory, keep=keep) as saver:
    return saver.save(state, host)


def restore(path: str | Path, abstract: TrainState) -> tuple[TrainState, HostState]:
  """Reads a complete checkpoint, bit for bit.

  Args:
    path: what `latest` or `save` returned.
    abstract: `abstract_state(...)`: the shapes expected and the shardings wanted, on any mesh.

  Raises:
    CheckpointError: if it is incomplete or damaged, or holds another model or optimizer.
  """
  path = Path(path)
  if not (path / MARKER).exists():
    raise CheckpointError(f"checkpoint {path} is incomplete: it has no {MARKER}")
  if jax.process_index() == 0:
    _verify(path)
  try:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
      state = reader.restore((path / STATE).absolute(), args=ocp.args.StandardRestore(abstract))
  except Exception as error:  # orbax and tensorstore raise bare ones, too
    raise CheckpointError(
      f"checkpoint {path} does not hold the expected state: {_line(error)}"
    ) from error
  return state, read_host(path)


def read_host(path: Path) -> HostState:
  """The host's part of a complete checkpoint. Raises CheckpointError if it cannot be read."""
  try:
    return HostState(**json.loads((path / HOST).read_text()))
  except (OSError, TypeError, ValueError) as error:
    raise CheckpointError(f"checkpoint {path} cannot be read: {_line(error)}") from error


class Saver:
  """Writes checkpoints behind the training loop; one at a time, errors raised at the next call.

  Close it (or use `with`) to wait for the last one.
  """

  def __init__(self, directory: str | Path, *, keep: int = 2):
    """Args: directory, created if needed; keep, how many complete checkpoints are kept (>= 1)."""
    if keep < 1:
      raise ValueError(f"keep is {keep}, expected at least 1")
    self._directory = Path(directory)
    self._keep = keep
    self._writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    self._thread = ThreadPoolExecutor(1, "checkpoint")
    self._pending: Future[None] | None = None

  def save(self, state: TrainState, host: HostState) -> Path:
    """Starts a checkpoint named after `state.step`; returns its path once the state may be donated.

    A complete checkpoint of the same step is left as it is. When the write fails (a full disk),
    what was written of it is removed and the checkpoints before it stay.

    Raises:
      CheckpointError: if this write could not start, or the one before it failed.
      ValueError: if `host` is not JSON.
    """
    self.wait()
    text = json.dumps(dataclasses.asdict(host), allow_nan=False)
    path = self._directory / f"step_{int(state.step):08d}"
    if (path / MARKER).exists():
      return path
    try:
      if jax.process_index() == 0:
        _sweep(self._directory)
        path.mkdir(parents=True)
      self._writer.save((path / STATE).absolute(), args=ocp.args.StandardSave(state))
    except (OSError, ValueError, RuntimeError) as error:
      raise _failed(path, error) from error
    self._pending = self._thread.submit(self._finish, path, text)
    return path

  def wait(self) -> None:
    """Returns when no write is under way; raises CheckpointError if the last one failed."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Waits, then releases the threads."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      with contextlib.suppress(OSError):  # of what orbax notes beside: the state was waited for
        self._writer.close()

  def __enter__(self) -> "Saver":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _finish(self, path: Path, host: str) -> None:
    try:
      self._writer.wait_until_finished()
      if jax.process_index() == 0:
        _write(path / HOST, host)
        _write(path / f"{MARKER}.partial", json.dumps(_digests(path)))
        (path / f"{MARKER}.partial").replace(path / MARKER)
    except (OSError, ValueError, RuntimeError) as error:
      raise _failed(path, error) from error
    if jax.process_index() == 0:
      for old in complete(self._directory)[: -self._keep]:
        _remove(old)


def _all(directory: Path) -> list[Path]:
  if not directory.is_dir():
    return []
  found = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
  return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _digests(path: Path) -> dict[str, str]:
  """Of every file of a checkpoint but the marker, by its place in it."""
  files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(MARKER))

  def digest(file: Path) -> str:
    with file.open("rb") as content:
      return hashlib.file_digest(content, "blake2b").hexdigest()[:32]

  with ThreadPoolExecutor() as readers:  # hashing releases the interpreter's lock
    return {str(p.relative_to(path)): d for p, d in zip(files, readers.map(digest, files))}  # noqa: B905


def _verify(path: Path) -> None:
  """Raises CheckpointError, naming the file, unless all are as they were written."""
  try:
    written, found = json.loads((path / MARKER).read_text()), _digests(path)
  except (OSError, ValueError) as error:
    raise CheckpointError(f"checkpoint {path} cannot be read: {_line(error)}") from error
  for name in sorted(written.keys() | found.keys()):
    if written.get(name) != found.get(name):
      problem = (
        "is damaged" if name in found and name in written else "is missing or does not belong"
      )
      raise CheckpointError(f"checkpoint {path}: {name} {problem}; remove the checkpoint to go on")


def _sweep(directory: Path) -> None:
  for path in _all(directory):
    if not (path / MARKER).exists():
      shutil.rmtree(path)


def _remove(path: Path) -> None:
  (path / MARKER).unlink()  # first: a removal that is cut short leaves nothing that looks complete
  shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def _failed(path: Path, error: Exception) -> CheckpointError:
  shutil.rmtree(path, ignore_errors=True)
  left = latest(path.parent)
  kept = f"the latest complete one is {left}" if left else "there is no complete one before it"
  return CheckpointError(f"cannot write checkpoint {path}: {_line(error)}; {kept}")


def _line(error: Exception) -> str:
  text = str(error).strip()
  full = os.strerror(errno.ENOSPC)  # tensorstore names it at the end of a long line
  if full in text:
    return full
  return text.splitlines()[0][:300] if text else type(error).__name__
