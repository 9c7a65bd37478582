"""A model of 0.8M parameters: taught the task's form by a script, then improved by its own rewards.

python -m launch.sft --config=config:tiny_sft --workdir=runs/tiny_sft
python -m launch.train --config=config:tiny_rl --workdir=runs/tiny_rl
"""

import fiddle as fdl

from agentrl_jax.envs import calculator
from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.orchestrate import engines, supervised, tasksets, tiny
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment, Taskset
from agentrl_jax.orchestrate.supervised import Supervised
from agentrl_jax.rollout.episode import Limits


def _limits() -> fdl.Config[Limits]:
  return fdl.Config(Limits, turn_tokens=24, context_tokens=128)


def _tasks() -> fdl.Config[Taskset]:
  """No worked examples, as what they show is in the weights, and no template that it never saw."""
  return fdl.Config(tasksets.calculator, examples=0, two_step=0.0, new_templates=False)


def tiny_sft() -> fdl.Config[Supervised]:
  """Few demonstrations on purpose: the form is learned, whom to copy is only begun."""
  return fdl.Config(
    Supervised,
    model="runs/tiny_base",
    make_model=fdl.Config(tiny.tiny_llama),
    episodes=fdl.Config(
      supervised.demonstrated,
      tasks=_tasks(),
      policy=calculator.oracle,
      count=512,
      limits=_limits(),
    ),
    algorithm=fdl.Config(recipes.sft),
    optimizer=fdl.Config(optim.adamw, learning_rate=3e-3, warmup_steps=20),
    steps=80,
    episodes_per_step=32,
    row_length=256,
    micro_rows=8,
  )


def tiny_rl() -> fdl.Config[Experiment]:
  return fdl.Config(
    Experiment,
    model="runs/tiny_sft/model",
    tasks=_tasks(),
    algorithm=fdl.Config(recipes.grpo),
    optimizer=fdl.Config(optim.adamw, learning_rate=3e-4, warmup_steps=5),
    engine=fdl.Config(engines.embedded, slots=128),
    steps=40,
    limits=_limits(),
    batch=fdl.Config(Batch, groups=16, members=8, row_length=256, micro_rows=8, only_mixed=True),
    evaluation=fdl.Config(Evaluation, tasks=128, samples=4),
    concurrency=128,
    checkpoint_every=20,
  )
