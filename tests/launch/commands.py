"""Runs the project's commands as a user does: in a process of their own, from its root."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]


def start(arguments: Sequence[str], **environment: str) -> subprocess.Popen:
  """The command `python -m ARGUMENTS`, with its output in one pipe."""
  return subprocess.Popen(
    [sys.executable, "-m", *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=_here(environment),
  )


def finish(process: subprocess.Popen, seconds: float = 300) -> tuple[int, str]:
  """(exit code, output); a command that is not done in time is killed and fails the test."""
  try:
    output, _ = process.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    process.kill()
    output, _ = process.communicate()
    raise AssertionError(f"not done within {seconds} s:\n{output[-3000:]}") from None
  return process.returncode, output


def run(arguments: Sequence[str], **environment: str) -> tuple[int, str]:
  """Starts a command and waits for its end."""
  return finish(start(arguments, **environment))


def run_refused(commands: Sequence[Sequence[str]], **environment: str) -> list[tuple[int, str]]:
  """`run` of several that end at once, with the project imported once for all of them."""
  jobs = [{"arguments": [*one], "environment": environment} for one in commands]
  done = subprocess.run(
    [sys.executable, "-m", "tests.launch.forked"],
    cwd=ROOT,
    input=json.dumps(jobs),
    capture_output=True,
    text=True,
    env=_here(environment),
    timeout=280,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return [(code, output) for code, output in json.loads(done.stdout)]


def _here(environment: dict[str, str]) -> dict[str, str]:
  path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
  return {**os.environ, "PYTHONPATH": path, **environment}
