"""What all pods have in common: bfloat16 over float32 weights and Adam, rows of 4096, the sampler
on the devices that train.
"""

from collections.abc import Callable, Mapping

import fiddle as fdl

from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.models import remat
from agentrl_jax.models.model import Model
from agentrl_jax.orchestrate import engines, tasksets
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.rollout.episode import Limits


def pod(
  architecture: Callable[[], Model],
  directory: str,
  mesh: Mapping[str, int],
  *,
  slots: int,
  keep: remat.Remat = remat.save_nothing,
  share_prompts: bool = True,
) -> fdl.Config[Experiment]:
  """GRPO on GSM8K, 32 groups of 8 episodes a step.

  Args:
    architecture: what `directory` must hold.
    directory: of the model.
    mesh: sizes of the mesh axes.
    slots: rows of the sampler.
    keep: what of each layer the backward pass finds, see `models.remat`.
    share_prompts: whether a row may hold the prompt of its episodes once, see `Batch`; TPU's kernel
      for attention needs them apart.
  """
  return fdl.Config(
    Experiment,
    model=directory,
    architecture=fdl.Config(architecture),
    tasks=fdl.Config(tasksets.gsm8k, path="data/gsm8k"),
    algorithm=fdl.Config(recipes.grpo),
    optimizer=fdl.Config(optim.adamw, learning_rate=1e-6, warmup_steps=10),
    engine=fdl.Config(engines.embedded, slots=slots, dtype="bfloat16"),
    steps=200,
    limits=fdl.Config(Limits, turn_tokens=1024, context_tokens=4095),
    batch=fdl.Config(
      Batch, groups=32, members=8, row_length=4096, micro_rows=1, share_prompts=share_prompts
    ),
    evaluation=fdl.Config(Evaluation, tasks=256, samples=4, every=20),
    mesh=dict(mesh),
    dtype="bfloat16",
    remat=keep,
    max_mismatch=0.5,
    concurrency=slots,
  )
