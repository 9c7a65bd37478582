"""Low-rank adapters: x @ weight + alpha / rank * (x @ a) @ b with `weight` frozen (Hu et al. 2021).

Adapters are a tree of their own beside the weights, by the path of the weight they belong to.
`attached` puts them at their places for a forward pass, `merged` makes weights that no longer need
them, and `save` and `load` speak the format of the PEFT library.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agentrl_jax.models import hf, layers
from agentrl_jax.models.checkpoint_files import (
  PathLike,
  TensorEntry,
  TensorFiles,
  new_directory,
  read_object,
  write_file,
)
from agentrl_jax.models.model import (
  KEEP_FLOAT32,
  Model,
  ParamSpec,
  Rule,
  Weights,
  draw,
  is_spec,
  parameter_path,
)

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Lora:
  """Which products are adapted, and by how much.

  `targets` are the names that Hugging Face gives to the modules, as PEFT takes them; a name stands
  for all modules that are called so. The frozen weights are held in `base_dtype`. `start` is the
  directory of an adapter to begin from; None begins at the model itself, as every `b` is zero.
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = PROJECTIONS
  base_dtype: str = "float32"
  start: str | None = None

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"rank is {self.rank}, expected at least 1")
    if not 0 < self.alpha < float("inf"):
      raise ValueError(f"alpha is {self.alpha}, expected more than 0: at 0 nothing is learned")
    if not self.targets:
      raise ValueError("targets are empty, expected names of modules such as 'q_proj'")
    if self.base_dtype not in ("float32", "bfloat16"):
      raise ValueError(f"base_dtype is {self.base_dtype!r}, expected float32 or bfloat16")

  @property
  def scale(self) -> float:
    return self.alpha / self.rank

  @property
  def starts_elsewhere(self) -> bool:
    """Whether the policy before any step may differ from the model directory that it began with."""
    return self.start is not None or self.base_dtype != "float32"


@flax.struct.dataclass
class Adapter:
  """Of one weight, with the leading axes that it has."""

  a: Float[Array, "... I R"]
  b: Float[Array, "... R O"]


Adapters = dict[str, Adapter]  # by the path of the weight


@flax.struct.dataclass
class Adapted:
  """A weight with its adapter, as a layer sees it."""

  weight: Any
  adapter: Adapter
  scale: float = flax.struct.field(pytree_node=False)

  def plain(self, dtype: Any) -> Array:
    """The merged weight, summed in float32."""
    change = jnp.einsum(
      "...ir,...ro->...io",
      self.adapter.a.astype(jnp.float32),
      self.adapter.b.astype(jnp.float32),
    )
    wide = layers.plain(self.weight, jnp.float32)
    return (wide + jnp.float32(self.scale) * change).astype(dtype)


def _module(rule: Rule) -> str | None:
  """The Hugging Face module of a linear map, None for what is none."""
  name, _, kind = rule.name.rpartition(".")
  return name if kind == "weight" and rule.perm == (1, 0) else None


def _targets(model: Model, how: Lora) -> dict[str, tuple[ParamSpec, Rule]]:
  """The weights to adapt by path. Raises ValueError for a target that the model does not have."""
  linear = [(spec, rule) for spec, rule in hf.pairs(model) if _module(rule)]
  called = {rule.path: (_module(rule) or "").rsplit(".", 1)[-1] for _, rule in linear}
  missing = sorted(set(how.targets) - set(called.values()))
  if missing:
    known = sorted(set(called.values()))
    raise ValueError(f"targets {missing} are no modules of {model.family}, there are {known}")
  return {
    ".".join(rule.path): (spec, rule) for spec, rule in linear if called[rule.path] in how.targets
  }


