"""GLM-4.5-Air on pods: see `pod` for what they have in common.

  python -m launch.plan --config=config:glm_4_5_air_h200_32 --topology=h200:32

Weights, gradients and moments in float32, and weights in bfloat16 to compute with and to sample
from, are 20 bytes a parameter, 2.1 TB: too much for 16 H200s once there are activations.
"""

import fiddle as fdl

from agentrl_jax.orchestrate.experiment import Experiment
from configs.pods import models
from configs.pods.grpo import pod


def glm_4_5_air_h200_32() -> fdl.Config[Experiment]:
  """`--topology=h200:32`"""
  mesh = {"fsdp": 8, "expert": 4}
  return pod(models.glm_4_5_air, "models/glm-4.5-air", mesh, slots=128)
