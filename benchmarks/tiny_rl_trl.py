"""TRL's side of tiny_rl.py; runs where install_trl.sh installed it, the repository on its path.

    python tiny_rl_trl.py MODEL words PROMPT_TOKENS COMPLETION_TOKENS
    python tiny_rl_trl.py MODEL turn_chain TURN_TOKENS CONTEXT_TOKENS

Its real GRPOTrainer trains: 128 completions in groups of 8, advantages, four updates of 32
completions, no critic. With `words` a completion is one turn of a given length by its own generate
(transformers). With `turn_chain` it is an episode of that environment: a `rollout_func` calls the
trainer's generate for all episodes that go on, turn by turn on the whole streams as the trainer's
own loop of tool calls does, and what the environment says is masked. For each line read from stdin
it makes one such step and answers with a line of JSON.
"""

import asyncio
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
TASKS = 1024


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


def words_reward(completions, **_):
  return [float(len(set(c.split()))) for c in completions]


def played(tokenizer, context: int):
  """A `rollout_func` that plays turn_chain; a prompt is the number of its task."""
  from agentrl_jax.envs import turn_chain
  from agentrl_jax.rollout.environment import Malformed

  tasks = turn_chain.make_tasks("train", TASKS)
  ids_of, word_of = tokenizer.get_vocab(), {i: w for w, i in tokenizer.get_vocab().items()}

  def encoded(messages) -> list[int]:
    return [ids_of[word] for message in messages for word in message.content.split()]

  async def play(prompts, trainer):
    openings = [await turn_chain.build(tasks[int(prompt)]) for prompt in prompts]
    prompt_ids = [encoded(opening.messages) for opening in openings]
    streams, masks = [list(ids) for ids in prompt_ids], [[0] * len(ids) for ids in prompt_ids]
    correct, turns, live = [0.0] * len(prompts), 0, list(range(len(prompts)))
    while live:
      turns += 1
      sampled, _ = trainer._generate_single_turn([streams[i] for i in live], None, {}, 1)
      goes_on = []
      for i, ids in zip(live, sampled, strict=True):
        ids = ids[: context - len(streams[i])]
        stopped = ids[-1] == tokenizer.eos_token_id
        words = [word_of.get(token, "?") for token in (ids[:-1] if stopped else ids)]
        action = turn_chain.read_words(words) if stopped else Malformed(" ".join(words), "no end")
        streams[i] += ids
        masks[i] += [1] * len(ids)
        if len(streams[i]) >= context:
          continue
        step = await openings[i].env.step(action)
        correct[i] = step.reward.get("correct", correct[i])
        added = [] if stopped else [tokenizer.eos_token_id]
        added += encoded(step.observation)
        ends = step.terminated or turns >= openings[i].turn_limit
        if not ends and len(streams[i]) + len(added) < context:
          streams[i] += added
          masks[i] += [0] * len(added)
          goes_on.append(i)
      live = goes_on
    rest = [len(ids) for ids in prompt_ids]
    return {
      "prompt_ids": prompt_ids,
      "completion_ids": [stream[n:] for stream, n in zip(streams, rest, strict=True)],
      "env_mask": [mask[n:] for mask, n in zip(masks, rest, strict=True)],
      "logprobs": None,
      "correct": correct,
    }

  return lambda prompts, trainer: asyncio.run(play(prompts, trainer))


def main() -> None:
  directory, what, first, second = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
  tokenizer.pad_token = tokenizer.eos_token
  if what == "words":
    words = [word for word in tokenizer.get_vocab() if word != tokenizer.eos_token]
    prompts = [" ".join(words[(i + j) % len(words)] for j in range(first)) for i in range(TASKS)]
    longest, least, reward, rollout = second, second, words_reward, None
  else:
    prompts = [str(i) for i in range(TASKS)]
    longest, least, rollout = first, None, played(tokenizer, second)
    reward = lambda completions, correct, **_: correct  # noqa: E731
  arguments = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, fp16=False,
    gradient_checkpointing=False, per_device_train_batch_size=COMPLETIONS // UPDATES,
    steps_per_generation=UPDATES, num_generations=GROUP, beta=0.0, loss_type="dapo",
    temperature=1.0, learning_rate=3e-4, max_completion_length=longest, save_strategy="no",
    generation_kwargs={"min_new_tokens": least}, max_steps=10_000, disable_tqdm=True,
    logging_strategy="no",
  )  # fmt: skip
  trainer = trl.GRPOTrainer(
    model=model, args=arguments, processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"prompt": prompts}), reward_funcs=reward,
    callbacks=[OneStepALine()], rollout_func=rollout,
  )  # fmt: skip
  versions = {"trl": trl.__version__, "torch": torch.__version__}
  versions["transformers"] = transformers.__version__
  print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
  trainer.train()


if __name__ == "__main__":
  main()
