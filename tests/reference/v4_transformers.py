"""Random models of the DeepSeek V4 family, by transformers, in float32; run as a script by a Python
that has it.

Usage: python v4_transformers.py OUT [DIRECTORY]

OUT/<case>/ holds each model as transformers saves it and OUT/<case>.npz its tokens, log-probs
[B T V], the weighting of the loss, and the gradient of sum(weighting * log-prob of the token) by
the published names. Given a model directory instead, of anyone's writing, OUT/logp.npz holds the
log-probs of what transformers reads there.
"""

import pathlib
import re
import sys

import numpy as np
import torch
import transformers

WINDOW, SPARSE, HEAVY = (
  "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
SIZES = {
  "hidden_size": 24, "moe_intermediate_size": 11, "max_position_embeddings": 256,
  "num_attention_heads": 6, "head_dim": 8, "vocab_size": 53, "q_lora_rank": 14,
  "n_routed_experts": 5, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 7,
  "index_n_heads": 9, "index_head_dim": 6, "index_topk": 2, "sliding_window": 5, "hc_mult": 3,
  "hc_sinkhorn_iters": 3, "swiglu_limit": 0.6, "partial_rotary_factor": 0.5, "rope_theta": 300.0,
  "compress_rope_theta": 700.0, "rms_norm_eps": 1e-3, "hc_eps": 1e-3, "initializer_range": 0.3,
  "compress_rates": {SPARSE: 4, HEAVY: 7}, "bos_token_id": 1, "eos_token_id": [2, 3],
  "rope_parameters": {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
    "beta_slow": 0.25,
  },
}  # fmt: skip
CASES = {  # attention and experts of each layer; the length of rows
  "v4_window": ([WINDOW] * 2, ["hash_moe", "moe"], 19),
  "v4_sparse": ([SPARSE], ["moe"], 27),
  "v4_heavy": ([HEAVY], ["moe"], 27),
  "v4": ([WINDOW, SPARSE, HEAVY, SPARSE], ["hash_moe"] * 2 + ["moe"] * 2, 27),
  "v4_folded": ([WINDOW, *[SPARSE, HEAVY] * 2], ["hash_moe"] + ["moe"] * 4, 27),
}
NARROW = {"v4"}  # stored as bfloat16 in several files
PUBLISHED = (  # names of modules to names of the published checkpoints
  (r"^model\.", ""), (r"^lm_head", "head"), (r"^embed_tokens", "embed"),
  (r"^hc_head\.hc_", "hc_head_"), (r"(attn|ffn)_hc\.", r"hc_\1_"),
  (r"self_attn\.sinks", "self_attn.attn_sink"), (r"\.compressor\.indexer\.scorer", ".indexer"),
  (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"),
  (r"\.compressor\.indexer\.", ".indexer.compressor."),
  (r"compressor\.kv_norm", "compressor.norm"), ("position_bias", "ape"), ("self_attn", "attn"),
  ("mlp", "ffn"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
  ("q_a_norm", "q_norm"), (r"attn\.q_([ab])_proj", r"attn.wq_\1"),
  (r"o_([ab])_proj", r"wo_\1"), ("kv_proj", "wkv"),
  (r"compressor\.gate_proj", "compressor.wgate"), (r"experts\.gate_proj", "experts.w1"),
  (r"experts\.down_proj", "experts.w2"), (r"experts\.up_proj", "experts.w3"),
)  # fmt: skip


def randomize(model) -> None:
  """What starts at one or zero would hide a mistake."""
  with torch.no_grad():
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
      if name.endswith("tid2eid"):
        rows = torch.rand(len(value), model.config.n_routed_experts).argsort(dim=1)
        value.copy_(rows[:, : value.shape[1]])
      elif name.endswith("e_score_correction_bias"):
        value.uniform_(-0.3, 0.3)
      elif name.endswith(("sinks", "base", "position_bias")):
        value.uniform_(-0.8, 0.8)
      elif name.endswith(("norm.weight", "layernorm.weight", "scale")):
        value.uniform_(0.5, 1.5)


def narrow(model) -> None:
  """To bfloat16, but for what transformers keeps in float32."""
  strict = [*model._keep_in_fp32_modules_strict, "correction_bias"]
  wide = {
    name: value.detach().clone()
    for name, value in [*model.named_buffers(), *model.named_parameters()]
    if any(part in name.split(".") or name.endswith(part) for part in strict)
  }
  model.bfloat16()
  for name, value in wide.items():
    module, _, field = name.rpartition(".")
    owner = model.get_submodule(module)
    is_parameter = field in dict(owner.named_parameters(recurse=False))
    setattr(owner, field, torch.nn.Parameter(value) if is_parameter else value)


def published(name: str) -> str:
  for pattern, replacement in PUBLISHED:
    name = re.sub(pattern, replacement, name)
  return name


def gradients(model) -> dict[str, np.ndarray]:
  """By the published names, where each expert has tensors of its own."""
  found = {}
  for name, value in model.named_parameters():
    grad = torch.zeros_like(value) if value.grad is None else value.grad
    ours = published(name)
    if ours.endswith("experts.gate_up_proj"):
      for expert, both in enumerate(grad):
        parts = dict(zip(("w1", "w3"), both.chunk(2), strict=True))
        prefix = ours.removesuffix("gate_up_proj")
        found |= {f"{prefix}{expert}.{part}.weight": half for part, half in parts.items()}
    elif ours.endswith("experts.down_proj") or ours.endswith("experts.w2"):
      prefix = ours.rpartition(".")[0]
      found |= {f"{prefix}.{expert}.w2.weight": part for expert, part in enumerate(grad)}
    else:
      found[ours] = grad
  return {f"grad:{name}": value.numpy() for name, value in found.items()}


def read(directory: pathlib.Path):
  return transformers.DeepseekV4ForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
  ).eval()


def log_probs(model, tokens: torch.Tensor) -> torch.Tensor:
  return torch.log_softmax(model(tokens, use_cache=False).logits.float(), dim=-1)


def save_case(out: pathlib.Path, name: str, kinds: list, experts: list, length: int) -> None:
  torch.manual_seed(len(name))
  config = transformers.DeepseekV4Config(
    **SIZES, num_hidden_layers=len(kinds), layer_types=kinds, mlp_layer_types=experts
  )
  model = transformers.DeepseekV4ForCausalLM(config).float().eval()
  randomize(model)
  if name in NARROW:
    narrow(model)
  model.save_pretrained(out / name, max_shard_size="20KB" if name in NARROW else "1GB")
  model = read(out / name)  # as a cast to bfloat16 also rounds what is not stored
  tokens = torch.randint(0, SIZES["vocab_size"], (2, length))
  weighting = torch.randn(2, length - 1)
  logp = log_probs(model, tokens)
  picked = logp[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
  (weighting * picked).sum().backward()
  np.savez(
    out / f"{name}.npz",
    tokens=tokens.numpy(),
    weighting=weighting.numpy(),
    logp=logp.detach().numpy(),
    **gradients(model),
  )


def main() -> None:
  torch.set_num_threads(1)
  out = pathlib.Path(sys.argv[1])
  if len(sys.argv) > 2:
    model = read(pathlib.Path(sys.argv[2]))
    tokens = torch.arange(46).reshape(2, 23) % model.config.vocab_size
    np.savez(
      out / "logp.npz", tokens=tokens.numpy(), logp=log_probs(model, tokens).detach().numpy()
    )
    return
  for name, (kinds, experts, length) in CASES.items():
    save_case(out, name, kinds, experts, length)


if __name__ == "__main__":
  main()
