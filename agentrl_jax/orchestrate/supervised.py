"""Supervised training with the same learner: likelihood of the actions of recorded episodes.

It makes the starting policies that reinforcement learning then improves.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.products import Products
from agentrl_jax.learner.rows import rows_per_micro_batch
from agentrl_jax.learner.state import abstract_state, make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.routers import AS_CHECKPOINT, Routers
from agentrl_jax.models.checkpoint_files import fingerprint
from agentrl_jax.models.hf import load_model, save_weights
from agentrl_jax.models.lora import Lora
from agentrl_jax.models.precision import Fp8
from agentrl_jax.models.remat import Remat, save_everything
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.experiment import Taskset, at_least
from agentrl_jax.orchestrate.metrics import MetricsWriter, Progressing, to_floats
from agentrl_jax.orchestrate.pack import pack
from agentrl_jax.orchestrate.run import (
  WrittenConfig,
  algorithm_of,
  export_adapter,
  keep_config,
  lock,
  make_deliver,
  require_same,
  written_lora,
)
from agentrl_jax.rollout.episode import Limits, Play
from agentrl_jax.rollout.records import Episode, Outcome, Task, from_json
from agentrl_jax.rollout.scripted import Policy, demonstrate
from agentrl_jax.types import Algorithm, Aux

EpisodeSource = Callable[[Path], Sequence[Episode]]  # of a model directory, for its tokenizer


@dataclasses.dataclass(frozen=True)
class Supervised:
  """One supervised run. `model` is a Hugging Face directory, made by `make_model` where absent;
  `routers` is for mixtures of experts. `remat`, `fp8` and `lora` as in `Experiment`.
  """

  model: str
  episodes: EpisodeSource
  algorithm: Algorithm
  optimizer: optax.GradientTransformation
  steps: int
  episodes_per_step: int = 32
  row_length: int = 512
  micro_rows: int = 1
  make_model: Callable[[Path], None] | None = None
  seed: int = 0
  mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
  dtype: str = "float32"
  routers: Routers = AS_CHECKPOINT
  checkpoint_every: int = 100
  remat: Remat = save_everything
  fp8: Fp8 | None = None
  lora: Lora | None = None

  @property
  def products(self) -> Products:
    """How products are computed, and what of them learns."""
    return Products(self.fp8, self.lora)

  def __post_init__(self):
    at_least(
      "", self, 1, "steps", "episodes_per_step", "row_length", "micro_rows", "checkpoint_every"
    )
    at_least("", self, 0, "seed")
    at_least("mesh", self.mesh, 1, *self.mesh)


def recorded(*paths: str, only_success: bool = False) -> EpisodeSource:
  """Episodes of trajectory files (`trajectories/step_*.jsonl` of a run).

  Raises ValueError naming file and line of a record that cannot be read.
  """

  def read(directory: Path) -> Sequence[Episode]:
    del directory
    found = []
    for path in map(Path, paths):
      for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
          found.append(from_json(text))
        except ValueError as error:
          raise ValueError(f"{path}, line {number}: {error}") from error
    return [e for e in found if e.outcome is Outcome.SUCCESS or not only_success]

  return read


def demonstrated(
  tasks: Taskset, policy: Callable[[Task], Policy], *, count: int, limits: Limits
) -> EpisodeSource:
  """The first `count` training tasks, played by the scripted `policy`."""

  def play(directory: Path) -> Sequence[Episode]:
    stage = Play(
      build=tasks.build,
      engine=None,  # pyright: ignore  (a script needs none)
      renderer=tasks.renderer(directory),
      limits=limits,
      combine=tasks.combine,
      threshold=tasks.threshold,
    )
    chosen, _ = tasks.train.next(0, count)

    async def every() -> list[Episode]:
      return [
        await demonstrate(stage, task, policy(task), trajectory_id=f"demo/{i}", group_id=f"{i}")
        for i, task in enumerate(chosen)
      ]

    return asyncio.run(every())

  return play


def train_supervised(
  plan: Supervised, workdir: Path, progress: Progressing, config: WrittenConfig | None = None
) -> Path:
  """Runs, or goes on, in `workdir`; returns the trained model's directory. `config` as in `train`.

  Raises:
    ValueError: no episode, one that does not fit a row or is of another vocabulary, or a work
      directory of another run.
    CheckpointError, WorkdirBusy: as in a reinforcement learning run.
  """
  directory = Path(plan.model)
  if not directory.exists() and plan.make_model is not None:
    plan.make_model(directory)
  model, mesh = load_model(directory), make_mesh(devices=None, **plan.mesh)
  episodes = trainable(plan.episodes(directory), model.config.vocab_size)
  whose = {
    "kind": "supervised training",
    "seed": plan.seed,
    "model": fingerprint(directory),
    "adapters": written_lora(plan.lora),
  }
  with lock(workdir), checkpoint.Saver(workdir / "checkpoints") as saver:
    latest = checkpoint.latest(workdir / "checkpoints")
    if latest is None:
      state = make_state(model, plan.optimizer, mesh, directory=directory, products=plan.products)
    else:
      require_same(latest, whose)
      asked = abstract_state(model, plan.optimizer, mesh, products=plan.products)
      state, _ = checkpoint.restore(latest, asked)
    if config is not None:
      keep_config(workdir, config, progress)
    metrics = MetricsWriter(workdir, resume_step=int(state.step))
    algorithm = algorithm_of(plan.algorithm, plan.routers, model)
    prepare = make_prepare(algorithm)
    options: dict[str, Any] = {"dtype": jnp.dtype(plan.dtype), "products": plan.products}
    evaluate = make_evaluate(model, mesh, rows=plan.micro_rows, **options)
    update = make_step(
      model,
      plan.optimizer,
      algorithm,
      mesh,
      micro_rows=plan.micro_rows,
      remat=plan.remat,
      correction_rate=plan.routers.correction_rate,
      **options,
    )
    make_batch = functools.partial(
      pack,
      row_length=plan.row_length,
      micro_rows=rows_per_micro_batch(plan.micro_rows, mesh),
      min_members=1,
    )
    balanced = "routers" in algorithm.needs
    room = 1, 1  # of rows and turns: a batch after a larger one keeps its shape, and its program
    for step in range(int(state.step), plan.steps):
      progress.update("supervised steps", step, plan.steps)
      drawn = draw(len(episodes), plan.episodes_per_step, step, plan.seed)
      packed = make_batch([[episodes[i]] for i in drawn], least=room)
      room = len(packed.batch.tokens), len(packed.batch.turn_reward)
      # Against an old log-prob of zero the likelihood's loss is the negative log-likelihood itself.
      zeros = np.zeros(packed.batch.tokens.shape, np.float32)
      aux = Aux(
        old_logp=zeros,  # pyright: ignore
        routers=evaluate(state.weights, packed.batch, None, state.beside).routers
        if balanced
        else None,
      )
      state, found = update(state, prepare(packed.batch, aux))
      values = to_floats(found)
      metrics.write(step, values, wall_time=time.time())
      if (step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps:
        said = f"loss {values['loss']:.4f}" if "loss" in values else "skipped, it was not finite"
        progress.say(f"supervised step {step + 1}/{plan.steps}: {said}")
        saver.save(state, checkpoint.HostState(plan.seed, step + 1, {"next": step + 1}, whose))
    progress.update("supervised steps", plan.steps, plan.steps)
    metrics.close()
    trained = workdir / "model"
    whole = make_deliver(plan.products)(state)
    save_weights(model, whole, trained, dtype=jnp.float32, copy_from=directory)
    export_adapter(model, state, plan.lora, directory, workdir)
  return trained


def trainable(episodes: Sequence[Episode], vocab_size: int) -> list[Episode]:
  """Those that did not fault. Raises ValueError if there are none, or of another vocabulary."""
  kept = [e for e in episodes if e.outcome is not Outcome.FAULT]
  if not kept:
    raise ValueError(f"no episodes to train on, of {len(episodes)} read")
  for episode in kept:
    for sample in episode.samples:
      if sample.vocab_size != vocab_size:
        raise ValueError(
          f"episode {episode.trajectory_id} is of a vocabulary of {sample.vocab_size}, the model's "
          f"has {vocab_size}"
        )
  return kept


def draw(size: int, count: int, step: int, seed: int) -> list[int]:
  """Which episodes step `step` trains on: consecutive slices of one shuffled order an epoch."""
  first = step * count
  orders: dict[int, np.ndarray] = {}
  chosen = []
  for at in range(first, first + count):
    epoch = at // size
    if epoch not in orders:
      orders[epoch] = np.random.default_rng((seed, epoch)).permutation(size)
    chosen.append(int(orders[epoch][at % size]))
  return chosen
