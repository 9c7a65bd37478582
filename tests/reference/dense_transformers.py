"""Random models of the dense families by transformers, in float32; run as a script by a Python that
has it.

Usage: python dense_transformers.py OUT cases | GGUF_FILE

`cases`: OUT/<case>/ holds each model as transformers saves it and OUT/<case>.npz its tokens,
log-probs [B T V], the weighting of the loss, and the gradient of sum(weighting * log-prob of the
token) by name. A GGUF file: OUT/gguf.npz and OUT/gguf.json hold log-probs, token ids and texts as
transformers' own GGUF loader has them.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

SIZES = {
  "hidden_size": 24,
  "intermediate_size": 37,
  "max_position_embeddings": 64,
  "num_attention_heads": 6,
  "num_hidden_layers": 2,
  "num_key_value_heads": 2,
  "head_dim": 6,
  "vocab_size": 53,
  "rms_norm_eps": 1e-5,
  "initializer_range": 0.2,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 1000.0,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}
GEMMA3_ROPES = {
  "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
  "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
CASES = {  # name: (prefix of transformers' class names, changes to SIZES)
  "tied": ("Llama", {"tie_word_embeddings": True}),
  "untied_linear": (
    "Llama",
    {
      "tie_word_embeddings": False,
      "num_hidden_layers": 3,
      "num_key_value_heads": 6,
      "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    },
  ),
  "multi_query_llama3": (
    "Llama",
    {"tie_word_embeddings": False, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
  ),
  "qwen2_yarn": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": YARN}),
  "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 8}),
  "qwen3_yarn": (
    "Qwen3",
    {
      "tie_word_embeddings": True,
      "head_dim": 10,
      "rope_parameters": YARN
      | {"attention_factor": 1.3, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
    },
  ),
  "gemma3": (
    "Gemma3",
    {
      "head_dim": 8,
      "layer_types": [LOCAL, GLOBAL, LOCAL],
      "num_hidden_layers": 3,
      "query_pre_attn_scalar": 5,
      "rope_parameters": GEMMA3_ROPES,
      "sliding_window": 5,
    },
  ),
  "gemma3_long": (  # attention goes block by block, and some blocks are outside the window
    "Gemma3",
    {
      "layer_types": [LOCAL, GLOBAL],
      "max_position_embeddings": 512,
      "query_pre_attn_scalar": 6,
      "sliding_window": 100,
      "tie_word_embeddings": False,
    },
  ),
}
LENGTHS = {"gemma3_long": 300}
TEXTS = [
  "",
  "Hello world",
  " leading and trailing ",
  "Question: Ann has 12 apples and buys 7. How many?\nTool: calc(12+7)\nResult: 19\nAnswer: 19\n",
  "  12 and   3.14159,\n\n\n42\t\t7",
  "don't you'll we've I'M",
  "naïve café — “quoted” … 日本語 한국어 العربية 🙂👍🏽 e\u0301",
  "²½ ٣٤ Ⅷ",
  "def f(x):\r\n\treturn {x: [x ** 2]}  # comment\r\n",
  "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
  "<repo_name>a/b<file_sep>x <|endoftext|> <|im_end",
  "=" * 40 + "aaaaaaaaaaaaaaaa\u00a0\u200b\ufeff",
]
MESSAGES = [
  {"role": "user", "content": "What is 2 + 2?"},
  {"role": "assistant", "content": "4"},
  {"role": "user", "content": "And 3 + 3?"},
]


def log_probs(model, tokens):
  return torch.log_softmax(model(tokens).logits.float(), dim=-1)


def save_case(out: pathlib.Path, name: str, prefix: str, changes: dict) -> None:
  torch.manual_seed(len(name))
  kind = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
  config = getattr(transformers, kind)(**(SIZES | changes), attn_implementation="eager")
  model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim == 1:  # all norms or biases alike would hide one in the wrong place
        parameter += torch.rand_like(parameter) - 0.5
  stored = model if name != "untied_linear" else model.bfloat16()
  stored.save_pretrained(out / name, max_shard_size="20KB" if name == "untied_linear" else "1GB")
  # Read back, as a cast to bfloat16 also rounds the rotary frequencies, which are not stored.
  model = (
    type(model).from_pretrained(out / name, dtype=torch.float32, attn_implementation="eager").eval()
  )
  length = LENGTHS.get(name, 19)
  # From 1, as transformers keeps gradients from the embedding of padding, Gemma's token 0.
  tokens = torch.randint(1, config.vocab_size, (2, length))
  weighting = torch.randn(2, length - 1)
  logp = log_probs(model, tokens)
  picked = logp[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
  (weighting * picked).sum().backward()
  gradients = {f"grad:{key}": value.grad.numpy() for key, value in model.named_parameters()}
  np.savez(
    out / f"{name}.npz",
    tokens=tokens.numpy(),
    weighting=weighting.numpy(),
    logp=logp.detach().numpy(),
    **gradients,
  )


def save_gguf(out: pathlib.Path, path: pathlib.Path) -> None:
  source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
  tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
  config = transformers.AutoConfig.from_pretrained(**source)
  model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
  loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
  model.load_state_dict(loaded, strict=False)
  model.tie_weights()
  ids = [tokenizer.encode(text) for text in TEXTS]
  tokens = torch.tensor([ids[3][:24]])
  with torch.no_grad():
    np.savez(out / "gguf.npz", tokens=tokens.numpy(), logp=log_probs(model, tokens).numpy())
  chat = None  # a base model has no template
  if tokenizer.chat_template:
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
  found = {"texts": TEXTS, "ids": ids, "decoded": [tokenizer.decode(row) for row in ids]}
  found |= {"messages": MESSAGES, "chat": chat, "special": tokenizer.special_tokens_map}
  (out / "gguf.json").write_text(json.dumps(found))


def main() -> None:
  torch.set_num_threads(1)
  out = pathlib.Path(sys.argv[1])
  if sys.argv[2] != "cases":
    save_gguf(out, pathlib.Path(sys.argv[2]))
    return
  for name, (prefix, changes) in CASES.items():
    save_case(out, name, prefix, changes)


if __name__ == "__main__":
  main()
