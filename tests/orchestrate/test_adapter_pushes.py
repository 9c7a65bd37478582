"""Runs whose engine is given adapters alone."""

import asyncio
import dataclasses
import json

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest
from fiddle.experimental import serialization
from rich.console import Console

from agentrl_jax.learner.products import Products
from agentrl_jax.models import lora
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.lora import Lora
from agentrl_jax.ops.quantize import OCP
from agentrl_jax.orchestrate import engines, tiny
from agentrl_jax.orchestrate.engines import EngineContext
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.run import make_deliver, open_run
from agentrl_jax.orchestrate.sync_loop import train
from agentrl_jax.rollout.engine import EngineError
from configs import tiny_rl, use_adapter_pushes, use_lora, use_sglang
from tests.reference.plugins import write_plugin
from tests.transfer.test_sglang_adapters import ADAPTER

LORA = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj", "down_proj")}


def test_adapters_are_pushed_where_there_are_some_and_a_server():
  config = tiny_rl()
  with pytest.raises(ValueError, match="there are no adapters to push: use_lora before it"):
    use_adapter_pushes(config)
  use_lora(config, **LORA)
  with pytest.raises(ValueError, match=r"to a SGLang server, the engine is .*embedded"):
    use_adapter_pushes(config)
  use_sglang(config)
  use_adapter_pushes(config)
  again = fdl.build(serialization.load_json(serialization.dump_json(config)))
  assert again.push_adapters
  config.lora = None
  with pytest.raises(ValueError, match="push_adapters is set, but lora is None"):
    fdl.build(config)


def test_an_engine_is_given_the_adapters_themselves(tmp_path):
  class State:
    weights, beside = "frozen", type("Beside", (), {"adapters": {"path": "adapter"}})

  how = Lora(**LORA)
  assert make_deliver(Products(None, how), push_adapters=True)(State) == {"path": "adapter"}
  context = EngineContext(None, {}, 0, tmp_path, tmp_path, 64, 0, print, how)
  with pytest.raises(ValueError, match="the embedded sampler: it is given merged weights"):
    asyncio.run(engines.embedded()(context))
  with pytest.raises(ValueError, match="the server's weights are FP8"):
    asyncio.run(engines.sglang(dtype="bfloat16", quantization=OCP)(context))


def small(directory):
  """Runs of a model of one layer, which is made in the directory."""
  model = directory / "model"
  model.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64)(model)
  config = tiny_rl()
  config.model, config.tasks.data_dir = str(model), str(directory / "tasks")
  config.tasks.train_tasks, config.tasks.held_out_tasks = 16, 4
  config.concurrency, config.checkpoint_every = 8, 1
  config.batch.groups, config.batch.members, config.batch.only_mixed = 2, 4, False
  config.batch.row_length, config.batch.micro_rows = 160, 2
  config.evaluation.tasks = 0
  config.limits.turn_tokens = 8
  return config


def test_an_engine_is_told_where_its_model_directory_holds_other_weights(tmp_path):
  """Of a run that has not taken a step: it begins at an adapter, or at rounded weights."""
  config, seen = small(tmp_path), []

  async def opened(context):
    seen.append(context.differs)
    raise EngineError("asked")

  async def begin():
    experiment = dataclasses.replace(fdl.build(config), engine=opened)
    with Progressing(Console(quiet=True)) as progress, pytest.raises(EngineError, match="asked"):
      async with open_run(experiment, tmp_path / "run", progress):
        pass

  asyncio.run(begin())
  use_lora(config, **LORA)
  asyncio.run(begin())
  config.lora.base_dtype = "bfloat16"
  asyncio.run(begin())
  write_adapter(config, tmp_path / "start")
  asyncio.run(begin())
  assert seen == [False, False, True, True]


def write_adapter(config, directory):
  """Of random numbers; the configuration then starts at it, in float32."""
  model, how = load_model(config.model), fdl.build(config.lora)
  rng = np.random.default_rng(0)
  drawn = {
    path: lora.Adapter(
      a=jnp.asarray(rng.normal(size=spec.a.shape), jnp.float32),
      b=jnp.asarray(rng.normal(size=spec.b.shape), jnp.float32),
    )
    for path, spec in lora.abstract(model, how).items()
  }
  lora.save(model, drawn, how, directory)
  config.lora.start, config.lora.base_dtype = str(directory), "float32"


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_samples_from_the_adapter_that_a_run_starts_at(
  sglang_python, tmp_path, monkeypatch
):
  """By merged weights, from the first token on."""
  monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(sglang_python))
  config = small(tmp_path)
  config.steps = 1
  use_lora(config, **LORA)
  write_adapter(config, tmp_path / "start")
  use_sglang(config)
  with Progressing(Console(quiet=True)) as progress:
    asyncio.run(train(fdl.build(config), tmp_path / "run", progress))
  (row,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
  assert json.loads(row)["mismatch_max"] < 1e-4


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_pushes_adapters(sglang_python, tmp_path, monkeypatch):
  """The server's log-probs are the learner's, and each token has its adapter's version."""
  plugins = tmp_path / "plugins"
  plugins.mkdir()
  write_plugin(plugins, ADAPTER, "agentrl_sglang_cpu.adapters:register")
  monkeypatch.setenv("PYTHONPATH", str(plugins))
  monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(sglang_python))
  config = small(tmp_path)
  config.steps = 2
  use_lora(config, **LORA)
  use_sglang(config)
  use_adapter_pushes(config)
  workdir = tmp_path / "run"
  for steps in (2, 3):  # and once more from a checkpoint
    config.steps = steps
    with Progressing(Console(quiet=True)) as progress:
      asyncio.run(train(fdl.build(config), workdir, progress))
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert all(row["mismatch_max"] < 1e-4 for row in rows)
  merged = load_model(workdir / "model")
  assert merged.family == "llama"
  log = (workdir / "sglang.log").read_text()
  assert "/load_lora_adapter_from_tensors" in log
  assert "/update_weights" not in log
