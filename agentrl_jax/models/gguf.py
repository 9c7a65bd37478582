"""A GGUF file becomes a Hugging Face directory: weights dequantised, config and tokenizer rebuilt
from its metadata.

Reading and dequantising are the `gguf` library's; names, row orders and metadata keys are maps
below. The values are written as float32, the precision in which block-quantised weights dequantise:
bfloat16 or float16 would round them.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from agentrl_jax.models.checkpoint_files import PathLike, TensorEntry, new_directory, write_tensors

_MODEL_NAMES = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
_LAYER_NAMES = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_OWN_LAYER_NAMES = {  # by architecture
  "llama": {"ffn_norm": "post_attention_layernorm"},
  "gemma3": {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
  },
}
_CONFIG_KEYS = {  # GGUF metadata key after the architecture's prefix -> config.json
  "vocab_size": "vocab_size",
  "embedding_length": "hidden_size",
  "feed_forward_length": "intermediate_size",
  "block_count": "num_hidden_layers",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
  "rope.dimension_count": "head_dim",
  "attention.key_length": "head_dim",
  "attention.sliding_window": "sliding_window",
  "context_length": "max_position_embeddings",
  "rope.freq_base": "rope_theta",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SPECIAL_TOKENS = {
  "bos": "bos_token_id",
  "eos": "eos_token_id",
  "unk": "unknown_token_id",
  "pad": "padding_token_id",
}
# llama.cpp's token types: plain, special, and added but not special.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# How text is cut before merging, by `tokenizer.ggml.pre`. For smollm this is what transformers'
# GGUF loader uses; the model's own tokenizer also cuts every digit off first, which differs only
# where two or more white-space characters stand before a digit.
_PRE_TOKENIZERS = {
  "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
  "smollm": pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def convert(path: PathLike, directory: PathLike) -> None:
  """Writes the model in the GGUF file at `path` to a new Hugging Face `directory`, renamed into
  place last.

  Raises:
    ValueError: an architecture, tokenizer, rope scaling or tensor this map does not know, by name.
    FileNotFoundError: no file at `path`.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(f"{path}: no such GGUF file")
  reader = gguf.GGUFReader(path)
  metadata = {name: field.contents() for name, field in reader.fields.items()}
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = model_config(metadata, tied="output.weight" not in tensors)
  tokenizer, tokenizer_config = build_tokenizer(metadata)
  entries = [_entry(tensor, metadata["general.architecture"], config) for tensor in reader.tensors]
  with new_directory(directory) as partial:
    write_tensors(partial, entries)
    tokenizer.save(str(partial / "tokenizer.json"))
    _write_json(partial / "tokenizer_config.json", tokenizer_config)
    _write_json(partial / "config.json", config)


def model_config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
  """The `config.json` of a GGUF file. Raises ValueError as `convert`."""
  architecture = metadata["general.architecture"]
  if architecture not in _OWN_LAYER_NAMES:
    known = sorted(_OWN_LAYER_NAMES)
    raise ValueError(
      f"GGUF architecture {architecture!r} is not supported, expected one of {known}"
    )
  scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
  if scaling not in ("none", "linear"):
    raise ValueError(f"GGUF rope scaling {scaling!r} is not supported, expected 'none' or 'linear'")
  config = {
    key: metadata[f"{architecture}.{name}"]
    for name, key in _CONFIG_KEYS.items()
    if f"{architecture}.{name}" in metadata
  }
  config["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
  # A float32 field holds 1e-5 as 9.99999975e-06; the shortest decimal of that float32 is what was
  # meant.
  config |= {
    key: float(str(np.float32(value))) for key, value in config.items() if isinstance(value, float)
  }
  if scaling == "linear":
    factor = float(metadata[f"{architecture}.rope.scaling.factor"])
    config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
  for name, key in _SPECIAL_TOKENS.items():
    if name != "unk" and f"tokenizer.ggml.{key}" in metadata:
      config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{key}"]
  own = _gemma3_config(config) if architecture == "gemma3" else _LLAMA_CONFIG
  return config | own | {"tie_word_embeddings": tied, "torch_dtype": "float32"}


_LLAMA_CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
}


