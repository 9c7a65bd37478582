"""The DeepSeek V4 family (V4-Flash, V4-Pro), as transformers has it: its configurations and the
names of its published checkpoints; the model is `deepseek_v4_decoder`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl_jax.models import decoder, deepseek_v4_decoder, hf_config, moe
from agentrl_jax.models.block_scaled import BlockScaled
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.deepseek_v4_decoder import (
  HASHED,
  HEAVY,
  ROUTED,
  SPARSE,
  STACKS,
  WINDOW,
  Config,
  Order,
)
from agentrl_jax.models.model import Family, Model, Rule


def bind(config: Config) -> Model:
  """The model of this configuration."""
  return Model(_FAMILY, config)


_COMPRESSOR_RULES = {
  "wkv.weight": "key",
  "wgate.weight": "gate",
  "ape": "place_bias",
  "norm.weight": "norm",
}
_ATTENTION_RULES = {
  "attn.wq_a.weight": ("query_down",),
  "attn.q_norm.weight": ("query_norm",),
  "attn.wq_b.weight": ("query",),
  "attn.wkv.weight": ("key",),
  "attn.kv_norm.weight": ("key_norm",),
  "attn.attn_sink": ("sinks",),
  "attn.wo_a.weight": ("group",),
  "attn.wo_b.weight": ("output",),
}
_INDEXER_RULES = {
  "attn.indexer.wq_b.weight": ("indexer", "query"),
  "attn.indexer.weights_proj.weight": ("indexer", "weight"),
}
_MIX_RULES = {"fn": "mixing", "base": "mixing_bias", "scale": "mixing_scale"}
_EXPERT_RULES = {"w1": "gate", "w2": "down", "w3": "up"}
_FLOAT32 = {"mixing", "mixing_bias", "mixing_scale", "place_bias", "sinks", "correction"}
_AS_THEY_ARE = {"place_bias", "table"}  # matrices that are not transposed


def rules(config: Config) -> tuple[Rule, ...]:
  """Every tensor of the model, by the names of the published checkpoints."""
  return (
    Rule("embed.weight", ("embedding",), (0, 1)),
    *(rule for kind in STACKS for rule in _stack_rules(config, kind)),
    *(_rule(f"hc_head_{theirs}", ("end", ours), None) for theirs, ours in _MIX_RULES.items()),
    Rule("norm.weight", ("final_norm",), (0,), float32=True),
    Rule("head.weight", ("unembedding",), (1, 0)),
  )


def _stack_rules(config: Config, kind: str) -> tuple[Rule, ...]:
  numbers = config.numbers(kind)
  name = "ffn" if kind in (HASHED, ROUTED) else "attn"
  places = {f"hc_{name}_{theirs}": ("mix", ours) for theirs, ours in _MIX_RULES.items()}
  places |= {f"{name}_norm.weight": ("norm",)}
  places |= _expert_places(kind) if name == "ffn" else _attention_places(kind)
  found = (
    _rule("layers.{layer}." + theirs, (STACKS[kind], *path), numbers)
    for theirs, path in places.items()
  )
  return tuple(found) if numbers else ()


def _attention_places(kind: str) -> dict[str, tuple[str, ...]]:
  places: dict[str, tuple[str, ...]] = dict(_ATTENTION_RULES)
  if kind != WINDOW:
    places |= {f"attn.compressor.{t}": ("compressor", o) for t, o in _COMPRESSOR_RULES.items()}
  if kind == SPARSE:
    places |= _INDEXER_RULES
    places |= {
      f"attn.indexer.compressor.{theirs}": ("indexer", "compressor", ours)
      for theirs, ours in _COMPRESSOR_RULES.items()
    }
  return {name: ("attention", *path) for name, path in places.items()}


def _expert_places(kind: str) -> dict[str, tuple[str, ...]]:
  places: dict[str, tuple[str, ...]] = {"ffn.gate.weight": ("moe", "router")}
  if kind == HASHED:
    places["ffn.gate.tid2eid"] = ("table",)
  else:
    places["ffn.gate.bias"] = ("moe", "correction")
  for theirs, ours in _EXPERT_RULES.items():
    places[f"ffn.experts.{{expert}}.{theirs}.weight"] = ("moe", "experts", ours)
    places[f"ffn.shared_experts.{theirs}.weight"] = ("moe", "shared", ours)
  return places


def _rule(name: str, path: tuple[str, ...], numbers: tuple[int, ...] | None) -> Rule:
  field = path[-1]
  is_norm = field.endswith("norm")
  vector = is_norm or field in _FLOAT32 - {"mixing", "place_bias"}
  perm = (0,) if vector else (0, 1) if field in _AS_THEY_ARE else (1, 0)
  return Rule(
    name,
    path,
    perm,
    numbers=numbers,
    float32=is_norm or field in _FLOAT32,  # as transformers keeps them
    whole=field == "table",
  )


class PublishedFiles:
  """The tensors of a `TensorFiles` by the names of the published checkpoints, of which transformers
  writes some otherwise; those that predict further tokens (`mtp.`) are passed over.

  Weights in FP8 or FP4 beside which there are scales of blocks are dequantised as they are read.
  """

  _RENAMED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
  )

  def __init__(self, files: TensorFiles):
    self.directory = files.directory
    self._files = BlockScaled(files)
    self._theirs = {self._published(name): name for name in self._files.names()}

  def _published(self, name: str) -> str:
    for pattern, replacement in self._RENAMED:
      name = re.sub(pattern, replacement, name)
    return name

  def names(self) -> set[str]:
    return {name for name in self._theirs if not name.startswith("mtp.")}

  def shape(self, name: str) -> tuple[int, ...]:
    return self._files.shape(self._theirs[name])

  def dtype(self, name: str) -> np.dtype:
    return self._files.dtype(self._theirs[name])

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """As `TensorFiles.read`."""
    return self._files.read(self._theirs[name], index)


_FIXED = {
  "attention_bias": False,
  "hidden_act": "silu",
  "mlp_bias": False,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_key_value_heads": 1,
  "scoring_func": "sqrtsoftplus",
  "tie_word_embeddings": False,
  "topk_method": "noaux_tc",
}
_FIELDS = {
  "hc_eps": "mix_epsilon",
  "hc_mult": "streams",
  "hc_sinkhorn_iters": "sinkhorn_steps",
  "index_head_dim": "index_dim",
  "index_n_heads": "index_heads",
  "index_topk": "index_kept",
  "moe_intermediate_size": "expert_ffw",
  "n_routed_experts": "experts",
  "num_nextn_predict_layers": "extra_layers",
  "o_groups": "groups",
  "o_lora_rank": "group_latent",
  "q_lora_rank": "query_latent",
  "sliding_window": "window",
  "swiglu_limit": "limit",
}
_ROUTER = {"num_experts_per_tok": "experts_per_token", "routed_scaling_factor": "scale"}
_REQUIRED = {"head_dim", *_FIELDS, *_ROUTER}
_NO_COUNTS = {"hc_eps", "num_nextn_predict_layers", "routed_scaling_factor", "swiglu_limit"}
_OTHERS = {
  *("compress_rate_csa", "compress_rate_hca", "compress_rates", "compress_ratios"),
  *("compress_rope_theta", "layer_types", "mlp_layer_types", "num_hash_layers"),
  *("partial_rotary_factor", "qk_rope_head_dim", "quantization_config"),
}
# Of how experts were quantised, and of transformers' own training; they change nothing here.
_IGNORED = {
  *("expert_dtype", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}  # fmt: skip
_ATTENTION_TYPES = {
  "sliding_attention": WINDOW,
  "compressed_sparse_attention": SPARSE,
  "heavily_compressed_attention": HEAVY,
}
_EXPERT_TYPES = {"hash_moe": HASHED, "moe": ROUTED}
_RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}  # as published instead of types
_HASH_LAYERS = 3  # transformers' default, as is the next
_ROTARY_FACTOR = 64 / 512


def from_hf(fields: Mapping[str, Any]) -> Model:
  """The model of a Hugging Face `config.json`, as published or as transformers writes it.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = dict(fields)
  width = fields.get("moe_intermediate_size")
  if fields.setdefault("intermediate_size", width) != width:
    raise ValueError(
      f"config field intermediate_size={fields['intermediate_size']!r} is not "
      f"moe_intermediate_size={width!r}: no layer of the DeepSeek V4 family is dense"
    )
  read = {*_REQUIRED, *_OTHERS, *_IGNORED}
  hf_config.check(fields, "DeepSeek V4", fixed=_FIXED, read=read)
  missing = sorted(_REQUIRED - set(fields))
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  quantized = fields.get("quantization_config") or {}
  if quantized.get("quant_method", "fp8") != "fp8":
    raise ValueError(
      f"config field quantization_config={quantized!r} is not supported, expected fp8"
    )
  hf_config.require_counts(fields, _REQUIRED - _NO_COUNTS)
  hf_config.require_experts(fields, "n_routed_experts")
  sizes = hf_config.read_sizes(fields)
  for implied in ("ffw", "kv_heads"):
    del sizes[implied]
  config = Config(
    order=_read_order(fields),
    router=moe.RootSoftplus(**{ours: fields[name] for name, ours in _ROUTER.items()}),
    **_read_blocks(fields),
    **_read_ropes(fields),
    **{ours: fields[name] for name, ours in _FIELDS.items()},
    **sizes,
  )
  _require_whole(config)
  return bind(config)


