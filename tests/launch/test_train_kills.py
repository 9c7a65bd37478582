"""`launch.train` through kill -9: its own, bit for bit, and that of the SGLang server."""

import contextlib
import os
import pathlib
import signal

import pytest
from safetensors.numpy import load_file

from tests.launch.commands import finish, run, start
from tests.launch.small_runs import (
  STEPS,
  command,
  episodes,
  rows,
  wait_for_checkpoint,
  wait_for_steps,
)


@pytest.mark.parametrize(
  "lines",
  [
    pytest.param(1, id="before a checkpoint", marks=pytest.mark.slow),
    pytest.param(3, id="between checkpoints"),
  ],
)
def test_kill_9_and_the_same_command_give_the_same_run_bit_for_bit(lines, whole, places, tmp_path):
  workdir = tmp_path / "run"
  process = start(command(workdir), **places)
  wait_for_steps(process, workdir, lines)
  saved = wait_for_checkpoint(process, workdir) if lines == 3 else 0
  process.send_signal(signal.SIGKILL)
  finish(process)
  code, output = run(command(workdir), **places)
  assert code == 0, output[-3000:]
  if saved:
    assert any(f"resuming after step {step}" in output for step in range(saved, STEPS + 1))
  else:
    assert "resuming" not in output
  undisturbed, _ = whole
  assert rows(workdir) == rows(undisturbed)
  assert episodes(workdir) == episodes(undisturbed)
  for path in sorted((undisturbed / "evaluation").iterdir()):
    assert (workdir / "evaluation" / path.name).read_text() == path.read_text()
  ours, theirs = (load_file(d / "model" / "model.safetensors") for d in (workdir, undisturbed))
  assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def server_processes(model: str) -> list[int]:
  """Every process of the SGLang server of this model directory."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      arguments = (path / "cmdline").read_bytes().split(b"\0")
      if b"sglang.launch_server" in arguments and model.encode() in arguments:
        found.append(int(path.name))
  return found


@pytest.mark.sglang
@pytest.mark.timeout(900)  # a server needs a minute or two to start where the cores are busy
def test_kill_9_of_the_server_costs_no_step(places, sglang_python, tmp_path):
  """The run restarts it, goes on, and at its end leaves no process behind."""
  workdir, model = tmp_path / "run", places["AGENTRL_TEST_MODEL"]
  environment = places | {"AGENTRL_SGLANG_PYTHON": str(sglang_python)}
  more = ["--config=fiddler:use_sglang", "--transport=auto", "--config=set:steps=2"]
  process = start(command(workdir, *more), **environment)
  try:
    wait_for_steps(process, workdir, 1)
    server = max(pid for pid in server_processes(model) if os.getpgid(pid) == pid)
    os.kill(server, signal.SIGKILL)
    code, output = finish(process, 500)
  finally:
    process.kill()
  assert code == 0, output[-3000:]
  assert "Traceback" not in output
  assert "engine restarted in" in output
  assert "transport disk; nixl: " in output  # and why nothing better
  assert [row["step"] for row in rows(workdir)] == [0, 1]
  assert all(row["faults"] == 0 and row["mismatch_max"] <= 1e-4 for row in rows(workdir))
  assert len(episodes(workdir)) == 2 * 16
  assert server_processes(model) == []
