"""TRL's side of train_step.py and train_step_smollm2.py; runs where install_trl.sh installed it.

    python train_step_trl.py MODEL BATCH.npz MICRO_ROWS

Its real GRPOTrainer computes loss, gradient, clipping and AdamW update on given completions. For
each line read from stdin ("step", "old" or "peak") it does that and answers with a line of JSON.
"""

import json
import os
import resource
import sys
import tempfile
import time

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset


def make_trainer(model_directory: str, rows: int, micro_rows: int) -> trl.GRPOTrainer:
  model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=os.path.join(model_directory, "tokenizer.json"), pad_token="<|im_end|>",
    eos_token="<|im_end|>",
  )  # fmt: skip
  arguments = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, fp16=False,
    gradient_checkpointing=False, per_device_train_batch_size=micro_rows,
    gradient_accumulation_steps=rows // micro_rows, num_generations=8, beta=0.0,
    loss_type="dapo", epsilon=0.2, epsilon_high=0.28, temperature=1.0, learning_rate=1e-5,
    adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0,
  )  # fmt: skip
  trainer = trl.GRPOTrainer(
    model=model, args=arguments, processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}),
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
  )  # fmt: skip
  trainer.create_optimizer()
  trainer.model.train()
  trainer.current_gradient_accumulation_steps = rows // micro_rows
  return trainer


def slices(batch: dict[str, torch.Tensor], micro_rows: int) -> list[dict[str, torch.Tensor]]:
  """What `_prepare_inputs` hands to the loss after generation, a micro-batch at a time."""
  rows = batch["advantages"].shape[0]
  mask = batch["tool_mask"]
  return [
    {name: x[i : i + micro_rows] for name, x in batch.items()} | {"num_items_in_batch": mask.sum()}
    for i in range(0, rows, micro_rows)
  ]


def step(trainer: trl.GRPOTrainer, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
  """As Trainer's inner loop: backward of each micro-batch, clip, update."""
  loss = 0.0
  for part in parts:
    value = trainer.compute_loss(trainer.model, part)
    trainer.accelerator.backward(value)
    loss += float(value)
  norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
  trainer.optimizer.step()
  trainer.model.zero_grad()
  trainer._metrics["train"].clear()
  return {"loss": loss, "gradient_norm": float(norm)}


def old(trainer: trl.GRPOTrainer, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
  """The pass for old log-probs, which TRL adds when it samples with vLLM or steps off-policy."""
  total = 0.0
  with torch.no_grad():
    for part in parts:
      ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
      logp, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), part["completion_ids"].shape[1]
      )
      total += float((logp * part["tool_mask"]).sum())
  return {"logp": total}


def peak() -> dict[str, float]:
  a = torch.ones(2048, 2048)
  a @ a
  start = time.process_time()
  for _ in range(4):
    a @ a
  return {"gflops": 4 * 2 * 2.048**3 / (time.process_time() - start)}


def main() -> None:
  model_directory, path, micro_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
  batch = {name: torch.from_numpy(x) for name, x in np.load(path).items()}
  rows = batch["advantages"].shape[0]
  trainer = make_trainer(model_directory, rows, micro_rows)
  parts = slices(batch, micro_rows)
  commands = {
    "step": lambda: step(trainer, parts),
    "old": lambda: old(trainer, parts),
    "peak": peak,
  }
  versions = {"trl": trl.__version__, "torch": torch.__version__}
  versions["transformers"] = transformers.__version__
  print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
  for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    answer = commands[line.strip()]()
    answer["wall_seconds"] = time.perf_counter() - wall
    answer["cpu_seconds"] = time.process_time() - cpu
    answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
