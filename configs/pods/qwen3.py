"""Qwen3 dense models on pods: bfloat16 over float32 weights and Adam, rows of 4096.

  python -m launch.plan --config=config:qwen3_4b_v5e_16 --topology=v5e:4x4
  python -m launch.train --config=config:qwen3_4b_v5e_16 --workdir=runs/qwen3_4b

Download the model to `models/` first, and give `tasks` the problems that it shall learn.
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
from configs.pods import models


def _pod(
  architecture: Callable[[], Model], directory: str, mesh: Mapping[str, int], *, slots: int
) -> fdl.Config[Experiment]:
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
    batch=fdl.Config(Batch, groups=32, members=8, row_length=4096, micro_rows=1),
    evaluation=fdl.Config(Evaluation, tasks=256, samples=4, every=20),
    mesh=dict(mesh),
    dtype="bfloat16",
    remat=remat.save_nothing,
    max_mismatch=0.5,
    concurrency=slots,
  )


def qwen3_4b_v5e_16() -> fdl.Config[Experiment]:
  """`--topology=v5e:4x4`"""
  return _pod(models.qwen3_4b, "models/qwen3-4b", {"fsdp": 8, "tensor": 2}, slots=64)


def qwen3_4b_h200_8() -> fdl.Config[Experiment]:
  """`--topology=h200:8`"""
  return _pod(models.qwen3_4b, "models/qwen3-4b", {"fsdp": 8}, slots=256)
