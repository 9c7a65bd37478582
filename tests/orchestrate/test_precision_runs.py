"""A whole run that trains adapters with products in FP8, left after a step and gone on with."""

import asyncio
import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from agentrl_jax.models import lora
from agentrl_jax.models.hf import load_model
from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.supervised import train_supervised
from agentrl_jax.orchestrate.sync_loop import train
from configs import tiny_rl, tiny_sft, use_fp8_products, use_fp8_sampler, use_lora

TARGETS = ("q_proj", "down_proj")


def experiment(model, tasks, steps, **lora_options):
  config = tiny_rl()
  config.model, config.tasks.data_dir = str(model), str(tasks)
  config.tasks.train_tasks, config.tasks.held_out_tasks = 16, 4
  config.algorithm.kl = 0.1  # so that there is a reference policy
  config.steps, config.concurrency, config.checkpoint_every = steps, 8, 1
  config.engine.slots = 8
  config.batch.groups, config.batch.members, config.batch.only_mixed = 2, 4, False
  config.batch.row_length, config.batch.micro_rows = 160, 2
  config.evaluation.tasks = 0
  config.limits.turn_tokens = 8
  use_fp8_products(config, scaling="delayed")
  use_fp8_sampler(config, weights=False, cache=True)
  use_lora(config, **{"rank": 4, "alpha": 8.0, "targets": TARGETS} | lora_options)
  return fdl.build(config)


def run(workdir, *arguments, **options):
  with Progressing(Console(quiet=True)) as progress:
    asyncio.run(train(experiment(*arguments, **options), workdir, progress))


@pytest.mark.slow
def test_a_run_of_adapters_goes_on_and_leaves_both_forms(tmp_path):
  model, tasks, workdir = tmp_path / "model", tmp_path / "tasks", tmp_path / "run"
  model.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64)(model)
  run(workdir, model, tasks, 1)
  first = load_file(workdir / "adapter" / lora.TENSORS)
  with pytest.raises(ValueError, match="of a run with adapters"):
    run(workdir, model, tasks, 2, rank=2)
  run(workdir, model, tasks, 2)
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [0, 1]
  # Delayed scales: what a second start would lose, were they no part of the checkpoint.
  assert all(row["skipped"] == 0 and row["mismatch_max"] < 4 for row in rows)

  adapters = load_file(workdir / "adapter" / lora.TENSORS)
  assert adapters.keys() == first.keys() and len(adapters) == 4
  assert any(np.any(adapters[name] != first[name]) for name in adapters)
  before, after = (load_file(d / "model.safetensors") for d in (model, workdir / "model"))
  for name, base in before.items():
    module = f"base_model.model.{name.removesuffix('.weight')}"
    change = np.zeros_like(base)
    if f"{module}.lora_A.weight" in adapters:
      change = 2.0 * adapters[f"{module}.lora_B.weight"] @ adapters[f"{module}.lora_A.weight"]
      assert np.abs(change).max() > 0
    np.testing.assert_allclose(after[name], base + change, rtol=1e-6, atol=1e-7)
  how = experiment(model, tasks, 2).lora
  loaded = lora.load(load_model(model), how, workdir / "adapter")
  assert {leaf.shape[-1] for leaf in jax.tree.leaves(loaded)} == {4, 32}


def test_supervised_training_of_adapters_with_products_in_fp8(tmp_path):
  """The base stays; the model written is the base and its adapters; a second start goes on."""
  config = tiny_sft()
  config.model, config.episodes.tasks.data_dir = str(tmp_path / "model"), str(tmp_path / "tasks")
  config.make_model = fdl.Config(
    tiny.tiny_llama, vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64
  )
  config.episodes.count, config.episodes.tasks.train_tasks = 8, 8
  config.episodes.tasks.held_out_tasks = 1
  config.episodes_per_step, config.checkpoint_every = 4, 1
  use_lora(config, rank=4, alpha=8.0, targets=TARGETS)
  use_fp8_products(config, scaling="delayed")
  for steps in (1, 2):
    config.steps = steps
    with Progressing(Console(quiet=True)) as progress:
      trained = train_supervised(fdl.build(config), tmp_path / "run", progress)
  rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [0, 1] and rows[1]["loss"] > 0
  adapters = load_file(tmp_path / "run/adapter" / lora.TENSORS)
  before, after = (load_file(d / "model.safetensors") for d in (tmp_path / "model", trained))
  changed = {name for name in before if np.any(before[name] != after[name])}
  assert changed == {
    "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
  }  # fmt: skip
  assert len(adapters) == 2 * len(changed)
  config.lora.rank = 2
  with (
    Progressing(Console(quiet=True)) as progress,
    pytest.raises(ValueError, match="of a run with adapters"),
  ):
    train_supervised(fdl.build(config), tmp_path / "run", progress)


def test_what_they_do_not_serve_is_refused():
  with pytest.raises(ValueError, match="is for Experiment, this configuration builds Supervised"):
    use_fp8_sampler(tiny_sft())
  other = fdl.Config(tiny.tiny_llama)
  for change in (use_lora, use_fp8_products):
    with pytest.raises(ValueError, match="for Experiment or Supervised, this configuration builds"):
      change(other)