def abstract(model: Model, how: Lora) -> Adapters:
  """The adapters with `ParamSpec` leaves. Raises ValueError for a target that is not there."""

  def one(spec: ParamSpec) -> Adapter:
    *lead, inputs, outputs = spec.shape
    *axes, of_input, of_output = spec.axes
    return Adapter(
      a=ParamSpec((*lead, inputs, how.rank), jnp.float32, (*axes, of_input, None), _uniform),  # pyright: ignore
      b=ParamSpec((*lead, how.rank, outputs), jnp.float32, (*axes, None, of_output), layers.zeros),  # pyright: ignore
    )

  return {path: one(spec) for path, (spec, _) in _targets(model, how).items()}


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Within 1 / sqrt(inputs) of zero, as PEFT draws it."""
  bound = shape[-2] ** -0.5
  return jax.random.uniform(key, shape, dtype, -bound, bound)


def initialize(model: Model, how: Lora, key: jax.Array) -> Adapters:
  """Fresh adapters: they change nothing yet."""
  return draw(abstract(model, how), key)


def base_specs(model: Model, how: Lora) -> Weights:
  """The model's specs in the dtype that frozen weights are held in."""

  def one(path: tuple[Any, ...], spec: ParamSpec) -> ParamSpec:
    kept = parameter_path(path)[-1] in KEEP_FLOAT32
    return spec if kept else spec._replace(dtype=jnp.dtype(how.base_dtype))

  return jax.tree_util.tree_map_with_path(one, model.abstract(), is_leaf=is_spec)


def attached(weights: Weights, adapters: Adapters, how: Lora) -> Weights:
  """Weights for a forward pass with `with_adapters`.

  Places that do not go through a model's `matmul` (routed experts, routers, the head) take the
  merged weight; gradients flow through it to the adapter.
  """

  def one(path: tuple[Any, ...], weight: Any) -> Any:
    named = parameter_path(path)
    adapter = adapters.get(".".join(named))
    if adapter is None:
      return weight
    made = Adapted(weight, adapter, how.scale)
    return made if len(named) > 1 else made.plain(adapter.a.dtype)

  # A weight may be held in another form, which is a tree.
  held = lambda x: hasattr(x, "plain")  # noqa: E731
  return jax.tree_util.tree_map_with_path(one, weights, is_leaf=held)


def with_adapters(matmul: layers.Matmul) -> layers.Matmul:
  """`matmul`, and of an `Adapted` weight x @ weight by it and (x @ a) @ b in x's dtype."""

  def product(x: Float[Array, "... I"], weight: Any) -> Float[Array, "... O"]:
    if not isinstance(weight, Adapted):
      return matmul(x, weight)
    change = layers.matmul(layers.matmul(x, weight.adapter.a), weight.adapter.b)
    return matmul(x, weight.weight) + change * jnp.asarray(weight.scale, change.dtype)

  return product


def merged(weights: Weights, adapters: Adapters, how: Lora) -> Weights:
  """Weights that stand for both, in the dtype of the weights; jit it."""

  def one(path: tuple[Any, ...], weight: Array) -> Array:
    adapter = adapters.get(".".join(parameter_path(path)))
    if adapter is None:
      return weight
    return Adapted(weight, adapter, how.scale).plain(weight.dtype)

  return jax.tree_util.tree_map_with_path(one, weights)


def save(
  model: Model, adapters: Adapters, how: Lora, directory: PathLike, *, base: str = ""
) -> None:
  """Writes the directory of a PEFT adapter, float32; it appears whole or not at all.

  Args:
    base: the model that it belongs to, as PEFT shall find it.
  """
  with new_directory(directory) as partial:
    write_file(partial / TENSORS, list(entries(model, adapters, how)))
    (partial / SETTINGS).write_text(json.dumps(settings(how, base), indent=2) + "\n")


def settings(how: Lora, base: str = "") -> dict[str, Any]:
  """The configuration of a PEFT adapter."""
  return {
    "base_model_name_or_path": base,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": how.alpha,
    "lora_dropout": 0.0,
    "peft_type": "LORA",
    "r": how.rank,
    "target_modules": sorted(how.targets),
    "task_type": "CAUSAL_LM",
  }


