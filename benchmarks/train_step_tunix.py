"""google-tunix's side of benchmarks/train_step.py; runs in the environment of install_tunix.sh.

    python train_step_tunix.py MODEL BATCH.npz MICRO_ROWS

Its own Llama model, GRPO loss and trainer's jitted step (gradient, clipping, AdamW) on given
completions. For each line read from stdin it makes a step and answers with a line of JSON.
"""

import importlib.metadata
import json
import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.rl import algo_core, common, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer

NO_TOKEN = -1  # as id of padding: nothing is padded here


def load(directory: str) -> llama.Llama3:
  fields = json.loads((pathlib.Path(directory) / "config.json").read_text())
  config = llama.ModelConfig(
    num_layers=fields["num_hidden_layers"], vocab_size=fields["vocab_size"],
    embed_dim=fields["hidden_size"], hidden_dim=fields["intermediate_size"],
    num_heads=fields["num_attention_heads"], head_dim=fields["head_dim"],
    num_kv_heads=fields["num_key_value_heads"], rope_theta=int(fields["rope_theta"]),
    norm_eps=fields["rms_norm_eps"], weight_tying=fields["tie_word_embeddings"],
  )  # fmt: skip
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (AxisType.Auto,) * 2)
  return params.create_model_from_safe_tensors(directory, config, mesh, dtype=jnp.float32)


def make_trainer(model: llama.Llama3, parts: int) -> trainer.Trainer:
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0))
  accumulated = parts if parts > 1 else None
  settings = peft_trainer.TrainingConfig(
    eval_every_n_steps=1 << 30, gradient_accumulation_steps=accumulated
  )
  made = trainer.Trainer(model, optimizer, settings, custom_checkpoint_metadata_fn=dict)
  algorithm = GRPOConfig(
    beta=0.0, epsilon=0.2, num_generations=8, loss_agg_mode="token-mean", num_iterations=1
  )
  algorithm.temperature = 1.0
  algorithm.epsilon_high = 0.28

  def loss(model: llama.Llama3, train_example: common.TrainExample):
    return algo_core.grpo_loss_fn(model, train_example, algorithm, NO_TOKEN, NO_TOKEN)

  made.with_loss_fn(loss, has_aux=True)
  return made.with_gen_model_input_fn(lambda example: {"train_example": example})


def slices(batch: dict[str, np.ndarray], micro_rows: int) -> list[common.TrainExample]:
  rows = len(batch["advantages"])
  return [
    common.TrainExample(
      prompt_ids=batch["prompt_ids"][i : i + micro_rows].astype(np.int32),
      prompt_mask=batch["prompt_mask"][i : i + micro_rows].astype(bool),
      completion_ids=batch["completion_ids"][i : i + micro_rows].astype(np.int32),
      completion_mask=batch["tool_mask"][i : i + micro_rows].astype(bool),
      advantages=batch["advantages"][i : i + micro_rows].astype(np.float32),
      ref_per_token_logps=None,
      old_per_token_logps=None,
    )
    for i in range(0, rows, micro_rows)
  ]


def main() -> None:
  directory, path, micro_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
  parts = slices(dict(np.load(path)), micro_rows)
  step, _ = make_trainer(load(directory), len(parts)).jit_train_and_eval_step()
  versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax")}
  print(json.dumps({"versions": versions}), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    found = jax.block_until_ready([step(part) for part in parts])
    answer = {
      "wall_seconds": time.perf_counter() - wall,
      "cpu_seconds": time.process_time() - cpu,
      "loss": float(np.mean([loss for loss, _, _ in found])),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if len(parts) == 1:  # of parts it has the norm of each, not of their sum
      answer["gradient_norm"] = float(found[0][2])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
