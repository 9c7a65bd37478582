"""Qwen3.5 models on pods: see `pod` for what they have in common.

  python -m launch.plan --config=config:qwen3_5_0_8b_v6e_1 --topology=v6e:1x1

The checkpoint's part for images is passed over when it is read.
"""

import fiddle as fdl

from agentrl_jax.orchestrate.experiment import Experiment
from configs.pods import models
from configs.pods.grpo import pod


def qwen3_5_0_8b_h200_1() -> fdl.Config[Experiment]:
  """`--topology=h200:1`"""
  return pod(models.qwen3_5_0_8b, "models/qwen3.5-0.8b", {"fsdp": 1}, slots=64)


def qwen3_5_0_8b_v6e_1() -> fdl.Config[Experiment]:
  """`--topology=v6e:1x1`"""
  return pod(models.qwen3_5_0_8b, "models/qwen3.5-0.8b", {"fsdp": 1}, slots=64, share_prompts=False)
