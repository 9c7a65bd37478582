"""`launch.plan` on CPU devices: its numbers against the compiler's own and the batch's, and what it
says when it cannot plan.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest

from agentrl_jax.analysis.planning import chips, estimate
from agentrl_jax.learner.state import make_state
from agentrl_jax.models.llama import bind
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.run import require_architecture
from launch import programs
from tests.launch.planned import architecture, mixture, small

ROOT = Path(__file__).parents[2]


def plan(*arguments, timeout=280):
  command = [sys.executable, "-m", "launch.plan", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def experiment():
  config = small()
  config.tasks = None
  return fdl.build(config)


@pytest.fixture(scope="module")
def whole():
  done = plan("--config=config:tests.launch.planned.small", "--topology=cpu:8", "--json")
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_the_plan_of_a_small_run(whole):
  model = architecture()
  leaves = jax.tree.leaves(model.abstract(), is_leaf=lambda x: hasattr(x, "axes"))
  parameters = sum(int(np.prod(spec.shape)) for spec in leaves)
  assert whole["parameters"] == parameters and whole["fits"] is True
  assert (whole["rows"], whole["tokens"]) == (16, 16 * 128)
  assert whole["attention"] == ["all scores at once, rows of 128"]
  assert [p["name"] for p in whole["programs"]] == ["evaluate", "step", "prefill", "decode"]
  assert whole["sharding"][-1].split()[-1] == f"{whole['resident']['weights']:,}"
  # 8 rows over fsdp, 2 key-value heads over tensor: 2 layers x 2 x [2, 1, 16, 127] float32.
  assert whole["resident"]["sampler cache"] == 2 * 2 * (2 * 1 * 16 * 127) * 4


def test_products_are_shared_out(whole):
  """What the devices do together is what the jaxpr says; the step is three passes and one more of
  the layers, as the head's logits are few enough to be kept.
  """
  evaluate, step, prefill, decode = whole["programs"]
  config = architecture().config
  for program in (evaluate, step):
    assert 8 * program["flops"] == pytest.approx(program["flops_all"], rel=0.02)
    assert program["counted_once"] == []
  assert 3.5 < step["flops_all"] / evaluate["flops_all"] < 4
  d, f, n, k, h = config.embed, config.ffw, config.heads, config.kv_heads, config.head_dim
  layers = config.layers * (2 * d * h * (n + k) + 3 * d * f)
  scores = config.layers * 2 * n * h * 127
  head = d * config.vocab_size
  assert decode["flops_all"] == pytest.approx(2 * 8 * (layers + scores + head), rel=0.01)
  assert prefill["flops_all"] == pytest.approx(2 * 8 * 127 * (layers + scores), rel=0.01)
  assert len(decode["counted_once"]) == 1


def test_what_devices_send_to_each_other(whole):
  """Each of 4 micro-batches gathers every layer's weights over fsdp, of which it has a quarter."""
  layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4 / 2  # bytes, cut over tensor
  for program in whole["programs"][:2]:
    by = {(c["kind"], c["axes"], c["group"]): c["nbytes"] for c in program["collectives"]}
    assert 4 * layers * 3 / 4 <= by["all-gather", "fsdp", 4] < 3 * 4 * layers
    assert by["all-reduce", "tensor", 2] > 0


def test_the_plan_of_a_mixture_of_experts():
  """Loops over tiles run as often as a balanced routing makes them, so the products are those of
  the active parameters and of part-filled tiles; every device has its part.
  """
  arguments = ("--topology=cpu:8", "--programs=evaluate,step", "--json")
  done = plan("--config=config:tests.launch.planned.small_mixture", *arguments)
  assert done.returncode == 0, done.stderr
  evaluate, step = json.loads(done.stdout)["programs"]
  config = mixture().config
  d, h, tokens = config.embed, config.head_dim, 16 * 128
  attention = 2 * d * h * (config.heads + config.kv_heads) + 2 * config.heads * h * 128
  experts = d * config.experts + 2 * 3 * d * config.expert_ffw
  expected = 2 * tokens * (config.layers * (attention + experts) + d * config.vocab_size)
  assert evaluate["flops_all"] == pytest.approx(expected, rel=0.1)
  for program in (evaluate, step):
    assert program["counted_once"] == []
    assert 8 * program["flops"] == pytest.approx(program["flops_all"], rel=0.05)
    assert "expert" in {c["axes"] for c in program["collectives"]}


