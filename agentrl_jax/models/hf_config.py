"""The fields of a Hugging Face `config.json`: each is read, ignored, or refused by name."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from agentrl_jax.models import layers
from agentrl_jax.models.layers import RopeScaling

# Fields that change nothing here, whatever they hold.
IGNORED = frozenset({
  *("_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype"),
  *("id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type"),
  *("output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype"),
  *("transformers.js_config", "transformers_version", "use_cache"),
})  # fmt: skip
# Fields of every family by the name of ours: required ones, and those that have a default.
SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "embed",
  "intermediate_size": "ffw",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "max_position_embeddings": "max_position",
}
OPTIONS = {
  "num_key_value_heads": "kv_heads",
  "head_dim": "head_dim",
  "rms_norm_eps": "norm_epsilon",
  "tie_word_embeddings": "tied",
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "pad_token_id": "pad_token_id",
}
ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})  # read by `read_rope`

_WINDOWS = frozenset({"layer_types", "max_window_layers", "sliding_window"})


def check(
  fields: Mapping[str, Any], family: str, *, fixed: Mapping[str, Any], read: Collection[str]
) -> None:
  """Raises ValueError unless every field is known, every required one is there, and numbers make
  sense.

  Args:
    family: its name in messages.
    fixed: fields of which only this value is implemented.
    read: fields that the family reads beside `SIZES`, `OPTIONS` and `ROPE`.
  """
  for name, value in fields.items():
    if name in fixed and value != fixed[name]:
      raise ValueError(f"config field {name}={value!r} is not supported, expected {fixed[name]!r}")
    if name not in {*IGNORED, *ROPE, *SIZES, *OPTIONS, *fixed, *read}:
      raise ValueError(f"config field {name}={value!r} is not known to the {family} family")
  missing = [name for name in SIZES if name not in fields]
  if missing:
    raise ValueError(f"config fields {missing} are missing")
  require_counts(fields, [name for name in (*SIZES, "num_key_value_heads") if name in fields])
  require_counts(fields, ["head_dim"] if fields.get("head_dim") is not None else [])
  read_positive(fields, "rms_norm_eps", 1.0)
  _check_ends(fields)


def require_counts(fields: Mapping[str, Any], names: Collection[str], least: int = 1) -> None:
  """Raises ValueError for a field that is no whole number of at least `least`, by name."""
  for name in sorted(names):
    if not (type(fields[name]) is int and fields[name] >= least):
      raise ValueError(
        f"config field {name}={fields[name]!r}, expected a whole number > {least - 1}"
      )


def require_experts(fields: Mapping[str, Any], experts: str) -> None:
  """Raises ValueError if a token has more experts than there are by the field `experts`."""
  chosen = fields["num_experts_per_tok"]
  if chosen > fields[experts]:
    raise ValueError(f"num_experts_per_tok={chosen} exceeds {experts}={fields[experts]}")


def read_positive(fields: Mapping[str, Any], name: str, default: float) -> float:
  """A field's number, `default` where the field is left out. Raises ValueError unless it is > 0."""
  value = fields.get(name, default)
  if not (type(value) in (int, float) and 0 < value < math.inf):
    raise ValueError(f"config field {name}={value!r}, expected a number > 0")
  return value


def _check_ends(fields: Mapping[str, Any]) -> None:
  given, size = fields.get("eos_token_id"), fields["vocab_size"]
  ends = given if isinstance(given, list) else [] if given is None else [given]
  if not all(type(end) is int and 0 <= end < size for end in ends):
    raise ValueError(f"config field eos_token_id={given!r}, expected ids from 0 to {size - 1}")


def read_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The arguments of a family's `Config` that `SIZES` and `OPTIONS` name.

  Raises:
    ValueError: query heads that do not divide over the key-value heads.
  """
  sizes = {ours: fields[name] for name, ours in (SIZES | OPTIONS).items() if name in fields}
  if sizes.get("kv_heads") is None:
    sizes["kv_heads"] = sizes["heads"]
  if sizes.get("head_dim") is None:
    sizes["head_dim"] = sizes["embed"] // sizes["heads"]
  if isinstance(sizes.get("eos_token_id"), list):
    sizes["eos_token_id"] = tuple(sizes["eos_token_id"])
  heads, kv_heads = sizes["heads"], sizes["kv_heads"]
  if heads % kv_heads:
    raise ValueError(
      f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    )
  return sizes


def write_sizes(config: Any) -> dict[str, Any]:
  """The inverse of `read_sizes`, of the fields that the family's `Config` has."""
  names = (SIZES | OPTIONS).items()
  return {name: getattr(config, ours) for name, ours in names if hasattr(config, ours)}


