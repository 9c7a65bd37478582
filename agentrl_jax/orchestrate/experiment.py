"""A run as data: which model learns which task, by which algorithm, from which engine.

Configurations in `configs/` build an `Experiment`; everything in it is a value or a function, so a
user's own loss, task or engine needs no registration.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optax

from agentrl_jax.envs.datasets import TaskSource
from agentrl_jax.learner.critic import MakeCritic, on_policy
from agentrl_jax.losses.readiness import ClipController
from agentrl_jax.orchestrate.engines import OpenEngine
from agentrl_jax.rollout.chat import Renderer
from agentrl_jax.rollout.environment import BuildEnv
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.rollout.records import Task
from agentrl_jax.types import Algorithm


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

  `micro_rows` rows of `row_length` positions are differentiated at a time on each data shard. With
  `only_mixed`, groups whose members all got the same reward are left out of the step (they carry no
  advantage, but would count in its denominators). With `share_prompts` a row holds the prompt of
  its episodes once; the numbers are the same, the model reads fewer tokens.
  """

  groups: int = 8
  members: int = 8
  row_length: int = 512
  micro_rows: int = 1
  only_mixed: bool = False
  share_prompts: bool = True


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """`tasks` held-out tasks, `samples` episodes each, before, after, and every `every` steps (0:
  never).
  """

  tasks: int = 64
  samples: int = 4
  every: int = 0


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One run. `model` is a Hugging Face directory; `mesh` gives the size of each mesh axis;
  `critic` makes the critic of algorithms that need one.

  `max_mismatch` bounds |old - behavior| log-prob of tokens that the current weights sampled: engine
  and trainer must be the same policy. About 1e-4 is reachable in float32; declare more for bfloat16
  engines. `clip` moves the upper clip of algorithms that read it (`with_clip_high`, as `ac2`) after
  each step by the policy's entropy.
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
  critic: MakeCritic = on_policy
  clip: ClipController | None = None

  def __post_init__(self):
    if self.steps < 1:
      raise ValueError(f"steps is {self.steps}, expected at least 1")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(f"dtype is {self.dtype!r}, expected float32 or bfloat16")
    if self.batch.row_length <= self.limits.context_tokens:
      raise ValueError(
        f"batch.row_length is {self.batch.row_length}, expected more than limits.context_tokens, "
        f"{self.limits.context_tokens}: a cut episode takes one position more"
      )
    if self.checkpoint_every < 1:
      raise ValueError(f"checkpoint_every is {self.checkpoint_every}, expected at least 1")
