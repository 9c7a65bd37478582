"""`launch.train` from outside: it survives kill -9 bit for bit, and faults are one line."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import fiddle as fdl
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.run import lock
from configs import tiny_rl, tiny_sft
from tests.launch.commands import finish, run, start

STEPS = 4


def experiment():
  """Four steps of four groups of four episodes on a tiny model, a checkpoint every two."""
  config = tiny_rl()
  config.model = os.environ["AGENTRL_TEST_MODEL"]
  config.tasks.data_dir = os.environ["AGENTRL_TEST_DATA"]
  config.tasks.train_tasks, config.tasks.held_out_tasks = 64, 8
  config.steps, config.concurrency, config.checkpoint_every = STEPS, 16, 2
  config.engine.slots = 16
  config.batch.groups, config.batch.members = 4, 4
  config.batch.row_length, config.batch.micro_rows, config.batch.only_mixed = 160, 4, False
  config.evaluation.tasks, config.evaluation.samples = 4, 2
  config.limits.turn_tokens = 8
  return config


def supervised():
  """Enough of the task's form for rewards to differ."""
  config = tiny_sft()
  config.model = os.environ["AGENTRL_TEST_MODEL"] + "-base"
  config.make_model = fdl.Config(
    tiny.tiny_llama, vocab_size=300, embed=64, layers=2, heads=2, kv_heads=1, ffw=128
  )
  config.episodes.tasks.data_dir = os.environ["AGENTRL_TEST_DATA"]
  config.episodes.tasks.train_tasks, config.episodes.tasks.held_out_tasks = 64, 8
  config.episodes.count, config.steps, config.episodes_per_step = 64, 60, 16
  config.row_length, config.micro_rows = 160, 4
  return config


def command(workdir: pathlib.Path, *more: str) -> list[str]:
  config = "--config=config:tests.launch.test_train.experiment"
  return ["launch.train", config, f"--workdir={workdir}", *more]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """What the configuration above reads from the environment, and a shared compilation cache."""
  root = tmp_path_factory.mktemp("train")
  environment = {
    "AGENTRL_TEST_MODEL": str(root / "model"),
    "AGENTRL_TEST_DATA": str(root / "tasks"),
    "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  config = "--config=config:tests.launch.test_train.supervised"
  code, output = run(["launch.sft", config, f"--workdir={root}/sft"], **environment)
  assert code == 0, output[-3000:]
  (root / "sft" / "model").rename(root / "model")
  return environment


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory):
  """The work directory of a run that nothing disturbed, and what it printed."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  code, output = run(command(workdir), **places)
  assert code == 0, output[-3000:]
  return workdir, output


def wait_for_steps(process: subprocess.Popen, workdir: pathlib.Path, steps: int) -> None:
  """Until the run has recorded so many."""
  metrics = workdir / "metrics.jsonl"
  deadline = time.monotonic() + 240
  while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
    assert process.poll() is None, process.communicate()[0][-3000:]
    assert time.monotonic() < deadline, f"no {steps} steps within 240 s"
    time.sleep(0.02)


def rows(workdir: pathlib.Path) -> list[dict]:
  """The metrics without clocks."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith("seconds/")} for line in lines
  ]


def episodes(workdir: pathlib.Path) -> list[dict]:
  """Every episode of every step, without clocks."""
  found = []
  for path in sorted((workdir / "trajectories").glob("step_??????.jsonl")):
    found += [json.loads(line) | {"timings": None} for line in path.read_text().splitlines()]
  return found


