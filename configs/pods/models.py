"""What published checkpoints hold, so that a run can be planned before its weights are here.

Sizes are those of each model's config.json on huggingface.co.
"""

from agentrl_jax.models import qwen3
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
