"""Random mixtures of experts, and models with layers of the delta rule, by transformers, in
float32; run as a script by a Python that has it.

Usage: python moe_transformers.py OUT

OUT/<case>/ holds each model as transformers saves it and OUT/<case>.npz its tokens, log-probs
[B T V], the weighting of the loss, the gradient of sum(weighting * log-prob of the token) by the
names of the file, and where the family has one transformers' own load-balance loss, with its
gradient as `balance_grad:NAME`.
"""

import pathlib
import re
import sys

import numpy as np
import torch
import transformers

SIZES = {
  "hidden_size": 24,
  "intermediate_size": 37,
  "max_position_embeddings": 64,
  "num_attention_heads": 6,
  "num_hidden_layers": 2,
  "num_key_value_heads": 2,
  "vocab_size": 53,
  "moe_intermediate_size": 11,
  "initializer_range": 0.3,
  "bos_token_id": 1,
  "eos_token_id": [2, 3],
}
QWEN3 = SIZES | {"head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
GLM4 = SIZES | {
  "head_dim": 8,
  "num_hidden_layers": 3,
  "rope_parameters": {
    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
  },
}  # fmt: skip
DEEPSEEK = SIZES | {
  "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
  "qk_rope_head_dim": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
QWEN3_5 = SIZES | {
  "initializer_range": 0.1,
  "num_attention_heads": 4, "head_dim": 8, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6,
  "linear_value_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
  "rope_parameters": {
    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
  },
}  # fmt: skip
QWEN3_5_DENSE = {name: value for name, value in QWEN3_5.items() if "moe" not in name}
DELTA, FULL = "linear_attention", "full_attention"
IMAGES = {
  "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24,
  "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
YARN = {
  "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
  "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
CASES = {
  "qwen3_moe": ("Qwen3Moe", QWEN3 | {
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
  }),
  "qwen3_moe_unnormalized": ("Qwen3Moe", QWEN3 | {
    "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False,
    "tie_word_embeddings": True, "num_hidden_layers": 3, "num_key_value_heads": 1,
  }),
  "glm4_moe": ("Glm4Moe", GLM4 | {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.7,
  }),
  "glm4_moe_groups": ("Glm4Moe", GLM4 | {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
    "n_group": 3, "topk_group": 2, "first_k_dense_replace": 2, "num_hidden_layers": 4,
    "n_shared_experts": 2, "use_qk_norm": True, "routed_scaling_factor": 1.3,
    "rope_parameters": GLM4["rope_parameters"] | {"partial_rotary_factor": 0.25},
  }),
  "deepseek_v3": ("DeepseekV3", DEEPSEEK | {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2,
    "q_lora_rank": 14, "v_head_dim": 5, "rope_parameters": YARN, "rms_norm_eps": 1e-3,
  }),
  "deepseek_v3_direct": ("DeepseekV3", DEEPSEEK | {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": None, "v_head_dim": 12, "norm_topk_prob": False, "num_hidden_layers": 3,
    "n_shared_experts": 0,
  }),
  "qwen3_5": ("Qwen3_5", QWEN3_5_DENSE | {
    "layer_types": [DELTA, FULL] * 2, "num_hidden_layers": 4, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
  }),
  "qwen3_5_moe": ("Qwen3_5Moe", QWEN3_5 | {
    "layer_types": [DELTA, FULL], "num_experts": 6, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 13,
  }),
  "qwen3_5_images": ("Qwen3_5", QWEN3_5_DENSE | {
    "layer_types": [DELTA, DELTA, FULL], "num_hidden_layers": 3,
  }),
}  # fmt: skip
NARROW = {
  "qwen3_moe_unnormalized",
  "glm4_moe",
  "deepseek_v3_direct",
  "qwen3_5_moe",
}  # stored as bfloat16 in several files
LENGTHS = {"qwen3_5": 150}  # more than two chunks of the delta rule


def randomize(model) -> None:
  """What starts at one or zero would hide a mistake."""
  with torch.no_grad():
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
      if name.endswith("e_score_correction_bias"):
        value.uniform_(-0.3, 0.3)
      elif name.endswith("A_log"):  # as sums over fast decays lose digits in transformers
        value.uniform_(-4.0, 0.0)
      elif name.endswith("bias"):
        value.uniform_(-0.5, 0.5)
      elif name.endswith(("norm.weight", "layernorm.weight")):
        value.uniform_(0.5, 1.5)


def narrow(model) -> None:
  """To bfloat16, but for the correction biases, which transformers keeps in float32, and the rates
  of decay, which are published in it.
  """
  named = [*model.named_buffers(), *model.named_parameters()]
  kept = {n: v.detach().clone() for n, v in named if n.endswith(("correction_bias", "A_log"))}
  model.bfloat16()
  for name, value in kept.items():
    module, _, field = name.rpartition(".")
    owner = model.get_submodule(module)
    is_parameter = field in dict(owner.named_parameters(recurse=False))
    setattr(owner, field, torch.nn.Parameter(value) if is_parameter else value)


def gradients(model) -> dict[str, np.ndarray]:
  """By the names of the file, where each expert has tensors of its own; of what has numbers."""
  found = {}
  for name, value in model.named_parameters():
    if not value.numel():
      continue
    grad = torch.zeros_like(value) if value.grad is None else value.grad
    if match := re.fullmatch(r"(.*mlp\.experts)\.gate_up_proj", name):
      for expert, both in enumerate(grad):
        gate, up = both.chunk(2)
        found |= {f"{match[1]}.{expert}.gate_proj.weight": gate}
        found |= {f"{match[1]}.{expert}.up_proj.weight": up}
    elif match := re.fullmatch(r"(.*mlp\.experts)\.down_proj", name):
      found |= {f"{match[1]}.{e}.down_proj.weight": part for e, part in enumerate(grad)}
    else:
      found[name] = grad
  return {f"grad:{name}": value.numpy() for name, value in found.items()}


def save_case(out: pathlib.Path, name: str, family: str, fields: dict) -> None:
  torch.manual_seed(len(name))
  images = name.endswith("images")
  kind = getattr(transformers, f"{family}For{'ConditionalGeneration' if images else 'CausalLM'}")
  text = "Text" if "_5" in family and not images else ""
  given = {"text_config": fields, "vision_config": IMAGES} if images else fields
  model = kind(getattr(transformers, f"{family}{text}Config")(**given)).float().eval()
  randomize(model)
  if name in NARROW:
    narrow(model)
  model.save_pretrained(out / name, max_shard_size="20KB" if name in NARROW else "1GB")
  # Read back, as a cast to bfloat16 also rounds what is not stored.
  model = kind.from_pretrained(
    out / name,
    dtype=torch.float32,
    attn_implementation="eager",
    experts_implementation="eager",
  ).eval()
  length = LENGTHS.get(name, 19)
  tokens = torch.randint(0, fields["vocab_size"], (2, length))
  weighting = torch.randn(2, length - 1)
  balanced = {"output_router_logits": True} if family == "Qwen3Moe" else {}
  output = model(tokens, **balanced)
  logp = torch.log_softmax(output.logits.float(), dim=-1)
  picked = logp[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
  if balanced:
    output.aux_loss.backward(retain_graph=True)
    balanced = {"load_balance": output.aux_loss.detach().numpy()}
    balanced |= {
      f"balance_{name}": value.copy()
      for name, value in gradients(model).items()
      if "mlp.gate" in name or "embed" in name
    }
    model.zero_grad()
  (weighting * picked).sum().backward()
  np.savez(
    out / f"{name}.npz",
    tokens=tokens.numpy(),
    weighting=weighting.numpy(),
    logp=logp.detach().numpy(),
    **balanced,
    **gradients(model),
  )


def main() -> None:
  torch.set_num_threads(1)
  for name, (family, fields) in CASES.items():
    save_case(pathlib.Path(sys.argv[1]), name, family, fields)


if __name__ == "__main__":
  main()
