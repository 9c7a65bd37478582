"""A run as data, and what it holds while it goes on."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import optax

from agentrl_jax.envs import ledger
from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.evaluate import EvaluateFn
from agentrl_jax.learner.state import TrainState
from agentrl_jax.learner.step import PrepareFn, StepFn
from agentrl_jax.losses.readiness import ClipController, DecodeCost, RateController
from agentrl_jax.models.model import Model
from agentrl_jax.orchestrate.engines import Host, OpenEngine
from agentrl_jax.orchestrate.experiment import Evaluation, Taskset
from agentrl_jax.orchestrate.metrics import MetricsWriter, Progressing
from agentrl_jax.rollout.episode import Play
from agentrl_jax.rollout.records import Task
from agentrl_jax.types import Algorithm
from experiments.ac2.memory import Memory, Trust


@dataclasses.dataclass(frozen=True)
class CriticPlan:
  """A policy that is its own critic: whose chunks it may score, and how it learns to.

  `chunk` bounds the new tokens of what it scores; `optimizer` is of `optim.with_rate`, whose rate
  `rate` then moves. It learns from `drawn` of the last `stored` groups in which at least
  `min_valid` members have a worth.
  """

  trust: Trust
  algorithm: Algorithm
  optimizer: optax.GradientTransformation
  rate: RateController
  chunk: int = 4
  audit: float = 0.25
  stored: int = 256
  drawn: int = 128
  min_valid: int = 8


@dataclasses.dataclass(frozen=True)
class Plan:
  """One arm's run. With `refill` 0 every response begins at its problem; without a critic all of
  them go on to their end. Prefixes are cut at multiples of `grid` tokens.
  """

  model: str
  tasks: Taskset
  actor: Algorithm
  optimizer: optax.GradientTransformation
  engine: OpenEngine
  steps: int
  critic: CriticPlan | None = None
  groups: int = 16
  members: int = 8
  refill: int = 16
  capacity: int = 64
  grid: int = 4
  minibatches: int = 2
  temperature: float = 0.8
  clip: ClipController = dataclasses.field(default_factory=ClipController)
  evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
  seed: int = 0
  checkpoint_every: int = 10


@dataclasses.dataclass
class Run:
  """Everything the loop needs; the only mutable object of it."""

  plan: Plan
  workdir: Path
  model: Model
  cost: DecodeCost
  state: TrainState
  memory: Memory
  step: int
  host: Host
  play: Play
  policy: EvaluateFn
  prepare: PrepareFn
  update: StepFn
  teach: tuple[PrepareFn, StepFn] | None  # the critic's
  saver: checkpoint.Saver
  metrics: MetricsWriter
  progress: Progressing
  problems: Mapping[str, Task]

  def words(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The symbols of a response, without its end."""
    return self.play.renderer.text(np.asarray(ids, np.int32)).split()

  def limited(self, tokens: int = ledger.BUDGET) -> Play:
    """For responses of at most so many new tokens."""
    limits = dataclasses.replace(self.play.limits, turn_tokens=tokens)
    return dataclasses.replace(self.play, limits=limits)