def _names(rule: Rule, spec: ParamSpec) -> list[tuple[tuple[int, ...], str]]:
  """PEFT's name, without its last part, for each place on the leading axes of our array."""
  modules = (name.removesuffix(".weight") for name in hf.names(rule, spec))
  places = hf.indices(rule, spec)
  return [(i, f"base_model.model.{m}") for i, m in zip(places, modules, strict=True)]


def entries(model: Model, adapters: Adapters, how: Lora) -> Iterator[TensorEntry]:
  """The tensors of a PEFT adapter, float32. PEFT holds [out, in] matrices: ours transposed."""
  for path, (spec, rule) in _targets(model, how).items():
    for index, name in _names(rule, spec):
      for part, array in (("lora_A", adapters[path].a), ("lora_B", adapters[path].b)):

        def read(array: Array = array, index: tuple[int, ...] = index) -> np.ndarray:
          return np.asarray(array[index], np.float32).T

        shape = array.shape[:-3:-1]
        yield TensorEntry(f"{name}.{part}.weight", shape, np.dtype(np.float32), read)


# Of a PEFT configuration: what would make it another adapter than ours, and what it must be then.
_PLAIN = {
  "alpha_pattern": {}, "bias": "none", "exclude_modules": None, "fan_in_fan_out": False,
  "layer_replication": None, "layers_to_transform": None, "lora_bias": False,
  "modules_to_save": None, "peft_type": "LORA", "rank_pattern": {}, "target_parameters": None,
  "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def load(model: Model, how: Lora, directory: PathLike) -> Adapters:
  """The adapters of a PEFT directory as numpy arrays, float32.

  Raises:
    FileNotFoundError: a file of it is not there.
    ValueError: it is of another rank, alpha or other targets, of a kind that is not supported, or
      holds other tensors than these make; by name.
  """
  root = pathlib.Path(directory)
  _check_settings(root / SETTINGS, how)
  files = TensorFiles(root, single=TENSORS)
  places = _targets(model, how)
  expected = {
    f"{name}.{part}.weight"
    for spec, rule in places.values()
    for _, name in _names(rule, spec)
    for part in ("lora_A", "lora_B")
  }
  # PEFT writes a copy of an adapted head's own weight beside its adapter.
  found = {name for name in files.names() if not name.endswith(".base_layer.weight")}
  for problem, wrong in (("missing", expected - found), ("unknown", found - expected)):
    if wrong:
      listed = ", ".join(sorted(wrong)[:5])
      raise ValueError(f"{root / TENSORS}: {len(wrong)} {problem} tensors: {listed}")

  def filled(part: str, spec: ParamSpec, rule: Rule, shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, np.float32)
    for index, name in _names(rule, spec):
      found = files.read(f"{name}.{part}.weight").astype(np.float32).T
      if found.shape != shape[-2:]:
        raise ValueError(
          f"{root / TENSORS}: {name}.{part} is {found.shape[::-1]}, expected {shape[:-3:-1]}"
        )
      array[index] = found
    return array

  return {
    path: Adapter(
      a=filled("lora_A", *places[path], specs.a.shape),  # pyright: ignore
      b=filled("lora_B", *places[path], specs.b.shape),  # pyright: ignore
    )
    for path, specs in abstract(model, how).items()
  }


def _check_settings(path: pathlib.Path, how: Lora) -> None:
  if not path.is_file():
    raise FileNotFoundError(f"{path}: expected the configuration of a PEFT adapter")
  fields = read_object(path)
  for name, value in _PLAIN.items():
    found = fields.get(name, value)
    if (found or None) != (value or None):
      raise ValueError(f"{path}: {name} is {found!r}, supported is {value!r}")
  asked = {"r": how.rank, "lora_alpha": how.alpha, "target_modules": sorted(how.targets)}
  modules = fields.get("target_modules")
  found = fields | {"target_modules": sorted(modules) if isinstance(modules, list) else modules}
  for name, value in asked.items():
    if found.get(name) != value:
      raise ValueError(f"{path}: {name} is {found.get(name)!r}, this run has {value!r}")
