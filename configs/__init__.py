"""Configurations: functions that return `fdl.Config[Experiment]`, and fiddlers that change one."""

from configs.algorithms import use_algorithm, use_routers
from configs.attention import use_cudnn
from configs.engines import use_embedded, use_fp8, use_server, use_sglang, use_transport
from configs.gsm8k import gsm8k
from configs.pods.deepseek import deepseek_v4_flash_h200_128
from configs.pods.glm4 import glm_4_5_air_h200_32
from configs.pods.qwen3 import (
  qwen3_4b_h200_8,
  qwen3_4b_tpu7x_4,
  qwen3_4b_v5e_16,
  qwen3_14b_h200_8,
  qwen3_14b_v5p_8,
  qwen3_14b_v6e_16,
  qwen3_30b_a3b_h200_64,
  qwen3_30b_a3b_v6e_64,
)
from configs.pods.qwen3_5 import qwen3_5_0_8b_h200_1, qwen3_5_0_8b_v6e_1
from configs.precision import use_adapter_pushes, use_fp8_products, use_fp8_sampler, use_lora
from configs.quickstart import quickstart
from configs.tiny import tiny_rl, tiny_sft

__all__ = [
  "deepseek_v4_flash_h200_128",
  "glm_4_5_air_h200_32",
  "gsm8k",
  "quickstart",
  "qwen3_4b_h200_8",
  "qwen3_4b_tpu7x_4",
  "qwen3_4b_v5e_16",
  "qwen3_5_0_8b_h200_1",
  "qwen3_5_0_8b_v6e_1",
  "qwen3_14b_h200_8",
  "qwen3_14b_v5p_8",
  "qwen3_14b_v6e_16",
  "qwen3_30b_a3b_h200_64",
  "qwen3_30b_a3b_v6e_64",
  "tiny_rl",
  "tiny_sft",
  "use_adapter_pushes",
  "use_algorithm",
  "use_cudnn",
  "use_embedded",
  "use_fp8",
  "use_fp8_products",
  "use_fp8_sampler",
  "use_lora",
  "use_routers",
  "use_server",
  "use_sglang",
  "use_transport",
]
