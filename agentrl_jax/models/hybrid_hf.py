"""What Hugging Face directories of hybrid decoders hold: the text model, alone or inside a model of
text and images, whose other weights are passed over.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.models import hf_config
from agentrl_jax.models.checkpoint_files import TensorFiles
from agentrl_jax.models.hybrid_decoder import Config

FIXED = {
  "attention_bias": False,
  "attn_output_gate": True,
  "hidden_act": "silu",
  "mamba_ssm_dtype": "float32",
}
_FIELDS = {
  "linear_conv_kernel_dim": "taps",
  "linear_key_head_dim": "key_dim",
  "linear_num_key_heads": "key_heads",
  "linear_num_value_heads": "value_heads",
  "linear_value_head_dim": "value_dim",
}
_REQUIRED = {"head_dim", "num_key_value_heads", *_FIELDS}  # which have no default here
_OTHERS = {
  *("full_attention_interval", "layer_types", "partial_rotary_factor"),
  *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # of a part that is passed over
}
_KINDS = {"linear_attention": True, "full_attention": False}
_MULTIMODAL_ROPE = {"mrope_interleaved", "mrope_section"}  # of images; text turns as without

# Fields around a text configuration that change nothing in the text model, or are read here.
_AROUND = {
  *("hidden_size", "image_token_id", "language_model_only", "model_name", "text_config"),
  *("video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id"),
}
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def text_fields(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
  """The text model's fields of a `config.json`, which may hold them as its `text_config`.

  Raises:
    ValueError: a field around a `text_config` that is unknown, or a `tie_word_embeddings` that
      contradicts it, by name.
  """
  if "text_config" not in fields:
    return dict(fields)
  text = dict(fields["text_config"])
  for name, value in fields.items():
    if name not in {*_AROUND, *_ENDS, *hf_config.IGNORED, "tie_word_embeddings"}:
      raise ValueError(f"config field {name}={value!r} is not known to the {family} family")
  tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
  if text.get("tie_word_embeddings", tied) != tied:
    raise ValueError(f"config field tie_word_embeddings={tied!r}, but {not tied} in text_config")
  ends = {name: fields[name] for name in _ENDS if fields.get(name) is not None}
  return text | ends | {"tie_word_embeddings": tied}


def read(
  fields: Mapping[str, Any], family: str, *, fixed: Mapping[str, Any], also: Collection[str] = ()
) -> dict[str, Any]:
  """The arguments of `Config` that are no mixture's.

  Args:
    fields: of the text model, see `text_fields`.
    family: its name in messages.
    fixed: as of `hf_config.check`.
    also: fields that the family reads itself.

  Raises:
    ValueError: a missing field, or one that is unknown or set to a value not implemented, by name.
  """
  fields = dict(fields)
  known = {*_REQUIRED, *_OTHERS, *also}
  hf_config.check(fields, family, fixed=FIXED | dict(fixed), read=known)
  missing = sorted((_REQUIRED | set(also)) - set(fields))
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  hf_config.require_counts(fields, _REQUIRED | set(also))
  sizes = {ours: fields[name] for name, ours in _FIELDS.items()}
  if sizes["value_heads"] % sizes["key_heads"]:
    raise ValueError(
      f"linear_num_value_heads={sizes['value_heads']} is no multiple of "
      f"linear_num_key_heads={sizes['key_heads']}"
    )
  rope = dict(hf_config.rope_fields(fields))
  part = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
  fields["rope_parameters"] = {k: v for k, v in rope.items() if k not in _MULTIMODAL_ROPE}
  fields["rope_scaling"] = None
  theta, scaling = hf_config.read_rope(fields)
  return {
    **hf_config.read_sizes(fields),
    **sizes,
    "linear": _read_kinds(fields),
    "rotary_dim": int(fields["head_dim"] * part),
    "rope_theta": theta,
    "rope_scaling": scaling,
  }


def _read_kinds(fields: Mapping[str, Any]) -> tuple[bool, ...]:
  """Which layers are of the delta rule: as listed, or all but every n-th."""
  count = fields["num_hidden_layers"]
  kinds = fields.get("layer_types")
  if kinds is None:
    every = fields.get("full_attention_interval", 4)
    return tuple((layer + 1) % every != 0 for layer in range(count))
  if len(kinds) != count or not set(kinds) <= set(_KINDS):
    raise ValueError(f"layer_types {kinds} are not supported, expected {count} of {list(_KINDS)}")
  return tuple(_KINDS[kind] for kind in kinds)


def write(config: Config) -> dict[str, Any]:
  """The inverse of `read`: the text model's own `config.json`."""
  scaling = hf_config.write_scaling(config.rope_scaling) if config.rope_scaling else {}
  names = {linear: name for name, linear in _KINDS.items()}
  part = config.rotary_dim / config.head_dim
  rope = {"rope_type": "default", **scaling, "rope_theta": config.rope_theta}
  return {
    **hf_config.write_sizes(config),
    **{name: getattr(config, ours) for name, ours in _FIELDS.items()},
    **FIXED,
    "layer_types": [names[linear] for linear in config.linear],
    "partial_rotary_factor": part,
    "rope_parameters": rope | {"partial_rotary_factor": part},
  }


class _Place(NamedTuple):
  """Where a tensor lies: a box of another, whose first axis, of experts, it does not have."""

  name: str
  expert: int | None = None
  start: int = 0
  rows: int = 0


class TextFiles:
  """The text model's tensors of a `TensorFiles`, as a text model alone names them.

  Those of images (`model.visual.`) and of predicting further tokens (`mtp.`) are passed over, the
  prefix `model.language_model.` is `model.`, and where one tensor holds a layer's experts each is
  found under a name of its own.
  """

  def __init__(self, files: TensorFiles):
    self.directory = files.directory
    self._files = files
    self._places: dict[str, _Place] = {}
    for name in files.names():
      if not name.startswith(("model.visual.", "mtp.")):
        text = re.sub(r"^model\.language_model\.", "model.", name)
        self._places |= _places(text, name, files.shape(name))

  def names(self) -> set[str]:
    return set(self._places)

  def shape(self, name: str) -> tuple[int, ...]:
    place = self._places[name]
    shape = self._files.shape(place.name)
    return shape if place.expert is None else (place.rows, *shape[2:])

  def dtype(self, name: str) -> np.dtype:
    return self._files.dtype(self._places[name].name)

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """As `TensorFiles.read`."""
    place = self._places[name]
    if place.expert is None:
      return self._files.read(place.name, index)
    rows, *rest = index or (slice(None),) * len(self.shape(name))
    start, stop, _ = rows.indices(place.rows)
    box = slice(place.expert, place.expert + 1), slice(place.start + start, place.start + stop)
    return self._files.read(place.name, (*box, *rest))[0]


def _places(text: str, name: str, shape: tuple[int, ...]) -> dict[str, _Place]:
  """What a tensor of a file holds, by the names of the text model."""
  found = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", text)
  if found is None:
    return {text: _Place(name)}
  prefix, kind = found.groups()
  parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
  rows = shape[1] // len(parts)
  return {
    f"{prefix}.{expert}.{part}.weight": _Place(name, expert, number * rows, rows)
    for expert in range(shape[0])
    for number, part in enumerate(parts)
  }