def _require_whole(config: Config) -> None:
  if config.heads % config.groups:
    raise ValueError(
      f"num_attention_heads={config.heads} is no multiple of o_groups={config.groups}"
    )
  if not config.numbers(ROUTED):
    raise ValueError("no layer's experts are chosen by score, expected one at least")


def _read_order(fields: Mapping[str, Any]) -> Order:
  """Both spellings: types of layers, or compression ratios and the count of layers by token."""
  count = fields["num_hidden_layers"]
  first = _read_kinds(fields, "layer_types", _ATTENTION_TYPES)
  if first is None and fields.get("compress_ratios") is not None:
    of_layers = {**fields, "compress_ratios": fields["compress_ratios"][:count]}
    first = _read_kinds(of_layers, "compress_ratios", _RATIOS)
  if first is None:
    raise ValueError("config fields ['compress_ratios'] are missing")
  second = _read_kinds(fields, "mlp_layer_types", _EXPERT_TYPES)
  if second is None:
    hashed = min(count, fields.get("num_hash_layers", _HASH_LAYERS))
    second = (HASHED,) * hashed + (ROUTED,) * (count - hashed)
  return tuple(zip(first, second, strict=True))


def _read_kinds(
  fields: Mapping[str, Any], name: str, known: Mapping[Any, str]
) -> tuple[str, ...] | None:
  given, count = fields.get(name), fields["num_hidden_layers"]
  if given is None:
    return None
  if len(given) != count or not set(given) <= set(known):
    raise ValueError(f"{name} {given} are not supported, expected {count} of {list(known)}")
  return tuple(known[each] for each in given)


