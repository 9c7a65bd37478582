"""Jobs of a study through the real command: order, cores, resumption, failures, settings."""

import fcntl
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location(
  "launch_commands", ROOT / "tests" / "launch" / "commands.py"
)
assert _spec and _spec.loader
commands = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(commands)


def count(folder: pathlib.Path, *arguments: str, **environment: str):
  """Starts the study with its files and its locks of cores under `folder`."""
  (folder / "tmp").mkdir(exist_ok=True)
  files = [f"--results={folder / 'results'}", f"--runs={folder / 'runs'}"]
  return commands.start(
    ["tests.experiments.counting", *files, *arguments], TMPDIR=str(folder / "tmp"), **environment
  )


def result(folder: pathlib.Path, job: str) -> dict:
  return json.loads((folder / "results" / f"{job}.json").read_text())


def when(condition, seconds: float = 60):
  """Waits for a condition, at most so long."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "did not happen in time"
    time.sleep(0.05)


def test_help_shows_the_flags_of_a_study_and_of_its_table(tmp_path):
  _, output = commands.finish(count(tmp_path, "--help"))
  assert all(f"--{flag}:" in output for flag in ("arms", "seeds", "scale", "cores")), output
  _, output = commands.run(["experiments.mpo.table", "--help"])
  assert "--results:" in output and "--[no]write:" in output


def test_every_arm_and_seed_once_on_a_core_of_its_own(tmp_path):
  code, output = commands.finish(count(tmp_path))
  assert code == 0, output
  files = sorted(path.name for path in (tmp_path / "results").iterdir())
  names = [f"{arm}_{seed}.json" for arm in ("base", "one", "two") for seed in (0, 1)]
  assert files == names
  one = result(tmp_path, "one_1")
  assert one["complete"] and one["result"]["counted"] == 14 and one["result"]["base"] == 4
  assert all(len(result(tmp_path, name[:-5])["result"]["cores"]) == 1 for name in names)
  assert one["about"]["command"] == "python -m experiments.counting.run --arms=one --seeds=1"
  before = (tmp_path / "results" / "one_1.json").read_bytes()
  code, output = commands.finish(count(tmp_path))
  assert code == 0 and "0 jobs to do, 6 complete" in output
  assert (tmp_path / "results" / "one_1.json").read_bytes() == before
  code, output = commands.finish(count(tmp_path, UNTIL="5"))
  assert code == 1 and "was made with other settings" in output


def test_what_a_smoke_run_waits_for_has_all_cores(tmp_path):
  code, output = commands.finish(count(tmp_path, "--scale=smoke"))
  assert code == 0, output
  cores = {job: result(tmp_path, job)["result"]["cores"] for job in ("base_0", "one_0", "two_0")}
  assert cores["base_0"] == sorted(os.sched_getaffinity(0))
  if len(cores["base_0"]) > 1:
    assert len(cores["one_0"]) == len(cores["two_0"]) == 1 and cores["one_0"] != cores["two_0"]
  assert not (tmp_path / "results" / "base_1.json").exists()


def test_a_failed_job_is_named_and_goes_on_where_it_was(tmp_path):
  code, output = commands.finish(count(tmp_path, "--seeds=0", FAILS="one_0"))
  assert code == 1
  assert "one 0: failed" in output and "two is enough" in output
  assert result(tmp_path, "two_0")["complete"]
  partial = result(tmp_path, "one_0")
  assert not partial["complete"] and partial["result"] == {"counted": 2}
  assert partial["about"]["progress"] == [2, 4]
  code, output = commands.finish(count(tmp_path, "--seeds=0", FAILS="one_0"))
  assert code == 0 and "1 jobs to do, 2 complete" in output
  assert result(tmp_path, "one_0")["result"]["from"] == 2


def test_a_job_is_done_again_where_there_are_results_alone(tmp_path):
  assert commands.finish(count(tmp_path, "--seeds=0"))[0] == 0
  before = result(tmp_path, "one_0")
  (tmp_path / "results" / "one_0.json").unlink()
  shutil.rmtree(tmp_path / "runs")
  code, output = commands.finish(count(tmp_path, "--arms=one", "--seeds=0"))
  assert code == 0 and "2 jobs to do, 0 complete" in output, output
  assert result(tmp_path, "one_0")["result"]["counted"] == before["result"]["counted"]
  code, output = commands.finish(count(tmp_path, "--seeds=0"))
  assert code == 0 and "0 jobs to do, 3 complete" in output, output


def test_jobs_that_begin_from_a_failed_one_do_not_run(tmp_path):
  code, output = commands.finish(count(tmp_path, "--seeds=1", FAILS="base_1"))
  assert code == 3
  assert "one 1: not run, as what it begins from failed" in output
  assert not (tmp_path / "results" / "one_1.json").exists()


def test_an_interrupt_stops_the_jobs_and_frees_their_cores(tmp_path):
  running = count(tmp_path, "--seeds=0", HANGS="base_0")
  when(lambda: (tmp_path / "results" / "base_0.json").exists())
  running.send_signal(signal.SIGTERM)
  code, output = commands.finish(running)
  assert code == 130, output
  left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30).stdout
  assert str(tmp_path) not in left
  for path in (tmp_path / "tmp").glob("agentrl-cores-*/*"):
    with path.open("w") as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_core_has_two_jobs_of_two_commands(tmp_path):
  """With every core taken by others, a study waits for one."""
  folder = tmp_path / "tmp" / f"agentrl-cores-{os.getuid()}"
  folder.mkdir(parents=True)
  taken = [(folder / str(core)).open("w") for core in os.sched_getaffinity(0)]
  for file in taken:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  running = count(tmp_path, "--arms=one", "--seeds=0")
  time.sleep(6)
  assert running.poll() is None and not (tmp_path / "results").exists()
  taken[-1].close()
  code, output = commands.finish(running)
  assert code == 0 and result(tmp_path, "one_0")["complete"], output
  core = sorted(os.sched_getaffinity(0))[-1]
  assert result(tmp_path, "one_0")["result"]["cores"] == [core]
  for file in taken[:-1]:
    file.close()


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--arms=three", "unknown arm 'three'; there are base, one, two"),
    ("--seeds=a", "--seeds is 'a', expected whole numbers"),
  ],
)
def test_what_is_not_there_is_refused(tmp_path, flag, message):
  code, output = commands.finish(count(tmp_path, flag))
  assert code == 1 and message in output


def test_all_papers_have_a_line():
  done = subprocess.run(
    [sys.executable, "-m", "experiments.all", "--table"],
    cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
  )  # fmt: skip
  papers = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/table.py"))
  lines = [line.split(" | ") for line in done.stdout.splitlines()]
  assert [line[0] for line in lines] == papers
  for line in lines:
    assert len(line) == 7
    assert line[2] in ("supported", "refuted", "inconclusive", "not run")
