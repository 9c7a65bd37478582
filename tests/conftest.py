"""Strict mode for every test: 8 CPU devices, no silent promotion, no NaN; set before jax loads."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "jax" in sys.modules:
  raise RuntimeError("jax was imported before tests/conftest.py could force 8 CPU devices")
os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = (
  "--xla_force_host_platform_device_count=8",
  # Most of the time goes to compiling, and that is 2.5 times as fast without optimisations.
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# Programs that several tests compile are compiled once, for all workers of this run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="agentrl-tests-")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax  # noqa: E402
import pytest  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_nans", True)

# A shell ignores SIGINT for what it starts in the background, and these tests' programs inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.sglang_fixture"]

# Where tests run several at a time, these begin first: a long one at the end would run alone.
SERVER = ("tests/transfer/test_sglang.py", "tests/rollout/test_sglang_server.py")
RUNS = tuple(f"tests/launch/test_train{name}.py" for name in ("", "_kills", "_processes"))
SHARE = {path: together[0] for together in (SERVER, RUNS) for path in together}
LONGEST = (*SERVER, *RUNS, "tests/launch/", "tests/experiments/", "tests/models/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  def place(item: pytest.Item) -> int:
    found = [i for i, prefix in enumerate(LONGEST) if item.nodeid.startswith(prefix)]
    return min(found, default=len(LONGEST))

  items.sort(key=place)
  for item in items:
    if item.get_closest_marker("sglang") and not item.get_closest_marker("timeout"):
      item.add_marker(pytest.mark.timeout(600))  # a server may have to start first


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
  """A file system of a mebibyte."""
  disk = tmp_path / "disk"
  disk.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
  if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
    pytest.skip("needs root to mount a small tmpfs")
  yield disk
  subprocess.run(["umount", str(disk)], check=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
  """With `--dist=loadfile` also files that share a server or runs stay on one worker."""
  if config.getvalue("dist") != "loadfile":
    return None

  class Scheduler(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
      path = super()._split_scope(nodeid)
      return SHARE.get(path, path)

  return Scheduler(config, log)
