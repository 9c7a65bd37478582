"""A directory of safetensors files, read and written one tensor at a time.

The format is the `safetensors` library's; its own writer wants every tensor's bytes in memory at
once, so writing is done here: the header is known from shapes, and the data follow as they are
produced.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

PathLike = str | os.PathLike[str]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000  # as transformers splits its checkpoints
_END_BYTES = 1 << 20  # of each end of a file that `fingerprint` reads

DTYPE_NAMES = {
  np.dtype(np.float32): "F32",
  np.dtype(np.float16): "F16",
  np.dtype(ml_dtypes.bfloat16): "BF16",
  np.dtype(np.int64): "I64",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file. Raises ValueError, with its path, if there is something else."""
  try:
    found = json.loads(path.read_text())
  except ValueError as error:  # bad UTF-8 is one too
    raise ValueError(f"{path}: not JSON: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path}: {type(found).__name__}, expected a JSON object")
  return found


class TensorEntry(NamedTuple):
  """One tensor to be written; `read` is called once, when its turn comes."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


class TensorFiles:
  """The tensors of one directory by name; opens each file once and reads only what is asked for.

  Raises:
    FileNotFoundError: neither an index nor a single file is there, or the index names a missing
      file.
    ValueError: an index or a file that is broken, or a tensor in two files, by its path.
  """

  def __init__(self, directory: PathLike, *, single: str = SINGLE_NAME, indexed: bool = True):
    """Args: directory; single, the name of the file where there is but one; indexed, False where
    there is no index and every safetensors file counts, as in what a push brings.
    """
    self.directory = pathlib.Path(directory)
    index, alone = self.directory / INDEX_NAME, self.directory / single
    if not indexed:
      names = sorted(path.name for path in self.directory.glob("*.safetensors"))
      if not names:
        raise FileNotFoundError(f"{self.directory}: no safetensors files there")
    elif index.is_file():
      places = read_object(index).get("weight_map")
      if not isinstance(places, dict):
        raise ValueError(f"{index}: weight_map is {places!r}, expected the file of each tensor")
      if wrong := [tensor for tensor, name in places.items() if not isinstance(name, str)]:
        found = places[wrong[0]]
        raise ValueError(f"{index}: weight_map of {wrong[0]} is {found!r}, expected a file's name")
      names = sorted(set(places.values()))
    elif alone.is_file():
      names = [single]
    else:
      raise FileNotFoundError(f"{self.directory}: expected {single} or {INDEX_NAME}, found neither")
    self._files, self._paths = {}, {}
    for name in names:
      path = self.directory / name
      if not path.is_file():
        raise FileNotFoundError(f"{path}: named by {INDEX_NAME} but missing")
      try:
        handle = safetensors.safe_open(path, framework="numpy")
      except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
      if twice := set(self._files).intersection(handle.keys()):
        other = self._paths[min(twice)].name
        raise ValueError(f"{path}: {min(twice)} is in another file, too, {other}")
      self._files |= {tensor: handle for tensor in handle.keys()}  # noqa: SIM118 (not a mapping)
      self._paths |= {tensor: path for tensor in handle.keys()}  # noqa: SIM118

  def names(self) -> set[str]:
    return set(self._files)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._files[name].get_slice(name).get_shape())

  def stored(self, name: str) -> str:
    """The format's name of the type that a tensor is stored as."""
    return self._files[name].get_slice(name).get_dtype()

  def read_bytes(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Rows of a tensor whose numbers have one byte each, as unsigned bytes: numpy knows no FP8."""
    path = self._paths[name]
    with path.open("rb") as file:
      size = int.from_bytes(file.read(8), "little")
      start, _ = json.loads(file.read(size))[name]["data_offsets"]
    shape = self.shape(name)
    return np.array(np.memmap(path, np.uint8, "r", 8 + size + start, shape)[rows])

  def dtype(self, name: str) -> np.dtype:
    """Raises ValueError for a stored type other than float32, float16, bfloat16 and int64."""
    stored = self.stored(name)
    if stored not in _DTYPES:
      raise ValueError(
        f"{self._paths[name]}: {name} is stored as {stored}, expected {sorted(_DTYPES)}"
      )
    return _DTYPES[stored]

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """The box `index` of a tensor, in its stored dtype (the whole tensor by default)."""
    self.dtype(name)
    return self._files[name].get_slice(name)[index or ...]


@contextlib.contextmanager
def new_directory(directory: PathLike) -> Iterator[pathlib.Path]:
  """A temporary sibling to fill, renamed to `directory` when the block ends without an error.

  A reader sees the old directory, none, or the new one, never a mixture; a crash leaves only
  siblings `.NAME.partial` and `.NAME.old`, which the next call removes, and of which the old one is
  put back where it is the only one that is whole.

  Raises:
    FileExistsError: what is there is no directory of safetensors, and is left alone.
    OSError: of the directory, where writing to it fails.
  """
  final = pathlib.Path(directory).resolve()  # a link stays, what it leads to is written
  partial, old = (final.with_name(f".{final.name}.{suffix}") for suffix in ("partial", "old"))
  if old.is_dir() and not final.exists():
    old.rename(final)
  if final.exists() and not _is_replaceable(final):
    raise FileExistsError(f"{final}: not replaced, it is no directory of safetensors files")
  final.parent.mkdir(parents=True, exist_ok=True)
  for leftover in (partial, old):
    shutil.rmtree(leftover, ignore_errors=True)
  partial.mkdir()
  try:
    yield partial
    if final.exists():
      final.rename(old)
    partial.rename(final)
  except BaseException as error:
    shutil.rmtree(partial, ignore_errors=True)
    if isinstance(error, OSError) and error.errno and (error.filename2 or not error.filename):
      # Writing to an open file names none, and copying names the source first.
      raise OSError(error.errno, error.strerror, str(final)) from error
    raise
  shutil.rmtree(old, ignore_errors=True)


def _is_replaceable(path: pathlib.Path) -> bool:
  """Whether nothing is lost but what was written by a call before."""
  if not path.is_dir():
    return False
  names = [entry.name for entry in path.iterdir()]
  return not names or any(name.endswith(".safetensors") for name in names)


def write_tensors(
  directory: PathLike, entries: Sequence[TensorEntry], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
  """Writes `entries` as one file, or as several with an index when they exceed `max_file_bytes`.

  Raises:
    ValueError: a dtype that checkpoints do not hold, or a tensor that is not what its entry
      declares.
  """
  directory = pathlib.Path(directory)
  groups: list[list[TensorEntry]] = [[]]
  filled = 0
  for entry in entries:
    if entry.dtype not in DTYPE_NAMES:
      expected = sorted(DTYPE_NAMES.values())
      raise ValueError(f"{entry.name}: cannot store dtype {entry.dtype}, expected {expected}")
    if groups[-1] and filled + _nbytes(entry) > max_file_bytes:
      groups.append([])
      filled = 0
    groups[-1].append(entry)
    filled += _nbytes(entry)
  if len(groups) == 1:
    write_file(directory / SINGLE_NAME, groups[0])
    return
  weight_map = {}
  for number, group in enumerate(groups, start=1):
    name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
    write_file(directory / name, group)
    weight_map |= {entry.name: name for entry in group}
  total = sum(map(_nbytes, entries))
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _nbytes(entry: TensorEntry) -> int:
  return math.prod(entry.shape) * entry.dtype.itemsize


def write_file(path: pathlib.Path, entries: Sequence[TensorEntry]) -> None:
  """One safetensors file. Raises ValueError as `write_tensors`."""
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for entry in entries:
    end = offset + _nbytes(entry)
    header[entry.name] = {
      "dtype": DTYPE_NAMES[entry.dtype],
      "shape": entry.shape,
      "data_offsets": [offset, end],
    }
    offset = end
  encoded = json.dumps(header).encode()
  encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of eight
  with path.open("wb") as file:
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for entry in entries:
      array = entry.read()
      if array.shape != entry.shape or array.dtype != entry.dtype:
        raise ValueError(
          f"{entry.name}: got {array.dtype}{array.shape}, declared {entry.dtype}{entry.shape}"
        )
      file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())


def fingerprint(directory: PathLike) -> str:
  """Tells models apart by their configuration and by both ends of each of their weight files, so
  that it takes no time for large ones. Raises FileNotFoundError without a config.json.
  """
  digest = hashlib.sha256()
  root = pathlib.Path(directory)
  if not (root / "config.json").is_file():
    raise FileNotFoundError(
      f"{directory}: expected a Hugging Face model directory with config.json"
    )
  for path in [root / "config.json", *sorted(root.glob("*.safetensors"))]:
    with path.open("rb") as file:
      size = path.stat().st_size
      digest.update(f"{path.name} {size}".encode())
      digest.update(file.read(_END_BYTES))
      file.seek(max(0, size - _END_BYTES))
      digest.update(file.read(_END_BYTES))
  return digest.hexdigest()[:12]
