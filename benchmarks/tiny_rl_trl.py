"""TRL's side of tiny_rl.py; runs where install_trl.sh installed it.

    python tiny_rl_trl.py MODEL PROMPT_TOKENS COMPLETION_TOKENS

Its real GRPOTrainer trains: 128 completions in groups of 8 by its own generate (transformers), a
reward function, advantages, four updates of 32 completions. Each is one turn of a given length and
there is no critic and no environment, so it has less to do than the other side. For each line read
from stdin it makes one such step and answers with a line of JSON.
"""

import json
import os
import resource
import sys
import tempfile
import time

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

import torch
import transformers
import trl
from datasets import Dataset

COMPLETIONS, GROUP, UPDATES = 128, 8, 4


class OneStepALine(transformers.TrainerCallback):
  """Waits for a line before each round of generation and its updates, and answers after it."""

  def __init__(self) -> None:
    self.started = (0.0, 0.0)

  def on_step_begin(self, args, state, control, **kwargs):
    if state.global_step % UPDATES == 0:
      if not sys.stdin.readline():
        control.should_training_stop = True
      self.started = time.perf_counter(), time.process_time()

  def on_step_end(self, args, state, control, **kwargs):
    if state.global_step % UPDATES == 0:
      answer = {
        "wall_seconds": time.perf_counter() - self.started[0],
        "cpu_seconds": time.process_time() - self.started[1],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
      }
      print(json.dumps(answer), flush=True)


def main() -> None:
  directory, prompt, completion = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
  tokenizer.pad_token = tokenizer.eos_token
  words = [word for word in tokenizer.get_vocab() if word != tokenizer.eos_token]
  prompts = [" ".join(words[(i + j) % len(words)] for j in range(prompt)) for i in range(1024)]
  arguments = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, fp16=False,
    gradient_checkpointing=False, per_device_train_batch_size=COMPLETIONS // UPDATES,
    steps_per_generation=UPDATES, num_generations=GROUP, beta=0.0, loss_type="dapo",
    temperature=1.0, learning_rate=3e-4, max_completion_length=completion, save_strategy="no",
    generation_kwargs={"min_new_tokens": completion}, max_steps=10_000, disable_tqdm=True,
    logging_strategy="no",
  )  # fmt: skip
  trainer = trl.GRPOTrainer(
    model=model, args=arguments, processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
    callbacks=[OneStepALine()],
  )  # fmt: skip
  versions = {"trl": trl.__version__, "torch": torch.__version__}
  versions["transformers"] = transformers.__version__
  print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
  trainer.train()


if __name__ == "__main__":
  main()
