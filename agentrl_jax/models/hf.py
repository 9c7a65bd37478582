"""Hugging Face directories in and out: config.json to a model, safetensors to our tree by the
model's rules.

Weights are read and written one array at a time, and of a sharded array only this host's part is
read, so a model is never in memory twice.
"""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models import (
  deepseek_v3,
  deepseek_v4,
  gemma3,
  glm4_moe,
  llama,
  qwen2,
  qwen3,
  qwen3_5,
  qwen3_5_moe,
  qwen3_moe,
)
from agentrl_jax.models.checkpoint_files import (
  PathLike,
  TensorEntry,
  TensorFiles,
  new_directory,
  read_object,
  write_tensors,
)
from agentrl_jax.models.model import Model, ParamSpec, Rule, Weights, is_spec, parameter_path

_ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any]], Model]] = {
  "DeepseekV3ForCausalLM": deepseek_v3.from_hf,
  "DeepseekV4ForCausalLM": deepseek_v4.from_hf,
  "Gemma3ForCausalLM": gemma3.from_hf,
  "Glm4MoeForCausalLM": glm4_moe.from_hf,
  "LlamaForCausalLM": llama.from_hf,
  "Qwen2ForCausalLM": qwen2.from_hf,
  "Qwen3ForCausalLM": qwen3.from_hf,
  "Qwen3_5ForCausalLM": qwen3_5.from_hf,
  "Qwen3_5ForConditionalGeneration": qwen3_5.from_hf,
  "Qwen3_5MoeForCausalLM": qwen3_5_moe.from_hf,
  "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.from_hf,
  "Qwen3MoeForCausalLM": qwen3_moe.from_hf,
}
_DERIVED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold and configurations imply
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # tokenizer and generation settings


def load_model(directory: PathLike) -> Model:
  """The model that `config.json` describes.

  Raises:
    FileNotFoundError: no such directory, or no config.json in it.
    ValueError: a config.json that is no JSON object, an unknown architecture, or a configuration
      field not supported, by name.
  """
  path = pathlib.Path(directory) / "config.json"
  if not path.is_file():
    raise FileNotFoundError(
      f"{directory}: expected a Hugging Face model directory with config.json"
    )
  fields = read_object(path)
  architectures = fields.get("architectures") or []
  known = [name for name in architectures if name in _ARCHITECTURES]
  if not known:
    raise ValueError(
      f"{path}: architectures {architectures} are not supported, expected {list(_ARCHITECTURES)}"
    )
  try:
    return _ARCHITECTURES[known[0]](fields)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def load_weights(
  model: Model,
  directory: PathLike,
  *,
  shardings: Any = None,
  dtype: Any = jnp.float32,
  indexed: bool = True,
) -> Weights:
  """The weights of `directory` as arrays of `dtype`, made under `shardings` where given.

  Args:
    shardings: a tree as `models.sharding.shardings` makes; the default device otherwise.
    indexed: as of `TensorFiles`.

  Raises:
    FileNotFoundError: no safetensors files.
    ValueError: a broken file, by its path; tensors missing, left over, or of another shape or
      stored type than expected, or with numbers that are not finite, or a tied head that is not
      the embedding, by name.
  """
  files = model.functions.checkpoint(TensorFiles(directory, indexed=indexed))
  _check(model, files)
  tree = jax.tree.structure(model.abstract(), is_leaf=is_spec)
  count = tree.num_leaves
  default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  placements = [default] * count if shardings is None else tree.flatten_up_to(shardings)
  arrays = [
    jax.make_array_from_callback(
      spec.shape,
      placement,
      lambda index, s=spec, r=rule: _read_box(files, s, r, index or (), _held(r, dtype)),
    )
    for (spec, rule), placement in zip(pairs(model), placements, strict=True)
  ]
  _require_finite(model, arrays, files)
  return tree.unflatten(arrays)


def save_weights(
  model: Model,
  weights: Weights,
  directory: PathLike,
  *,
  dtype: Any = None,
  copy_from: PathLike | None = None,
) -> None:
  """Writes a Hugging Face directory that transformers and SGLang load; it appears whole or not at
  all.

  Args:
    dtype: to store; that of the weights by default.
    copy_from: a model directory whose tokenizer and configuration files are copied.

  Raises:
    FileNotFoundError: `copy_from` has no config.json.
  """
  stored = np.dtype(dtype or jax.tree.leaves(weights)[0].dtype)
  with new_directory(directory) as partial:
    write_tensors(partial, list(entries(model, weights, stored)))
    fields = model.functions.to_hf(model.config)
    if copy_from is not None:
      copied = _copy_settings(pathlib.Path(copy_from), partial)
      # One that wraps the text model's describes other models, too, whose weights are not here.
      fields = fields if "text_config" in copied else copied
    # What was read from quantised files is written as it was trained.
    left_out = ("dtype", "expert_dtype", "quantization_config")
    fields = {name: value for name, value in fields.items() if name not in left_out}
    fields["torch_dtype"] = stored.name
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


@jax.jit
def _are_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  return [jnp.isfinite(x).all() for x in arrays]


def _require_finite(model: Model, arrays: Sequence[jax.Array], files: TensorFiles) -> None:
  """Looks where the arrays lie; only an array that is not finite is looked for in the files."""
  for (spec, rule), whole in zip(pairs(model), _are_finite(arrays), strict=True):
    if whole:
      continue
    bad = [n for n in names(rule, spec) if not np.isfinite(files.read(n).astype(np.float32)).all()]
    raise ValueError(f"{files.directory}: {', '.join(bad)}: numbers that are not finite")