def _read_blocks(fields: Mapping[str, Any]) -> dict[str, int]:
  given = fields.get("compress_rates") or {}
  unknown = sorted(set(given) - set(_ATTENTION_TYPES))
  if unknown:
    raise ValueError(f"compress_rates of {unknown} are not known, see {list(_ATTENTION_TYPES)}")
  return {
    "sparse_block": fields.get("compress_rate_csa", given.get("compressed_sparse_attention", 4)),
    "heavy_block": fields.get("compress_rate_hca", given.get("heavily_compressed_attention", 128)),
  }


def _read_ropes(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Both spellings: parameters of `main` and `compress` apart, or those of the latter alone."""
  rope = dict(hf_config.rope_fields(fields))
  part = fields.get("partial_rotary_factor")
  if part is None:
    given = fields.get("qk_rope_head_dim")
    part = _ROTARY_FACTOR if given is None else given / fields["head_dim"]
  main: dict[str, Any] = {"rope_theta": fields.get("rope_theta", 10000.0)}
  if set(rope) >= {"main", "compress"}:
    main, blocks = dict(rope["main"]), dict(rope["compress"])
    parts = {each.pop("partial_rotary_factor", 1.0) for each in (main, blocks)}
    if parts != {part}:
      raise ValueError(f"partial_rotary_factor is {sorted(parts)} in rope_parameters and {part}")
  else:
    rope.pop("partial_rotary_factor", None)
    blocks = rope | {"rope_theta": fields.get("compress_rope_theta", 160000.0)}
    if rope.get("rope_type", rope.get("type")) == "yarn":
      blocks.setdefault("attention_factor", 1.0)
  length = fields["max_position_embeddings"]
  if hf_config.read_scaling(main, length) is not None:
    raise ValueError(f"rope scaling {main} of layers without blocks is not supported")
  return {
    "rotary_dim": int(fields["head_dim"] * part),
    "rope_theta": hf_config.read_positive(main, "rope_theta", 10000.0),
    "block_rope_theta": hf_config.read_positive(blocks, "rope_theta", 160000.0),
    "rope_scaling": hf_config.read_scaling(blocks, length),
  }


def to_hf(config: Config) -> dict[str, Any]:
  """The `config.json` of this configuration, as published and with transformers' layer types."""
  first, second = zip(*config.order, strict=True)
  attention_types = {kind: name for name, kind in _ATTENTION_TYPES.items()}
  expert_types = {kind: name for name, kind in _EXPERT_TYPES.items()}
  rates = {SPARSE: config.sparse_block, HEAVY: config.heavy_block}
  return {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    **hf_config.write_sizes(config),
    **hf_config.write_rope(config.rope_theta, config.rope_scaling),
    "compress_rope_theta": config.block_rope_theta,
    "qk_rope_head_dim": config.rotary_dim,
    "partial_rotary_factor": config.rotary_dim / config.head_dim,
    "compress_rates": {attention_types[kind]: rate for kind, rate in rates.items()},
    "compress_ratios": [rates.get(kind, 0) for kind in first],
    "layer_types": [attention_types[kind] for kind in first],
    "mlp_layer_types": [expert_types[kind] for kind in second],
    "num_hash_layers": second.count(HASHED),
    **{name: getattr(config, ours) for name, ours in _FIELDS.items()},
    **{name: getattr(config.router, ours) for name, ours in _ROUTER.items()},
    **_FIXED,
  }


_FAMILY = Family(
  name="deepseek_v4",
  abstract=deepseek_v4_decoder.abstract,
  forward=deepseek_v4_decoder.forward,
  forward_routed=deepseek_v4_decoder.forward_routed,
  unembedding=decoder.unembedding,
  init_cache=deepseek_v4_decoder.init_cache,
  decode=deepseek_v4_decoder.decode,
  rules=rules,
  to_hf=to_hf,
  units=deepseek_v4_decoder.units,
  checkpoint=PublishedFiles,
  whole_prefixes=True,
  shares_prompts=False,
)
