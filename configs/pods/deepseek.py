"""DeepSeek-V4-Flash on pods: see `pod` for what they have in common.

  python -m launch.plan --config=config:deepseek_v4_flash_h200_128 --topology=h200:128

Weights, gradients and moments in float32, and weights in bfloat16 to compute with and to sample
from, are 20 bytes a parameter, 5.7 TB: 41 GiB on each of 128 H200s.
"""

import fiddle as fdl

from agentrl_jax.orchestrate.experiment import Experiment
from configs.pods import models
from configs.pods.grpo import pod


def deepseek_v4_flash_h200_128() -> fdl.Config[Experiment]:
  """`--topology=h200:128`"""
  mesh = {"fsdp": 16, "expert": 8}
  directory = "models/deepseek-v4-flash"
  return pod(models.deepseek_v4_flash, directory, mesh, slots=128, share_prompts=False)