def names(rule: Rule, spec: ParamSpec) -> tuple[str, ...]:
  """The Hugging Face tensors that one array of ours holds, in the order of its leading axes."""
  return tuple(rule.tensor(index) for index in indices(rule, spec))


def indices(rule: Rule, spec: ParamSpec) -> tuple[tuple[int, ...], ...]:
  """Where each tensor of `names` lies on the leading axes of our array: (), (layer,) or (layer,
  expert).
  """
  return tuple(np.ndindex(*spec.shape[: _stacked_axes(rule)]))


def _stacked_axes(rule: Rule) -> int:
  return ("{layer}" in rule.name) + ("{expert}" in rule.name)


def pairs(model: Model) -> list[tuple[ParamSpec, Rule]]:
  """Each weight with the rule that fills it, in tree order."""
  rules = {rule.path: rule for rule in model.rules}
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.abstract(), is_leaf=is_spec)
  return [(spec, rules[parameter_path(path)]) for path, spec in leaves]


def _held(rule: Rule, dtype: Any) -> np.dtype:
  return np.dtype(np.float32) if rule.float32 or rule.whole else np.dtype(dtype)


def _hf_shape(spec: ParamSpec, rule: Rule) -> tuple[int, ...]:
  ours = spec.shape[len(spec.shape) - len(rule.perm) :]
  return tuple(ours[axis] for axis in rule.perm)


def _check(model: Model, files: TensorFiles) -> None:
  """Raises ValueError when the checkpoint is not exactly what the model needs, before anything is
  read.
  """
  expected = {
    name: _hf_shape(spec, rule) for spec, rule in pairs(model) for name in names(rule, spec)
  }
  found = {name for name in files.names() if not name.endswith(_DERIVED)}
  # transformers writes n_shared_experts=0 as matrices of no numbers.
  found -= {name for name in found - set(expected) if 0 in files.shape(name)}
  for layer in getattr(model.config, "prediction_layers", ()):
    found = {name for name in found if not name.startswith(f"model.layers.{layer}.")}
  tied = getattr(model.config, "tied", False) and _HEAD in found
  if tied:
    found -= {_HEAD}
  for problem, wrong in (("missing", set(expected) - found), ("unknown", found - set(expected))):
    if wrong:
      listed = ", ".join(sorted(wrong)[:5]) + (", ..." if len(wrong) > 5 else "")
      raise ValueError(f"{files.directory}: {len(wrong)} {problem} tensors: {listed}")
  whole = {name for spec, rule in pairs(model) if rule.whole for name in names(rule, spec)}
  for name, shape in expected.items():
    if (files.dtype(name) == np.int64) != (name in whole):
      wanted = "I64" if name in whole else "a floating-point type"
      raise ValueError(
        f"{files.directory}: {name} is stored as {files.dtype(name)}, expected {wanted}"
      )
    if files.shape(name) != shape:
      raise ValueError(f"{files.directory}: {name} has shape {files.shape(name)}, expected {shape}")
  if tied:
    _require_tied(files)


def _require_tied(files: TensorFiles) -> None:
  """Some tied checkpoints hold a copy of the embedding; transformers unties a head that is none."""
  shape, step = files.shape(_HEAD), 4096
  if shape == files.shape(_EMBEDDING):
    starts = range(0, shape[0], step)
    parts = [(slice(at, min(at + step, shape[0])), slice(None)) for at in starts]
    if all(np.array_equal(files.read(_HEAD, at), files.read(_EMBEDDING, at)) for at in parts):
      return
  raise ValueError(
    f"{files.directory}: {_HEAD} is not {_EMBEDDING}, expected a copy of it or "
    "tie_word_embeddings=False in config.json"
  )


def _read_box(
  files: TensorFiles, spec: ParamSpec, rule: Rule, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
  """The box `index` of our array, reading only the parts of the Hugging Face tensors inside it."""
  stacked = _stacked_axes(rule)
  theirs = tuple(index[stacked:][axis] for axis in rule.perm)
  back = tuple(np.argsort(rule.perm))
  ranges = [range(*part.indices(size)) for part, size in zip(index, spec.shape, strict=True)]
  box = np.empty([len(part) for part in ranges], dtype)
  for place in np.ndindex(*box.shape[:stacked]):
    chosen = tuple(part[i] for part, i in zip(ranges, place, strict=False))
    box[place] = files.read(rule.tensor(chosen), theirs).transpose(back)
  return box


def entries(model: Model, weights: Weights, dtype: np.dtype) -> Iterator[TensorEntry]:
  """Every Hugging Face tensor of the weights, each fetched to the host when its turn comes."""
  for (spec, rule), array in zip(pairs(model), jax.tree.leaves(weights), strict=True):
    stored = np.dtype(np.int64) if rule.whole else _held(rule, dtype)
    for index in indices(rule, spec):

      def read(
        array: jax.Array = array, rule: Rule = rule, index: Any = index, stored: np.dtype = stored
      ) -> np.ndarray:
        return np.asarray(array[index]).transpose(rule.perm).astype(stored)

      yield TensorEntry(rule.tensor(index), _hf_shape(spec, rule), stored, read)


def _copy_settings(source: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
  """Copies what lies beside the weights and returns the fields of config.json."""
  if not (source / "config.json").is_file():
    raise FileNotFoundError(f"{source}: expected a model directory with config.json to copy from")
  for path in sorted(source.iterdir()):
    if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
      shutil.copyfile(path, target / path.name)
  return read_object(source / "config.json")
