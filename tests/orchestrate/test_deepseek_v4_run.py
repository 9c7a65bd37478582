"""DeepSeek V4 in the training loop: the embedded engine samples from the learner's policy, also
after weights, corrections or adapters have moved.
"""

import asyncio
import dataclasses
import json
import shutil

import fiddle as fdl
import jax
import numpy as np
import pytest
from rich.console import Console

from agentrl_jax.losses import recipes
from agentrl_jax.models import deepseek_v4
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.deepseek_v4_decoder import HASHED, HEAVY, ROUTED, SPARSE, WINDOW
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.model import initialize
from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.metrics import Progressing
from agentrl_jax.orchestrate.sync_loop import train
from configs import tiny_rl, use_lora, use_routers
from tests.models.test_deepseek_v4 import CONFIG

ORDER = ((WINDOW, HASHED), (HEAVY, ROUTED), (SPARSE, ROUTED))


def write_model(directory):
  """Random weights of three layers, with the tokenizer of a tiny Llama."""
  llama = directory.with_name("llama")
  llama.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=8, layers=1, heads=1, kv_heads=1, ffw=8)(llama)
  end = json.loads((llama / "config.json").read_text())["eos_token_id"]
  config = dataclasses.replace(
    CONFIG, vocab_size=300, layers=len(ORDER), order=ORDER, max_position=256, eos_token_id=end
  )
  model = deepseek_v4.bind(config)
  save_weights(model, initialize(model, jax.random.key(0)), directory)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(llama / name, directory / name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_a_run_learns_and_goes_on(tmp_path, adapters):
  model, workdir = tmp_path / "model", tmp_path / "run"
  write_model(model)
  config = tiny_rl()
  config.model, config.tasks.data_dir = str(model), str(tmp_path / "tasks")
  config.tasks.train_tasks, config.tasks.held_out_tasks = 16, 4
  config.algorithm = fdl.Config(recipes.sft)  # moves weights whatever the rewards are
  config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 0
  config.engine.slots, config.concurrency, config.checkpoint_every = 4, 4, 1
  config.batch.groups, config.batch.members, config.batch.only_mixed = 2, 2, False
  config.batch.row_length, config.batch.micro_rows, config.batch.share_prompts = 160, 2, False
  config.evaluation.tasks = 0
  config.limits.turn_tokens = 8
  if adapters:
    use_lora(config, rank=2, alpha=4.0, targets=("wq_b", "wkv", "wo_a", "w1"))
  else:
    use_routers(config, correction_rate=0.01)
  for steps in (2, 3):  # and once more from a checkpoint
    config.steps = steps
    with Progressing(Console(quiet=True)) as progress:
      asyncio.run(train(fdl.build(config), workdir, progress))
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert all(row["mismatch_max"] < 1e-4 and row["update_norm"] > 0 for row in rows)
  before, after = TensorFiles(model), TensorFiles(workdir / "model")
  changed = {name for name in before.names() if np.any(before.read(name) != after.read(name))}
  assert "layers.0.attn.wq_b.weight" in changed
  assert "layers.0.ffn.gate.tid2eid" not in changed
  assert ("layers.2.ffn.gate.bias" in changed) != adapters
