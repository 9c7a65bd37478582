"""`launch.train` over several processes: two learn as one does, and ends if the others differ."""

import os
import re
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.launch.commands import finish, run_refused, start
from tests.launch.small_runs import STEPS, command, rows, sampled, wait_for_steps
from tests.launch.test_train_kills import server_processes
from tests.ports import free_port


def test_two_processes_train_as_one_does(whole, places, tmp_path):
  """Two processes with a device each, data parallel: the first plays, both learn."""
  mesh = '--config=set:mesh={"data":2}'
  pod = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
  batch = "--config=set:batch.micro_rows=2"
  arguments = command(tmp_path / "run", mesh, batch, "--cpu_devices=1", *pod)
  flags = re.sub("--xla_force_host_platform_device_count=[0-9]+", "", os.environ["XLA_FLAGS"])
  environment = {**places, "XLA_FLAGS": flags}
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


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)  # a server needs a minute or two to start where the cores are busy
@pytest.mark.parametrize("way", ["disk", "tcp"])
def test_two_processes_push_their_shards_to_a_server(places, sglang_python, tmp_path, way):
  """Also to one that is killed while the first of them plays and the other stands by."""
  pod = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
  more = ["--config=fiddler:use_sglang", f"--transport={way}", "--config=set:steps=2"]
  mesh = ['--config=set:mesh={"fsdp":2}', "--config=set:batch.micro_rows=2", "--cpu_devices=1"]
  workdir, arguments = tmp_path / "run", command(tmp_path / "run", *more, *mesh, *pod)
  flags = re.sub("--xla_force_host_platform_device_count=[0-9]+", "", os.environ["XLA_FLAGS"])
  environment = places | {"AGENTRL_SGLANG_PYTHON": str(sglang_python), "XLA_FLAGS": flags}
  both = [start([*arguments, str(i)], **environment) for i in range(2)]
  try:
    wait_for_steps(both[0], workdir, 1)
    model = places["AGENTRL_TEST_MODEL"]
    server = max(pid for pid in server_processes(model) if os.getpgid(pid) == pid)
    os.kill(server, signal.SIGKILL)
    outputs = [finish(process, 500) for process in both]
  finally:
    for process in both:
      process.kill()
  assert [code for code, _ in outputs] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
  output = outputs[0][1]
  assert "each of 2 processes pushes its own shards" in output
  assert "engine restarted in" in output
  assert [row["step"] for row in rows(workdir)] == [0, 1]
  assert all(row["faults"] == 0 and row["mismatch_max"] <= 1e-4 for row in rows(workdir))
  assert (workdir / "model" / "model.safetensors").exists()


def test_without_its_others_a_process_ends(places, tmp_path):
  mesh, pod = '--config=set:mesh={"data":8}', ["--coordinator", f"127.0.0.1:{free_port()}"]
  third = ["--processes=2", "--process=2"]
  commands = [command(tmp_path / "run", *pod), command(tmp_path / "run", *pod, *third)]
  messages = "needs --processes=N and --process=I", "--process is 2, expected 0 to 1"
  for (code, output), message in zip(run_refused(commands, **places), messages, strict=True):
    assert (code, message in output) == (1, True), output[-2000:]
  both = [
    start(command(tmp_path / "run", mesh, *pod, "--processes=2", f"--process={i}"), **places)
    for i in range(2)
  ]
  (code, output), (other, _) = finish(both[0]), finish(both[1])
  assert code == 1
  assert "mesh covers 8 devices, expected all 16 of the 2 processes" in output, output[-2000:]
  assert other in (1, -signal.SIGABRT)  # JAX ends a process whose coordinator is gone
