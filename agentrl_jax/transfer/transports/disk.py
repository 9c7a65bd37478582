"""Safetensors files in shared memory that the server reads: packed in place, never copied on our
side.

A round's files are mapped and filled in a directory named `*.partial`, which is renamed when
complete: what the server is told to read is always whole. Its name is no other transport's, so two
runs that push versions of one name never meet.
"""

import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from agentrl_jax.transfer.control import Control
from agentrl_jax.transfer.owned import make_owned, sweep
from agentrl_jax.transfer.plan import Bucket, Plan, Segment
from agentrl_jax.transfer.stage import Staged
from agentrl_jax.transfer.wire import Entry

# One of each user's own: in another's, nothing can be made.
SHARED_MEMORY = f"/dev/shm/agentrl-{os.getuid()}"
_SAFETENSORS_DTYPES = {
  "float32": "F32",
  "bfloat16": "BF16",
  "float16": "F16",
  "int32": "I32",
  "uint8": "U8",
  "bool": "BOOL",
  "float8_e4m3fn": "F8_E4M3",
}


class DiskTransport:
  """Pushes through `/update_weights_from_disk`.

  Args:
    root: directory in a memory file system that this process and the servers see; made if absent.
      What dead processes left there is removed.
    bucket_bytes: most bytes of a file, unless one tensor is larger.
  """

  name = "disk"
  per_rank = False
  align = 1  # the format allows no gaps; tensors of one dtype stay aligned to it

  def __init__(self, root: str | os.PathLike[str] = SHARED_MEMORY, *, bucket_bytes: int = 1 << 30):
    self.root, self.bucket_bytes = Path(root), bucket_bytes
    self._locks: dict[str, int] = {}  # descriptors by round
    self._mark = secrets.token_hex(8)  # in the names of its rounds
    sweep(self.root)

  def allocate(self, plan: Plan, key: str) -> Mapping[tuple[int, int], np.ndarray]:
    """Maps one file for each bucket, with its header written and its space reserved.

    Raises:
      OSError: naming bytes needed and free when the file system cannot hold them.
    """
    self.release(key)
    partial = self._directory(key, partial=True)
    self._locks[key] = make_owned(partial)
    free = os.statvfs(self.root).f_bavail * os.statvfs(self.root).f_frsize
    if free < plan.nbytes:
      self.release(key)
      raise OSError(
        f"{self.root} has {free / 1e6:.0f} MB free, the weights need {plan.nbytes / 1e6:.0f} MB"
      )
    try:
      for path, bucket in _files(partial, plan):
        held = [s for s in plan.segments if (s.rank, s.bucket) == (bucket.rank, bucket.index)]
        _make(path, held, bucket.nbytes)
      return open_files(partial, plan)
    except OSError as error:
      self.release(key)
      raise OSError(
        f"{self.root} cannot hold {plan.nbytes / 1e6:.0f} MB of weights: {error.strerror}"
      ) from error

  def probe(self) -> Path:
    """See `SharesStaging.probe`."""
    self.root.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=self.root)
    os.close(descriptor)
    return Path(name)

  def staging(self, key: str) -> Path:
    """See `SharesStaging.staging`."""
    return self._directory(key, partial=True)

  async def send(self, staged: Staged, peer: Control, ranks: int) -> None:
    """Has the server read the files; every rank slices what it needs."""
    del ranks
    directory = self._directory(staged.key)
    partial = self._directory(staged.key, partial=True)
    if partial.exists():
      partial.rename(directory)
    await load_files(peer, str(directory))

  def files(self, key: str) -> list[Path]:
    """The round's files, in the order of the plan's buckets."""
    partial = self._directory(key, partial=True)
    return sorted((partial if partial.exists() else self._directory(key)).glob("*.safetensors"))

  def release(self, key: str) -> None:
    """Removes the round's files, complete or not."""
    for partial in (True, False):
      shutil.rmtree(self._directory(key, partial=partial), ignore_errors=True)
    if (descriptor := self._locks.pop(key, None)) is not None:
      os.close(descriptor)

  def close(self) -> None:
    """Nothing was started."""

  def _directory(self, key: str, *, partial: bool = False) -> Path:
    if not key or key in (".", "..") or "/" in key or "\0" in key:
      raise ValueError(f"round key {key!r} is no file name")
    name = f"{key}-{self._mark}"
    return self.root / (f"{name}.partial" if partial else name)


def shared_memory() -> str:
  """Names the /dev/shm of this machine or container: who says the same sees the same files.

  It is "" where the system does not tell.
  """
  try:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"
  except OSError:
    return ""


async def load_files(peer: Control, directory: str) -> None:
  """Has the server load the safetensors files of a directory that it sees. Raises CallError."""
  body = {"model_path": directory, "load_format": "safetensors", "flush_cache": False}
  await peer.call("POST", "/update_weights_from_disk", body)


def safetensors_header(segments: Sequence[Segment] | Sequence[Entry]) -> bytes:
  """The length-prefixed header of a safetensors file of these tensors, padded to 64 bytes."""
  entries = {
    s.name: {
      "dtype": _SAFETENSORS_DTYPES[s.dtype],
      "shape": list(s.shape),
      "data_offsets": [s.offset, s.offset + s.nbytes],
    }
    for s in sorted(segments, key=lambda s: s.offset)
  }
  text = json.dumps(entries, separators=(",", ":")).encode()
  text += b" " * (-(8 + len(text)) % 64)
  return len(text).to_bytes(8, "little") + text


def open_files(directory: Path, plan: Plan) -> dict[tuple[int, int], np.ndarray]:
  """The buckets of a round's files, mapped: what is written there is seen by all who map them.

  Raises:
    OSError: a file is not there, as on another machine.
  """
  return {
    (bucket.rank, bucket.index): _map(path, bucket.nbytes)
    for path, bucket in _files(directory, plan)
  }


def _files(directory: Path, plan: Plan) -> Iterator[tuple[Path, Bucket]]:
  for number, bucket in enumerate(plan.buckets, 1):
    yield directory / f"model-{number:05}-of-{len(plan.buckets):05}.safetensors", bucket


def _make(path: Path, segments: Sequence[Segment], nbytes: int) -> None:
  header = safetensors_header(segments)
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    os.posix_fallocate(descriptor, 0, len(header) + nbytes)
    os.pwrite(descriptor, header, 0)
  finally:
    os.close(descriptor)


def _map(path: Path, nbytes: int) -> np.ndarray:
  """The last `nbytes` of a file, what follows its header."""
  with path.open("r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
  return np.frombuffer(mapped, np.uint8)[len(mapped) - nbytes :]