def sampled(workdir: pathlib.Path) -> list[tuple]:
  """The ids of every episode."""
  samples = [(e["trajectory_id"], e["samples"]) for e in episodes(workdir)]
  return [(name, [s["ids"] for x in all for s in x["segments"]]) for name, all in samples]


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def test_two_processes_train_as_one_does(whole, places, tmp_path):
  """Two processes with a device each, data parallel: the first plays, both learn."""
  mesh, one_device = '--config=set:mesh={"data":2}', "--xla_force_host_platform_device_count=1"
  pod = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
  arguments = command(tmp_path / "run", mesh, "--config=set:batch.micro_rows=2", *pod)
  environment = {**places, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {one_device}"}
  both = [start([*arguments, str(i)], **environment) for i in range(2)]
  for process, said in zip(both, (True, False), strict=True):
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert ("held-out after" in output) is said
  ours, theirs = rows(tmp_path / "run"), rows(whole[0])
  assert len(ours) == STEPS
  for name in ("reward", "loss", "gradient_norm", "update_norm", "mismatch_mean"):
    np.testing.assert_allclose(ours[0][name], theirs[0][name], rtol=1e-3, atol=1e-6, err_msg=name)
  assert ours[0]["gradient_norm"] > 0
  assert sampled(tmp_path / "run")[:16] == sampled(whole[0])[:16]
  weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
  for name, theirs in load_file(whole[0] / "model" / "model.safetensors").items():
    np.testing.assert_allclose(weights[name], theirs, rtol=0, atol=0.1, err_msg=name)


def test_without_its_others_a_process_ends(places, tmp_path):
  mesh, pod = '--config=set:mesh={"data":8}', ["--coordinator", f"127.0.0.1:{free_port()}"]
  code, output = run(command(tmp_path / "run", *pod), **places)
  assert (code, "needs --processes=N and --process=I" in output) == (1, True), output[-2000:]
  code, output = run(command(tmp_path / "run", *pod, "--processes=2", "--process=2"), **places)
  assert (code, "--process is 2, expected 0 to 1" in output) == (1, True), output[-2000:]
  both = [
    start(command(tmp_path / "run", mesh, *pod, "--processes=2", f"--process={i}"), **places)
    for i in range(2)
  ]
  for process in both:
    code, output = finish(process)
    assert code == 1
    assert "mesh covers 8 devices, expected all 16 of the 2 processes" in output, output[-2000:]


def test_a_longer_run_measures_again_and_another_run_is_refused(whole, places, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  before = [(workdir / "evaluation" / f"{n}.jsonl").read_text() for n in ("before", "after")]
  code, output = run(command(workdir, f"--config=set:steps={STEPS + 1}"), **places)
  assert code == 0, output[-3000:]
  assert len(rows(workdir)) == STEPS + 1
  assert (workdir / "evaluation" / "before.jsonl").read_text() == before[0]
  assert (workdir / "evaluation" / "after.jsonl").read_text() != before[1]
  written = (workdir / "config.json").read_text()
  for change, message in (
    ("seed=9", "of a run with seed 0, this configuration has 9: use another work directory"),
    ("tasks.train_tasks=32", "of a run with training tasks 64-"),
    (f"steps={STEPS - 1}", f"is after step {STEPS + 1}, this configuration ends at {STEPS - 1}"),
  ):
    code, output = run(command(workdir, f"--config=set:{change}"), **places)
    assert (code, message in output) == (1, True), output[-2000:]
  with lock(workdir):
    code, output = run(command(workdir, "--config=set:concurrency=3"), **places)
    assert (code, "in use by another process" in output) == (1, True), output[-2000:]
    assert '"concurrency": 3' not in (workdir / "config.json").read_text()
  assert json.loads(written)


def test_a_run_leaves_what_the_readme_names(whole):
  workdir, output = whole
  names = {path.name for path in workdir.iterdir()}
  assert names >= {
    "config.json", "run.json", "metrics.jsonl", "tensorboard", "trajectories", "evaluation",
    "report.png", "checkpoints", "model",
  }  # fmt: skip
  assert [row["step"] for row in rows(workdir)] == list(range(STEPS))
  assert len(episodes(workdir)) == STEPS * 16
  assert f"step {STEPS}/{STEPS}" in output
  assert all(row["mismatch_max"] <= 1e-4 for row in rows(workdir))
  assert all(row["on_policy_share"] == 1.0 for row in rows(workdir))


def test_training_changed_every_weight(whole, places):
  workdir, _ = whole
  before = load_file(pathlib.Path(places["AGENTRL_TEST_MODEL"]) / "model.safetensors")
  after = load_file(workdir / "model" / "model.safetensors")
  assert before.keys() == after.keys()
  assert all(np.any(before[name] != after[name]) for name in before)


@pytest.mark.parametrize("lines", [1, 3], ids=["before a checkpoint", "between checkpoints"])
def test_kill_9_and_the_same_command_give_the_same_run_bit_for_bit(lines, whole, places, tmp_path):
  workdir = tmp_path / "run"
  process = start(command(workdir), **places)
  wait_for_steps(process, workdir, lines)
  process.send_signal(signal.SIGKILL)
  finish(process)
  code, output = run(command(workdir), **places)
  assert code == 0, output[-3000:]
  assert ("resuming after step 2" in output) == (lines == 3)
  undisturbed, _ = whole
  assert rows(workdir) == rows(undisturbed)
  assert episodes(workdir) == episodes(undisturbed)
  for path in sorted((undisturbed / "evaluation").iterdir()):
    assert (workdir / "evaluation" / path.name).read_text() == path.read_text()
  ours, theirs = (load_file(d / "model" / "model.safetensors") for d in (workdir, undisturbed))
  assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_the_written_configuration_runs_again(whole, places):
  workdir, _ = whole
  code, output = run(
    ["launch.train", f"--config=config_file:{workdir}/config.json", f"--workdir={workdir}"],
    **places,
  )
  assert code == 0, output[-3000:]
  assert f"resuming after step {STEPS}" in output


def one_error(output: str) -> str:
  """The one line that says what was wrong; a traceback is no answer."""
  assert "Traceback" not in output
  (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
  return line


@pytest.mark.parametrize(
  ("more", "message"),
  [
    (["--config=set:algorithm.hig=0.3"], "algorithm.hig"),
    (["--config=set:algorithm.high=much"], "much"),
    (["--config=set:steps=0"], "steps is 0, expected a whole number of at least 1"),
    (['--config=set:model="nowhere"'], "nowhere"),
    (['--config=set:mesh={"rows": 2}'], "rows"),
    (["--config=set:batch.row_length=16"], "expected more than limits.context_tokens, 128"),
  ],
)  # fmt: skip
def test_what_is_wrong_with_a_configuration_is_one_line(more, message, places, tmp_path):
  code, output = run(command(tmp_path / "run", *more), **places)
  assert code == 1
  assert message in one_error(output)


def test_an_unknown_architecture_is_named(places, tmp_path):
  (tmp_path / "model").mkdir()
  config = {"architectures": ["Gpt9ForCausalLM"], "model_type": "gpt9"}
  (tmp_path / "model" / "config.json").write_text(json.dumps(config))
  more = f'--config=set:model="{tmp_path}/model"'
  code, output = run(command(tmp_path / "run", more), **places)
  assert code == 1
  assert "gpt9" in one_error(output).lower()


def test_two_runs_do_not_share_a_work_directory(places, tmp_path):
  first = start(command(tmp_path / "run", "--config=set:steps=1000"), **places)
  try:
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "run.json").exists():
      assert time.monotonic() < deadline and first.poll() is None
      time.sleep(0.05)
    code, output = run(command(tmp_path / "run"), **places)
    assert code == 1
    assert "in use by another process" in one_error(output)
    first.send_signal(signal.SIGINT)
    code, output = finish(first, 120)
    assert code == 130, output[-2000:]
    assert "Traceback" not in output
  finally:
    first.kill()


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
  more = ["--config=fiddler:use_sglang", "--config=set:steps=2"]
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
  assert [row["step"] for row in rows(workdir)] == [0, 1]
  assert all(row["faults"] == 0 and row["mismatch_max"] <= 1e-4 for row in rows(workdir))
  assert len(episodes(workdir)) == 2 * 16
  assert server_processes(model) == []
