"""Runs the commands of experiments as a study does: each in a process of its own, on one device."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def command(module: str, *arguments: str) -> str:
  """What `python -m MODULE ARGUMENTS` printed; it must end well."""
  environment = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
  }
  done = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=280,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
  return done.stdout
