"""SmolLM2-135M learns to use a calculator and to finish, on two CPU cores in minutes.

python -m launch.train --config=config:quickstart --workdir=runs/quickstart
"""

import fiddle as fdl

from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.orchestrate import engines, tasksets
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.rollout.episode import Limits


def quickstart() -> fdl.Config[Experiment]:
  return fdl.Config(
    Experiment,
    model="models/smollm2-135m-instruct",
    tasks=fdl.Config(tasksets.calculator, two_step=0.0),
    algorithm=fdl.Config(recipes.grpo),
    optimizer=fdl.Config(optim.adamw, learning_rate=3e-5, warmup_steps=2),
    engine=fdl.Config(engines.embedded),
    steps=7,
    checkpoint_every=2,
    limits=fdl.Config(Limits, turn_tokens=24, context_tokens=256),
    batch=fdl.Config(Batch, groups=4, members=8, row_length=640, micro_rows=1, only_mixed=True),
    evaluation=fdl.Config(Evaluation, tasks=48, samples=4),
  )