def test_memory_is_the_compilers_and_what_else_is_held(experiment):
  mesh = make_mesh(fsdp=4, tensor=2)
  run = programs.trace_run(experiment, architecture(), mesh, programs.Sampler(8, "float32"))
  traced = next(p for p in run.programs if p.name == "evaluate")
  compiled = traced.trace().lower().compile().memory_analysis()
  found = estimate.estimate(traced, run, chips.parse("cpu:8"), dict(mesh.shape)).memory
  assert found is not None and found.capacity is None and found.fits is None
  assert found.arguments == compiled.argument_size_in_bytes
  assert found.temporaries == compiled.temp_size_in_bytes > 0
  held = run.resident
  assert found.elsewhere == held["optimizer"] + held["sampler weights"] + held["sampler cache"]
  assert found.peak == sum(
    (found.arguments, found.outputs, found.temporaries, found.code, found.elsewhere)
  )
  # The state that training makes has these bytes on its first device.
  state = make_state(architecture(), experiment.optimizer, mesh)
  own = [s.data.nbytes for x in jax.tree.leaves(state.weights) for s in x.addressable_shards[:1]]
  assert held["weights"] == sum(own)


def test_roofline_and_utilisation_by_hand():
  """197 TFLOP at 197 TFLOP/s take a second; 409.5 GB half of one; 100 GB over 200 GB/s too."""
  from agentrl_jax.analysis.planning.hlo_cost import Collective, Cost

  chip = chips.CHIPS["v5e"]
  sent = (Collective("all-gather", "fsdp", 8, 1, 60e9), Collective("all-reduce", "-", 8, 1, 40e9))
  line = estimate.roofline(Cost(197e12, 409.5e9, sent, ()), chip)
  assert line is not None
  assert (line.products, line.memory, line.network) == (1.0, 0.5, 0.5)
  assert (line.seconds, line.bound) == (1.0, "products")
  parts = {
    name: estimate.Estimate(name, "", 0.0, flops, roofline=line)
    for name, flops in (("evaluate", 16 * 197e12 / 6), ("step", 16 * 197e12))
  }
  step = estimate.training_step(parts, chips.parse("v5e:4x4"), 1)
  assert step is not None and (step.seconds, step.mfu) == (2.0, 0.5)


def test_topologies_by_name():
  assert chips.parse("v5e:4x4").count == 16 and chips.parse("v5:2x2x2").count == 8
  assert chips.parse("tpu7x:2x2x1").count == 8 and chips.parse("h200:8").count == 8
  for wrong in ("v5e", "v5e:4", "v5:4x4", "a100:8", "v9:2x2", "cpu:0", "h200:12"):
    with pytest.raises(ValueError, match=rf"{wrong!r}, accepted are cpu:N, .*v5e:AxB"):
      chips.parse(wrong)


@pytest.mark.parametrize(("topology", "extra"), [("v6e:4x4", "plan-tpu"), ("h200:8", "plan-gpu")])
def test_a_missing_compiler_is_one_line(monkeypatch, topology, extra):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(chips.MissingExtra, match=f"--extra={extra}$") as error:
    chips.prepare_process(chips.parse(topology))
  assert "\n" not in str(error.value)


def test_an_unknown_topology_ends_the_command():
  done = plan("--config=config:tests.launch.planned.small", "--topology=v5e:4x4x4")
  assert done.returncode == 1 and done.stdout == ""
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith("error: --topology is 'v5e:4x4x4', accepted are cpu:N, h100:N, h200:N")


def test_a_compiler_that_refuses_is_quoted():
  said = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (81.36G) exceeds available HBM (15.75G). HLO module: jit_step.\n"
  )
  assert estimate.refusal(said) == (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (81.36G) exceeds "
    "available HBM (15.75G)"
  )
  assert estimate.refusal("INVALID_ARGUMENT: no") == ""


def test_a_run_refuses_another_architecture_than_was_planned(experiment):
  import dataclasses

  require_architecture(experiment, architecture())
  other = bind(dataclasses.replace(architecture().config, ffw=256))
  with pytest.raises(ValueError, match=r"mlp\.gate \(2, 64, 256\).*mlp\.gate \(2, 64, 128\)"):
    require_architecture(experiment, other)
