"""What published checkpoints hold, so that a run can be planned before its weights are here.

Sizes are those of each model's config.json on huggingface.co.
"""

from agentrl_jax.models import deepseek_v4, glm4_moe, qwen3, qwen3_5, qwen3_moe
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


def qwen3_8b() -> Model:
  """https://huggingface.co/Qwen/Qwen3-8B"""
  return qwen3.from_hf(
    _QWEN3
    | {
      "hidden_size": 4096,
      "intermediate_size": 12288,
      "num_hidden_layers": 36,
      "num_attention_heads": 32,
      "tie_word_embeddings": False,
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


def deepseek_v4_flash() -> Model:
  """https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash, dequantised"""
  return deepseek_v4.from_hf(
    {
      "vocab_size": 129280,
      "hidden_size": 4096,
      "moe_intermediate_size": 2048,
      "num_hidden_layers": 43,
      "num_attention_heads": 64,
      "head_dim": 512,
      "qk_rope_head_dim": 64,
      "q_lora_rank": 1024,
      "o_groups": 8,
      "o_lora_rank": 1024,
      "sliding_window": 128,
      "compress_ratios": [0, 0, 4, *[128, 4] * 20, 0],
      "compress_rope_theta": 160000,
      "index_n_heads": 64,
      "index_head_dim": 128,
      "index_topk": 512,
      "hc_mult": 4,
      "hc_sinkhorn_iters": 20,
      "hc_eps": 1e-6,
      "num_hash_layers": 3,
      "n_routed_experts": 256,
      "num_experts_per_tok": 6,
      "num_nextn_predict_layers": 1,
      "routed_scaling_factor": 1.5,
      "swiglu_limit": 10.0,
      "max_position_embeddings": 1048576,
      "rope_theta": 10000,
      "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
      },
      "rms_norm_eps": 1e-6,
      "bos_token_id": 0,
      "eos_token_id": 1,
    }
  )
