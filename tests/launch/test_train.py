"""`launch.train` from outside: what a run leaves, how it goes on, and faults as one line."""

import json
import pathlib
import shutil
import signal
import time

import numpy as np
from safetensors.numpy import load_file

from agentrl_jax.orchestrate.run import lock
from tests.launch.commands import finish, run, run_refused, start
from tests.launch.small_runs import STEPS, command, episodes, rows


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
  assert f"steps = {STEPS + 1}\n" in (workdir / "config.txt").read_text()
  assert f"steps = {STEPS}\n" in (workdir / "config.previous.txt").read_text()
  refusals = {
    "seed=9": "of a run with seed 0, this configuration has 9: use another work directory",
    "tasks.train_tasks=32": "of a run with training tasks 64-",
    f"steps={STEPS - 1}": f"is after step {STEPS + 1}, this configuration ends at {STEPS - 1}",
  }
  changed = [command(workdir, f"--config=set:{change}") for change in refusals]
  for (code, output), message in zip(
    run_refused(changed, **places), refusals.values(), strict=True
  ):
    assert (code, message in output) == (1, True), output[-2000:]
  with lock(workdir):
    ((code, output),) = run_refused([command(workdir, "--config=set:concurrency=3")], **places)
    assert (code, "in use by another process" in output) == (1, True), output[-2000:]
    assert '"concurrency": 3' not in (workdir / "config.json").read_text()
  assert json.loads(written)


def test_a_run_leaves_what_the_readme_names(whole):
  workdir, output = whole
  names = {path.name for path in workdir.iterdir()}
  assert names >= {
    "config.json", "config.txt", "run.json", "metrics.jsonl", "tensorboard", "trajectories",
    "evaluation", "report.png", "checkpoints", "model",
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


def test_what_is_wrong_with_a_configuration_is_one_line(places, tmp_path):
  unknown = tmp_path / "model"
  unknown.mkdir()
  config = {"architectures": ["Gpt9ForCausalLM"], "model_type": "gpt9"}
  (unknown / "config.json").write_text(json.dumps(config))
  messages = {
    "set:algorithm.hig=0.3": "algorithm.hig",
    "set:algorithm.high=much": "of its own: --config='set:algorithm.high=\"much\"'",
    'set:algorithm.high="much"': "algorithm: '>=' not supported between instances of 'str' and "
    "'int', given high='much': --config=set:algorithm.NAME=VALUE",
    "set:algorithm.high": "a --config=set: has no value: --config=set:PATH=VALUE",
    "set:evaluation=None": "evaluation.tasks=0 leaves evaluations out",
    "set:steps=0": "steps is 0, expected a whole number of at least 1",
    'set:model="nowhere"': "nowhere",
    'set:mesh={"rows": 2}': "rows",
    "set:batch.row_length=16": "expected more than limits.context_tokens, 128",
    f'set:model="{unknown}"': "Gpt9",
    "fiddler:use_sglan": "use_routers, use_server, use_sglang",
    "fiddler:my_changes.all": "'my_changes': the folder of a module of your own",
    'fiddler:use_server(url="here:9")': "url is 'here:9', expected http://HOST:PORT",
    'fiddler:use_algorithm(name="dapo", buffer=8)': "missing 1 required keyword-only argument: "
    "'limit', given buffer=8: --config=set:algorithm.NAME=VALUE",
  }
  changed = [command(tmp_path / "run", f"--config={change}") for change in messages]
  for (code, output), message in zip(
    run_refused(changed, **places), messages.values(), strict=True
  ):
    assert code == 1
    assert message in one_error(output)


def test_what_is_no_coordinator_and_no_written_configuration_is_one_line(places, tmp_path):
  text, other = tmp_path / "config.txt", tmp_path / "run.json"
  text.write_text("steps = 3\n")
  other.write_text("{}")
  two = ["--processes=2", "--process=0"]
  found = run_refused(
    [
      command(tmp_path / "run", "--coordinator=nonsense", *two),
      command(tmp_path / "run", "--coordinator=host:", *two),
      ["launch.train", f"--config=config_file:{text}"],
      ["launch.train", f"--config=config_file:{other}"],
    ],
    **places,
  )
  messages = [
    "--coordinator is 'nonsense', expected HOST:PORT or auto",
    "--coordinator is 'host:', expected HOST:PORT or auto",
    "config_file gives no configuration (JSONDecodeError(",
    "config_file gives no configuration (KeyError('objects')): a run's is config.json",
  ]
  for (code, output), message in zip(found, messages, strict=True):
    assert code == 1
    assert message in one_error(output)


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
