"""GLM-4.5-Air on pods: see `pod` for what they have in common.

  python -m launch.plan --config=config:glm_4_5_air_h200_32 --topology=h200:32

Its smallest slices: 32 H200s, or 32 TPU v5p. Weights, gradients and moments in float32, and those
that are computed with and sampled from in bfloat16, are 20 bytes a parameter, 2.1 TB.
"""

import fiddle as fdl

from agentrl_jax.orchestrate.experiment import Experiment
from configs.pods import models
from configs.pods.grpo import pod


def glm_4_5_air_h200_32() -> fdl.Config[Experiment]:
  """`--topology=h200:32`"""
  mesh = {"fsdp": 8, "expert": 4}
  return pod(models.glm_4_5_air, "models/glm-4.5-air", mesh, slots=128)


def glm_4_5_air_v5p_32() -> fdl.Config[Experiment]:
  """`--topology=v5:2x4x4`"""
  mesh = {"fsdp": 8, "expert": 4}
  return pod(models.glm_4_5_air, "models/glm-4.5-air", mesh, slots=128)