def read_rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """(theta, scaling) in both spellings: `rope_parameters`, and `rope_theta` with `rope_scaling`.

  Raises:
    ValueError: a kind of scaling, or a parameter of one, that is not known, or a theta that is not
      > 0, by name; both spellings that differ.
  """
  rope = rope_fields(fields)
  theta = read_positive({**fields, **rope}, "rope_theta", 10000.0)
  return theta, read_scaling(rope, fields["max_position_embeddings"])


def rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """The parameters in either spelling. Raises ValueError for both that differ."""
  newer, older = (fields.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
  if newer and older and newer != older:
    raise ValueError(
      f"config field rope_scaling={older!r}, but rope_parameters={newer!r}: expected one of them"
    )
  return newer or older


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
  """The older spelling, which every transformers version reads."""
  return {"rope_theta": theta} | ({"rope_scaling": write_scaling(scaling)} if scaling else {})


def read_scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling | None:
  """Raises ValueError as `read_rope`."""
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in _SCALINGS:
    raise ValueError(
      f"config field rope_type={kind!r} is not supported, expected one of {sorted(_SCALINGS)}"
    )
  required, optional = _SCALINGS[kind]
  unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta", *required, *optional})
  if unknown:
    raise ValueError(f"rope parameters {unknown} are not known to rope_type={kind!r}")
  missing = sorted(required - set(rope))
  if missing:
    raise ValueError(f"rope parameters {missing} of rope_type={kind!r} are missing")
  for name in sorted(required):
    if not (kind == "yarn" and rope[name] is None):  # the factor, which is then inferred
      read_positive(rope, name, 1.0)
  if kind == "linear":
    return layers.Linear(rope["factor"])
  if kind == "llama3":
    return layers.Llama3(
      factor=rope["factor"],
      low_frequency=rope["low_freq_factor"],
      high_frequency=rope["high_freq_factor"],
      original_length=rope["original_max_position_embeddings"],
    )
  return _read_yarn(rope, max_position) if kind == "yarn" else None


_SCALINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {  # required and optional
  "default": (frozenset(), frozenset()),
  "linear": (frozenset({"factor"}), frozenset()),
  "llama3": (
    frozenset({
      *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }),
    frozenset(),
  ),
  "yarn": (
    frozenset({"factor", "original_max_position_embeddings"}),
    frozenset({
      *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    }),
  ),
}  # fmt: skip


def _read_yarn(rope: Mapping[str, Any], max_position: int) -> layers.Yarn:
  """With the attention factor that transformers infers where none is given."""
  original = rope["original_max_position_embeddings"]
  factor = rope["factor"] or max_position / original

  def scale(strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

  inferred = scale(1.0)
  if rope.get("mscale") and rope.get("mscale_all_dim"):
    inferred = scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
  given = rope.get("attention_factor")
  return layers.Yarn(
    factor=factor,
    original_length=original,
    attention_factor=inferred if given is None else given,
    beta_fast=rope.get("beta_fast") or 32.0,
    beta_slow=rope.get("beta_slow") or 1.0,
    truncate=rope.get("truncate", True),
  )


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
  """The inverse of `read_scaling`."""
  match scaling:
    case layers.Linear(factor):
      return {"rope_type": "linear", "factor": factor}
    case layers.Llama3(factor, low, high, original):
      return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
      }
    case layers.Yarn():
      return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "attention_factor": scaling.attention_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
      }


def refuse_windows(fields: Mapping[str, Any]) -> frozenset[str]:
  """The fields in which Qwen models describe sliding windows, none of which may be in use.

  Raises:
    ValueError: naming the field that asks for one.
  """
  if fields.get("use_sliding_window"):
    raise ValueError("config field use_sliding_window=True is not supported, expected False")
  kinds = sorted(set(fields.get("layer_types") or ()) - {"full_attention"})
  if kinds:
    raise ValueError(f"layer_types {kinds} are not supported, expected only 'full_attention'")
  return _WINDOWS | {"use_sliding_window"}
