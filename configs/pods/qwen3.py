"""Qwen3 models on pods: see `pod` for what they have in common.

  python -m launch.plan --config=config:qwen3_4b_v5e_16 --topology=v5e:4x4
  python -m launch.train --config=config:qwen3_4b_v5e_16 --workdir=runs/qwen3_4b

Download the model to `models/` first, and give `tasks` the problems that it shall learn.
"""

import fiddle as fdl

from agentrl_jax.models import remat
from agentrl_jax.orchestrate.experiment import Experiment
from configs.pods import models
from configs.pods.grpo import pod


def qwen3_4b_v5e_16() -> fdl.Config[Experiment]:
  """`--topology=v5e:4x4`"""
  mesh = {"fsdp": 8, "tensor": 2}
  return pod(
    models.qwen3_4b,
    "models/qwen3-4b",
    mesh,
    slots=64,
    keep=remat.save_attention,
    share_prompts=False,
  )


def qwen3_4b_tpu7x_4() -> fdl.Config[Experiment]:
  """`--topology=tpu7x:2x2x1`, two devices a chip"""
  mesh = {"fsdp": 8}
  return pod(
    models.qwen3_4b,
    "models/qwen3-4b",
    mesh,
    slots=256,
    keep=remat.save_attention,
    share_prompts=False,
  )


def qwen3_4b_h200_8() -> fdl.Config[Experiment]:
  """`--topology=h200:8`"""
  mesh = {"fsdp": 8}
  return pod(models.qwen3_4b, "models/qwen3-4b", mesh, slots=256, keep=remat.save_attention)


def qwen3_14b_v5p_8() -> fdl.Config[Experiment]:
  """`--topology=v5:2x2x2`"""
  mesh = {"fsdp": 8}
  return pod(
    models.qwen3_14b,
    "models/qwen3-14b",
    mesh,
    slots=128,
    keep=remat.save_attention,
    share_prompts=False,
  )


def qwen3_14b_v6e_16() -> fdl.Config[Experiment]:
  """`--topology=v6e:4x4`"""
  mesh = {"fsdp": 4, "tensor": 4}
  return pod(models.qwen3_14b, "models/qwen3-14b", mesh, slots=64, share_prompts=False)


def qwen3_14b_h200_8() -> fdl.Config[Experiment]:
  """`--topology=h200:8`"""
  mesh = {"fsdp": 8}
  return pod(models.qwen3_14b, "models/qwen3-14b", mesh, slots=128, keep=remat.save_attention)


def qwen3_30b_a3b_v6e_64() -> fdl.Config[Experiment]:
  """`--topology=v6e:8x8`"""
  mesh = {"fsdp": 8, "expert": 8}
  return pod(models.qwen3_30b_a3b, "models/qwen3-30b-a3b", mesh, slots=128, share_prompts=False)


def qwen3_30b_a3b_h200_64() -> fdl.Config[Experiment]:
  """`--topology=h200:64`"""
  mesh = {"fsdp": 8, "expert": 8}
  return pod(models.qwen3_30b_a3b, "models/qwen3-30b-a3b", mesh, slots=256)
