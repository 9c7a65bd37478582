"""Runs small enough to plan in a test, for `--config=config:tests.launch.planned.NAME`."""

import fiddle as fdl

from agentrl_jax.models import llama, qwen3_moe, remat
from agentrl_jax.models.model import Model
from configs import tiny_rl


def architecture() -> Model:
  return llama.bind(
    llama.Config(
      vocab_size=256, embed=64, ffw=128, layers=2, heads=4, kv_heads=2, head_dim=16,
      max_position=256, tied=True,
    )
  )  # fmt: skip


def small():
  """16 episodes of 127 tokens on fsdp 4 x tensor 2; no directory is needed."""
  config = tiny_rl()
  config.model, config.architecture = "models/absent", fdl.Config(architecture)
  config.mesh = {"fsdp": 4, "tensor": 2}
  config.batch.groups, config.batch.members, config.batch.micro_rows = 4, 4, 1
  config.batch.row_length = 128
  config.limits.context_tokens = 127
  config.engine.slots = 8
  config.remat = remat.save_nothing
  return config


def mixture() -> Model:
  return qwen3_moe.bind(
    qwen3_moe.config(
      vocab_size=256, embed=64, ffw=128, layers=2, heads=4, kv_heads=2, head_dim=16,
      max_position=256, experts=8, experts_per_token=2, expert_ffw=48, normalized=True,
      load_balance=0.001,
    )
  )  # fmt: skip


def small_mixture():
  """The same on fsdp 2 x expert 4, with a mixture of experts and the loss of its routers."""
  config = small()
  config.architecture = fdl.Config(mixture)
  config.mesh = {"fsdp": 2, "expert": 4}
  return config


def splash_sized() -> Model:
  return llama.bind(
    llama.Config(
      vocab_size=256, embed=256, ffw=512, layers=2, heads=4, kv_heads=2, head_dim=64,
      max_position=1024, tied=True,
    )
  )  # fmt: skip


def small_splash():
  """Rows and heads as TPU's kernel for attention takes them; what it mixed is kept."""
  config = small()
  config.architecture = fdl.Config(splash_sized)
  config.batch.row_length, config.limits.context_tokens = 1024, 1023
  config.batch.share_prompts = False
  config.dtype, config.remat = "bfloat16", remat.save_attention
  return config
