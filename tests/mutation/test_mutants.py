"""Breaks a line at a time and expects a test to fail: `python -m pytest tests/mutation -m slow -s`.

Each fault is applied to a copy of the repository. `AGENTRL_MUTANTS=losses/gae` runs one file's.
"""

import collections
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.mutation.mutants import MUTANTS

ROOT = pathlib.Path(__file__).parents[2]
COUNTS = collections.Counter()


@pytest.mark.parametrize("index", range(len(MUTANTS)))
def test_each_line_is_there_once(index):
  mutant = MUTANTS[index]
  assert (ROOT / mutant.file).read_text().count(mutant.line) == 1, mutant.line
  assert mutant.broken not in (ROOT / mutant.file).read_text() or mutant.broken in mutant.line


def test_every_file_of_the_loss_library_has_its_faults():
  files = {f"agentrl_jax/losses/{path.name}" for path in (ROOT / "agentrl_jax/losses").glob("*.py")}
  files.remove("agentrl_jax/losses/__init__.py")
  counts = collections.Counter(mutant.file for mutant in MUTANTS)
  assert {file: counts[file] for file in files if counts[file] < 5} == {}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
  """The files that the tests need, and one compilation cache for all faults."""
  where = tmp_path_factory.mktemp("mutation")
  for name in ("agentrl_jax", "launch", "configs", "experiments", "tests"):
    shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("__pycache__"))
  shutil.copy(ROOT / "pyproject.toml", where)
  return where


def outcome(tests: str, copy: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs the tests on the copy until one fails."""
  environment = os.environ | {
    "PYTHONPATH": str(copy),
    "JAX_COMPILATION_CACHE_DIR": str(copy / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
  return subprocess.run(
    [*command, *tests.split()], cwd=copy, env=environment, capture_output=True, text=True,
    timeout=1700,
  )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_a_fault_nothing_is_noticed(copy):
  files = sorted({file for mutant in MUTANTS for file in mutant.tests.split()})
  done = outcome(" ".join(files), copy)
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("index", range(len(MUTANTS)))
def test_a_fault_is_noticed(index, copy):
  mutant = MUTANTS[index]
  if os.environ.get("AGENTRL_MUTANTS", "") not in mutant.file:
    pytest.skip("another file was asked for")
  original = (ROOT / mutant.file).read_text()
  (copy / mutant.file).write_text(original.replace(mutant.line, mutant.broken))
  try:
    done = outcome(mutant.tests, copy)
  finally:
    (copy / mutant.file).write_text(original)
  assert done.returncode in (0, 1), done.stdout + done.stderr
  caught = done.returncode == 1
  COUNTS["caught" if caught else "survived"] += 1
  print(
    f"{'caught' if caught else 'SURVIVED'}: {mutant.file}: {mutant.broken}; so far {dict(COUNTS)}"
  )
  assert caught, f"survived: {mutant.file}: {mutant.broken}"