def _gemma3_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """What GGUF metadata leave to the reader: llama.cpp has these numbers in its code."""
  depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
  largest = depth == 62  # the 27B model divides scores by the root of another size
  return {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "layer_types": [
      "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(depth)
    ],
    "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
    "rope_local_base_freq": 10000.0,
  }


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """The BPE tokenizer in GGUF metadata and its `tokenizer_config.json`, chat template included.

  Raises:
    ValueError: another kind of tokenizer, or an unknown way of cutting text, by name.
  """
  architecture = metadata["general.architecture"]
  kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
  if kind == "llama" and architecture == "gemma3":
    tokenizer = _sentence_piece(metadata)
  elif kind == "gpt2" and pre in _PRE_TOKENIZERS:
    tokenizer = _byte_level(metadata)
  else:
    known = sorted(_PRE_TOKENIZERS)
    raise ValueError(
      f"GGUF tokenizer {kind!r} / {pre!r} of {architecture!r} is not supported, expected 'gpt2' / "
      f"{known}, or Gemma 3's"
    )
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
  tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
  special = {
    f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}"]]
    for name, key in _SPECIAL_TOKENS.items()
    if f"tokenizer.ggml.{key}" in metadata
  }
  if metadata.get("tokenizer.ggml.add_bos_token", False):
    bos = special["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A",
      pair=f"{bos} $A {bos} $B",
      special_tokens=[(bos, tokens.index(bos))],
    )
  config = special | {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": metadata[f"{architecture}.context_length"],
    "clean_up_tokenization_spaces": False,
    "additional_special_tokens": [str(token) for token in _texts(tokens, types, _CONTROL)],
  }
  if "tokenizer.chat_template" in metadata:
    config["chat_template"] = metadata["tokenizer.chat_template"]
  return tokenizer, config


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])},
      merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
    )
  )
  tokenizer.pre_tokenizer = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _sentence_piece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Gemma's: a space is a letter, text is not cut before merging, unknown letters become bytes."""
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: index for index, token in enumerate(tokens)},
      merges=merges_by_score(tokens, types, metadata["tokenizer.ggml.scores"]),
      unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  tokenizer.normalizer = normalizers.Replace(" ", "▁")
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return tokenizer


def merges_by_score(
  tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
  """The pairs of plain tokens that make a plain token, best score of what they make first."""
  made = {
    token: (-score, index)
    for index, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
    if kind == _NORMAL
  }
  return [
    (token[:cut], token[cut:])
    for token in sorted(made, key=lambda token: made[token])
    for cut in range(1, len(token))
    if token[:cut] in made and token[cut:] in made
  ]


def _texts(tokens: list[str], types: list[int], wanted: int) -> list[str]:
  return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _added(tokens: list[str], types: list[int], wanted: int) -> list[tokenizers.AddedToken]:
  special = wanted == _CONTROL
  return [
    tokenizers.AddedToken(text, normalized=False, special=special)
    for text in _texts(tokens, types, wanted)
  ]


def _entry(tensor: gguf.ReaderTensor, architecture: str, config: Mapping[str, Any]) -> TensorEntry:
  stem, _, suffix = tensor.name.rpartition(".")
  name = _MODEL_NAMES.get(stem)
  part = stem
  if stem.startswith("blk."):
    _, layer, part = stem.split(".", 2)
    names = _LAYER_NAMES | _OWN_LAYER_NAMES[architecture]
    if part in names:
      name = f"model.layers.{layer}.{names[part]}"
  if name is None or suffix != "weight":
    raise ValueError(f"GGUF tensor {tensor.name!r} has no place in a {architecture} checkpoint")
  heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)

  def read() -> np.ndarray:
    array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if architecture == "gemma3":  # llama.cpp stores 1 + weight
      return array - 1 if part.endswith("norm") else array
    return array if heads is None else unpermute_rows(array, config[heads])

  shape = tuple(int(size) for size in reversed(tensor.shape))
  return TensorEntry(f"{name}.weight", shape, np.dtype(np.float32), read)


def unpermute_rows(weight: np.ndarray, heads: int) -> np.ndarray:
  """Undoes llama.cpp's row order of query and key projections.

  llama.cpp rotates neighbouring pairs (0, 1), (2, 3), ...; Hugging Face rotates (0, H/2), (1, H/2 +
  1), ...
  """
  rows, columns = weight.shape
  pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
  return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
