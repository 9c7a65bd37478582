"""GSM8K with the calculator, for models that can begin it (0.5B parameters and more).

  python -m launch.train --config=config:gsm8k --config=set:model='"models/qwen"' \\
    --config=set:tasks.path='"data/gsm8k"' --workdir=runs/gsm8k
"""

import fiddle as fdl

from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.orchestrate import engines, tasksets
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.rollout.episode import Limits


def gsm8k() -> fdl.Config[Experiment]:
  return fdl.Config(
    Experiment,
    model="models/policy",
    tasks=fdl.Config(tasksets.gsm8k, path="data/gsm8k"),
    algorithm=fdl.Config(recipes.grpo),
    optimizer=fdl.Config(optim.adamw, learning_rate=1e-6, warmup_steps=10),
    engine=fdl.Config(engines.sglang, dtype="bfloat16"),
    steps=200,
    limits=fdl.Config(Limits, turn_tokens=256, context_tokens=2048),
    batch=fdl.Config(Batch, groups=32, members=8, row_length=2304, micro_rows=2),
    evaluation=fdl.Config(Evaluation, tasks=256, samples=4, every=20),
    dtype="bfloat16",
    max_mismatch=0.5,
  )
