"""`launch.plan` for devices that are not here; and the committed plans of the pods."""

import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import pytest

import configs
from agentrl_jax.analysis.planning import chips
from experiments.ac2 import config as ac2
from experiments.finishing import config as finishing
from experiments.mpo import config as mpo
from experiments.vhd_play import config as vhd_play
from tests.launch.planned import splash_sized
from tests.launch.test_plan import plan

PLANS = Path(__file__).parents[2] / "docs" / "plans"
PODS = {
  name: made
  for name, made in vars(configs).items()
  if inspect.isfunction(made) and made.__module__.startswith("configs.pods.")
} | {
  "mpo_qwen3_4b": mpo.qwen3_4b,
  "mpo_qwen3_30b_a3b": mpo.qwen3_30b_a3b,
  "ac2_qwen3_4b": ac2.qwen3_4b,
  "vhd_play_qwen3_30b_a3b": vhd_play.pod,
  "finishing_qwen3_8b": finishing.finishing_8b_run,
}
MODULES = {"tpu": "libtpu", "gpu": "jax_cuda13_plugin"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
  ("topology", "needs"),
  [
    ("v5e:2x4", "tpu"),
    ("v6e:2x4", "tpu"),
    ("v5:2x2x2", "tpu"),
    ("tpu7x:2x2x1", "tpu"),
    ("h200:8", "gpu"),
  ],
)
def test_the_small_run_planned_for_accelerators(topology, needs):
  if importlib.util.find_spec(MODULES[needs]) is None:
    pytest.skip(f"no compiler for {topology}: bash launch/environment.sh --extra=plan-{needs}")
  arguments = ("--config=config:tests.launch.planned.small", f"--topology={topology}", "--json")
  done = plan(*arguments, timeout=1700)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["fits"] is True and found["training_step"]["mfu"] > 0
  evaluate, step, prefill, decode = found["programs"]
  assert prefill["flops"] > 0 and decode["flops"] > 0 and len(decode["counted_once"]) == 1
  for program in (evaluate, step):
    assert 8 * program["flops"] == pytest.approx(program["flops_all"], rel=0.05)
    assert program["counted_once"] == [] and program["memory"]["temporaries"] > 0
    assert {"fsdp", "tensor"} <= {c["axes"] for c in program["collectives"]}


@pytest.mark.slow
def test_tpu_plans_run_beside_each_other_and_say_nothing_of_it():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("no compiler for v5e:2x2: bash launch/environment.sh --extra=plan-tpu")
  load = (
    "from agentrl_jax.analysis.planning import chips; topology = chips.parse('v5e:2x2'); "
    "chips.prepare_process(topology); print(len(chips.devices(topology)), flush=True); input()"
  )
  command = [sys.executable, "-c", load]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
    assert first.stdout is not None and first.stdout.readline() == "4\n"
    second = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=300)
    first.communicate("\n")
  assert (second.returncode, second.stdout, second.stderr) == (0, "4\n", "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_attention_by_splash_is_planned(topology):
  """The kernels compile for the chip, and their products are counted like those of blocks."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip(f"no compiler for {topology}: bash launch/environment.sh --extra=plan-tpu")
  arguments = (f"--topology={topology}", "--programs=evaluate,step", "--json")
  done = plan("--config=config:tests.launch.planned.small_splash", *arguments, timeout=1700)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["attention"] == ["splash"]
  config = splash_sized().config
  rows, length, layers, n, h = 16, 1024, config.layers, config.heads, config.head_dim
  product = 2 * rows * layers * n * h * length**2 * 3 / 4  # 3 of 4 blocks of 512
  weights = 2 * config.embed * h * (n + config.kv_heads) + 3 * config.embed * config.ffw
  forward = 2 * rows * length * (layers * weights + config.embed * config.vocab_size)
  evaluate, step = found["programs"]
  for program in (evaluate, step):
    assert program["uncounted"] == [] and program["counted_once"] == []
    assert 8 * program["flops"] == pytest.approx(program["flops_all"], rel=0.05)
  assert evaluate["flops_all"] == pytest.approx(forward + 2 * product, rel=0.02)
  # All four times but the last product of layers and the head; attention once, and seven back.
  thrice = 2 * rows * length * config.embed * (layers * config.ffw + config.vocab_size)
  assert step["flops_all"] == pytest.approx(4 * forward - thrice + 9 * product, rel=0.01)


@pytest.mark.parametrize("name", sorted(PODS))
def test_every_pod_has_its_plan(name):
  index = (PLANS / "README.md").read_text()
  assert f"({name}.txt)" in index
  text = (PLANS / f"{name}.txt").read_text()
  assert "fits, " in text and "DOES NOT FIT" not in text


@pytest.mark.parametrize("name", sorted(PODS))
def test_every_pod_builds_for_the_topology_it_names(name):
  config = PODS[name]()
  config.tasks = None  # their files are elsewhere
  experiment = fdl.build(config)
  assert experiment.architecture is not None
  named = re.search(r"--topology=([\w:]+)", inspect.getdoc(PODS[name]) or "")
  assert named is not None
  assert math.prod(experiment.mesh.values()) == chips.parse(named[1]).count
  assert experiment.architecture.abstract() is not None
