"""Supervised training: batches that differ in rows are one program, also for the run's bits."""

import fiddle as fdl
import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from agentrl_jax.orchestrate import supervised, tiny
from agentrl_jax.orchestrate.metrics import Progressing
from configs import tiny_sft


def trained(folder, *until: int):
  """The weights after runs until so many steps, one after the other."""
  config = tiny_sft()
  config.model, config.episodes.tasks.data_dir = str(folder / "model"), str(folder / "tasks")
  config.make_model = fdl.Config(
    tiny.tiny_llama, vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64
  )
  config.episodes.count = config.episodes.tasks.train_tasks = 24
  config.episodes.tasks.held_out_tasks, config.checkpoint_every = 1, 1
  config.episodes_per_step, config.row_length, config.micro_rows = 6, 196, 1
  for steps in until:
    config.steps = steps
    with Progressing(Console(quiet=True)) as progress:
      supervised.train_supervised(fdl.build(config), folder / "run", progress)
  return load_file(folder / "run" / "model" / "model.safetensors")


def test_a_batch_keeps_the_room_of_larger_ones_before(tmp_path, monkeypatch):
  needed, shapes = [], []

  def pack(episodes, *, least, **options):
    needed.append(len(supervised_pack(episodes, **options).batch.tokens))
    packed = supervised_pack(episodes, least=least, **options)
    shapes.append(packed.batch.tokens.shape[0])
    return packed

  supervised_pack = supervised.pack
  monkeypatch.setattr(supervised, "pack", pack)
  whole = trained(tmp_path / "whole", 8)
  assert min(needed[needed.index(max(needed)) :]) < max(needed), f"all alike: {needed}"
  assert shapes == np.maximum.accumulate(needed).tolist()
  at = needed.index(max(needed)) + 1
  continued = trained(tmp_path / "continued", at, 8)  # begins again without room
  for name, array in whole.items():
    np.testing.assert_array_equal(array, continued[name], name)
