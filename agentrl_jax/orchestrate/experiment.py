"""A run as data: which model learns which task, by which algorithm, from which engine.

Configurations in `configs/` build an `Experiment`; everything in it is a value or a function, so a
user's own loss, task or engine needs no registration.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from agentrl_jax.envs.datasets import TaskSource
from agentrl_jax.learner.critic import MakeCritic, on_policy
from agentrl_jax.learner.products import Products
from agentrl_jax.losses.checks import some_group_of_two
from agentrl_jax.losses.readiness import ClipController
from agentrl_jax.losses.routers import AS_CHECKPOINT, Routers
from agentrl_jax.models.kernels import PROVEN, Kernels
from agentrl_jax.models.lora import Lora
from agentrl_jax.models.model import Model
from agentrl_jax.models.precision import Fp8
from agentrl_jax.models.remat import Remat, save_everything
from agentrl_jax.orchestrate.engines import OpenEngine
from agentrl_jax.rollout.chat import Renderer
from agentrl_jax.rollout.environment import BuildEnv
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.rollout.records import Task
from agentrl_jax.types import Algorithm


def at_least(where: str, config: Any, least: int, *names: str) -> None:
  """Raises ValueError unless these values of a configuration are whole numbers >= `least`."""
  for name in names:
    value = config[name] if isinstance(config, Mapping) else getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      named = f"{where}.{name}" if where else name
      raise ValueError(f"{named} is {value!r}, expected a whole number of at least {least}")


@dataclasses.dataclass(frozen=True)
class Taskset:
  """What is learned: environments, problems, and how the model reads and is scored.

  `renderer` is made from the model's directory. An episode is a success if `combine` of its summed
  reward parts reaches `threshold`; training and evaluation use the same function.
  """

  build: BuildEnv
  train: TaskSource
  held_out: Sequence[Task]
  renderer: Callable[[Path], Renderer]
  combine: Callable[[Mapping[str, float]], float]
  threshold: float = 1.0


@dataclasses.dataclass(frozen=True)
class Batch:
  """How many episodes a step, and how they lie in memory.

  `micro_rows` rows of `row_length` positions are differentiated at a time on each data shard. The
  step is cut into `minibatches` updates, each on its own micro-batches; all of them are compared
  with the policy that the step began with. With
  `only_mixed`, groups whose members all got the same reward are left out of the step (they carry no
  advantage, but would count in its denominators). `least_rows` and `least_turns` are room that a
  batch has at least: steps whose episodes differ in length are then one program. With
  `share_prompts` a row holds the prompt of its episodes once; the numbers are the same, the model
  reads fewer tokens.
  """

  groups: int = 8
  members: int = 8
  row_length: int = 512
  micro_rows: int = 1
  minibatches: int = 1
  least_rows: int = 1
  least_turns: int = 1
  only_mixed: bool = False
  share_prompts: bool = True

  def __post_init__(self):
    at_least("batch", self, 1, "groups", "members", "row_length", "micro_rows")
    at_least("batch", self, 1, "minibatches", "least_rows", "least_turns")


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """`tasks` held-out tasks, `samples` episodes each, before, after, and every `every` steps (0:
  never).
  """

  tasks: int = 64
  samples: int = 4
  every: int = 0

  def __post_init__(self):
    at_least("evaluation", self, 0, "tasks", "every")
    at_least("evaluation", self, 1, "samples")


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One run. `model` is a Hugging Face directory; `mesh` gives the size of each mesh axis;
  `critic` makes the critic of algorithms that need one.

  `reference` is the Hugging Face directory of the policy that penalties and distillation compare
  with, as a teacher of another size; None is the run's own start.

  `max_mismatch` bounds |old - behavior| log-prob of tokens that the current weights sampled: engine
  and trainer must be the same policy. About 1e-4 is reachable in float32; declare more for bfloat16
  engines. `clip` moves the upper clip of algorithms that read it (`with_clip_high`, as `ac2`) after
  each step by the policy's entropy. `remat` says what of each layer is kept for the backward pass
  (`models.remat`), `kernels` which fused ones attention may use (`models.kernels`). `routers` is
  for mixtures of experts. `fp8` has the learner compute products in FP8, `lora` has it train
  adapters alone (docs/precision.md), and with `push_adapters` these alone go to the engine, not
  merged weights. `architecture` is what the directory must hold, where that is known: a run refuses
  another, and `launch.plan` needs no directory.
  """

  model: str
  tasks: Taskset
  algorithm: Algorithm
  optimizer: optax.GradientTransformation
  engine: OpenEngine
  steps: int
  limits: Limits
  batch: Batch = Batch()
  evaluation: Evaluation = Evaluation()
  temperature: float = 1.0
  concurrency: int = 64
  seed: int = 0
  mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
  dtype: str = "float32"
  checkpoint_every: int = 5
  keep_checkpoints: int = 2
  max_mismatch: float = 1e-4
  reference: str | None = None
  critic: MakeCritic = on_policy
  clip: ClipController | None = None
  remat: Remat = save_everything
  kernels: Kernels = dataclasses.field(default_factory=lambda: PROVEN)
  routers: Routers = AS_CHECKPOINT
  fp8: Fp8 | None = None
  lora: Lora | None = None
  push_adapters: bool = False
  architecture: Model | None = None

  @property
  def products(self) -> Products:
    """How the learner's products are computed, and what of them learns."""
    return Products(self.fp8, self.lora)

  def __post_init__(self):
    if not isinstance(self.algorithm, Algorithm):
      raise ValueError(
        f"algorithm is {self.algorithm!r}, expected an Algorithm: "
        "--config='fiddler:use_algorithm(name=\"NAME\")' puts a named one there"
      )
    for name, kind in (("limits", Limits), ("batch", Batch), ("evaluation", Evaluation)):
      if not isinstance(getattr(self, name), kind):
        found = f"{name} is {getattr(self, name)!r}, expected {kind.__name__}"
        without = ": evaluation.tasks=0 leaves evaluations out" if kind is Evaluation else ""
        raise ValueError(found + without)
    for name in ("temperature", "max_mismatch"):
      if not isinstance(getattr(self, name), int | float):
        raise ValueError(f"{name} is {getattr(self, name)!r}, expected a number")
    at_least("", self, 1, "steps", "concurrency", "checkpoint_every", "keep_checkpoints")
    at_least("", self, 0, "seed")
    at_least("mesh", self.mesh, 1, *self.mesh)
    if not 0 <= self.temperature < float("inf"):
      raise ValueError(f"temperature is {self.temperature}, expected at least 0")
    if not self.max_mismatch > 0:
      raise ValueError(f"max_mismatch is {self.max_mismatch}, expected more than 0")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(f"dtype is {self.dtype!r}, expected float32 or bfloat16")
    if self.lora is not None and self.routers.correction_rate:
      raise ValueError(
        f"routers.correction_rate is {self.routers.correction_rate}, expected 0 with lora: routers "
        "are frozen"
      )
    if self.push_adapters and self.lora is None:
      raise ValueError("push_adapters is set, but lora is None: there are no adapters to push")
    if self.batch.row_length <= self.limits.context_tokens:
      raise ValueError(
        f"batch.row_length is {self.batch.row_length}, expected more than limits.context_tokens, "
        f"{self.limits.context_tokens}: a cut episode takes one position more"
      )
    if some_group_of_two in self.algorithm.checks and self.batch.members < 2:
      raise ValueError(
        f"batch.members is {self.batch.members}, expected at least 2: the algorithm compares the "
        "members of a group"
      )
