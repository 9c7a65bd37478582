"""What published checkpoints hold, so that a run can be planned before its weights are here.

Sizes are those of each model's config.json on huggingface.co.
"""

from agentrl_jax.models import glm4_moe, qwen3, qwen3_5, qwen3_moe
from agentrl_jax.models.model import Model

_QWEN3 = {
  "vocab_size": 151936,
  "max_position_embeddings": 40960,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "rope_theta": 1e6,
  "rms_norm_eps": 1e-6,
}


def qwen3_4b() -> Model:
  """https://huggingface.co/Qwen/Qwen3-4B"""
  return qwen3.from_hf(
    _QWEN3
    | {
      "hidden_size": 2560,
      "intermediate_size": 9728,
      "num_hidden_layers": 36,
      "num_attention_heads": 32,
      "tie_word_embeddings": True,
    }
  )


def qwen3_14b() -> Model:
  """https://huggingface.co/Qwen/Qwen3-14B"""
  return qwen3.from_hf(
    _QWEN3
    | {
      "hidden_size": 5120,
      "intermediate_size": 17408,
      "num_hidden_layers": 40,
      "num_attention_heads": 40,
      "tie_word_embeddings": False,
    }
  )


def qwen3_30b_a3b() -> Model:
  """https://huggingface.co/Qwen/Qwen3-30B-A3B"""
  return qwen3_moe.from_hf(
    _QWEN3
    | {
      "hidden_size": 2048,
      "intermediate_size": 6144,
      "num_hidden_layers": 48,
      "num_attention_heads": 32,
      "num_key_value_heads": 4,
      "tie_word_embeddings": False,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "norm_topk_prob": True,
      "moe_intermediate_size": 768,
      "router_aux_loss_coef": 0.001,
    }
  )


def qwen3_5_0_8b() -> Model:
  """The text model of https://huggingface.co/Qwen/Qwen3.5-0.8B"""
  return qwen3_5.from_hf(
    {
      "vocab_size": 248320,
      "hidden_size": 1024,
      "intermediate_size": 3584,
      "num_hidden_layers": 24,
      "num_attention_heads": 8,
      "num_key_value_heads": 2,
      "head_dim": 256,
      "full_attention_interval": 4,
      "linear_conv_kernel_dim": 4,
      "linear_key_head_dim": 128,
      "linear_num_key_heads": 16,
      "linear_num_value_heads": 16,
      "linear_value_head_dim": 128,
      "max_position_embeddings": 262144,
      "partial_rotary_factor": 0.25,
      "rope_theta": 1e7,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": True,
    }
  )


def glm_4_5_air() -> Model:
  """https://huggingface.co/zai-org/GLM-4.5-Air"""
  return glm4_moe.from_hf(
    {
      "vocab_size": 151552,
      "hidden_size": 4096,
      "intermediate_size": 10944,
      "num_hidden_layers": 46,
      "num_attention_heads": 96,
      "num_key_value_heads": 8,
      "head_dim": 128,
      "max_position_embeddings": 131072,
      "rope_theta": 1e6,
      "rms_norm_eps": 1e-5,
      "tie_word_embeddings": False,
      "attention_bias": True,
      "use_qk_norm": False,
      "partial_rotary_factor": 0.5,
      "first_k_dense_replace": 1,
      "moe_intermediate_size": 1408,
      "n_group": 1,
      "n_routed_experts": 128,
      "n_shared_experts": 1,
      "norm_topk_prob": True,
      "num_experts_per_tok": 8,
      "num_nextn_predict_layers": 1,
      "routed_scaling_factor": 1.0,
      "topk_group": 1,
    }
  )
