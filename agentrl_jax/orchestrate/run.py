"""What a run holds, made in an order in which nothing is allocated twice: shapes, state, engine,
files.

The work directory is the run: `config.json`, `run.json`, `metrics.jsonl`, `checkpoints/`,
`trajectories/`, `evaluation/`, and `model/` at the end. Opening it again goes on from the last
complete checkpoint.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentrl_jax.envs.datasets import task_fingerprint
from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.critic import MakeCritic
from agentrl_jax.learner.evaluate import EvaluateFn, make_evaluate
from agentrl_jax.learner.products import Products, whole_policy
from agentrl_jax.learner.rows import rows_per_micro_batch
from agentrl_jax.learner.state import TrainState, abstract_state, make_state
from agentrl_jax.learner.step import PrepareFn, StepFn, make_prepare, make_step
from agentrl_jax.losses.readiness import ClipController
from agentrl_jax.losses.routers import AS_CHECKPOINT, Routers, with_router_loss
from agentrl_jax.models import lora
from agentrl_jax.models.checkpoint_files import fingerprint
from agentrl_jax.models.hf import load_model, save_weights
from agentrl_jax.models.lora import Lora
from agentrl_jax.models.model import Model, is_spec, parameter_path
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate import hosts
from agentrl_jax.orchestrate.engines import EngineContext, Host, require_committed
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.metrics import MetricsWriter, Progressing
from agentrl_jax.orchestrate.play import make_play
from agentrl_jax.orchestrate.reference import Reference, open_reference
from agentrl_jax.rollout.engine import EngineDead
from agentrl_jax.rollout.episode import Play
from agentrl_jax.transfer.push import SGLangPublisher
from agentrl_jax.transfer.report import PushReport
from agentrl_jax.transfer.sources import Sources
from agentrl_jax.transfer.transports import Transport
from agentrl_jax.types import Algorithm


class WorkdirBusy(RuntimeError):
  """Another process trains in this work directory."""


@dataclasses.dataclass(frozen=True)
class Stage:
  """Where episodes are played and the run's story is written: on the first process only."""

  play: Play
  host: Host
  metrics: MetricsWriter


@dataclasses.dataclass
class Run:
  """Everything the loop needs; the only mutable object of it. `step` counts finished optimizer
  steps; `served` are the weights after them as an engine is given them, where there is a stage.
  """

  experiment: Experiment
  workdir: Path
  identity: Mapping[str, Any]  # see `identity`; kept with each checkpoint
  model: Model
  mesh: Mesh
  state: TrainState
  reference: Reference | None  # None where no loss asks for it
  step: int
  cursor: int  # of the training tasks
  served: Any
  deliver: Callable[[TrainState], Any]  # the policy as an engine is given it
  policy: EvaluateFn
  prepare: PrepareFn
  update: StepFn
  saver: checkpoint.Saver
  progress: Progressing
  stage: Stage | None  # None on processes that only learn
  clip: ClipController | None = None
  explained: float = 0.0  # most that the critic has explained of its targets' variance in a step
  sources: Sources | None = None  # where several processes push, each its shards

  @property
  def rows(self) -> int:
    """Rows of one micro-batch over all data shards."""
    return rows_per_micro_batch(self.experiment.batch.micro_rows, self.mesh)

  def deliver_state(self) -> None:
    """Makes the state's weights those that are served from the next push on. All processes call
    this.
    """
    served = self.deliver(self.state)
    self.served = hosts.gathered(served) if self.sources is None else served

  def stand_by(self) -> None:
    """Where all processes push: those without a stage do their part until the first, whose engine
    may need weights at any time, comes to the same call.
    """
    if self.sources is None:
      return
    if self.stage is None:
      self.sources.stand_by(self.model, self.served)
    else:
      self.sources.release()

  async def publish(self, stage: Stage) -> PushReport:
    """Gives the engine the weights after `step` steps; an engine that died meanwhile is revived
    once.
    """
    host = stage.host
    try:
      return require_committed(await host.publisher.publish(self.served, self.step))
    except Exception as error:
      if await host.engine.healthy():
        raise
      self.progress.say(f"engine {host.engine.name} is gone during a push ({error}); restarting")
      await self._revive(host)
      return require_committed(await host.publisher.publish(self.served, self.step))

  async def recover(self, dead: EngineDead) -> None:
    """Restarts a dead engine with the current weights, so that a collection can go on."""
    assert self.stage is not None
    self.progress.say(f"{dead}; restarting it, finished episodes are kept")
    await self._revive(self.stage.host)

  async def _revive(self, host: Host) -> None:
    started = time.monotonic()
    await host.revive(self.served, self.step)
    self.progress.say(f"engine restarted in {time.monotonic() - started:.0f} s")

  def save(self) -> None:
    """Starts a checkpoint of this moment."""
    self.saver.save(
      self.state,
      checkpoint.HostState(
        self.experiment.seed,
        self.step,
        {"next": self.cursor},
        self.identity,
        {"explained": self.explained}
        | ({} if self.clip is None else {"clip_offset": self.clip.offset}),
      ),
    )

  def export(self) -> Path | None:
    """Writes the trained model as a Hugging Face directory that serves and trains again, where
    there is a stage. All processes call this.
    """
    served = self.served
    if self.experiment.push_adapters or self.sources is not None:
      served = hosts.gathered(make_deliver(self.experiment.products)(self.state))
    if self.stage is None:
      return None
    directory = self.workdir / "model"
    source = Path(self.experiment.model)
    save_weights(self.model, served, directory, dtype=jnp.float32, copy_from=source)
    return directory

  def export_adapter(self) -> Path | None:
    """Writes the adapters as a PEFT directory, None where the run has none. All processes call
    this.
    """
    base = Path(self.experiment.model)
    return export_adapter(self.model, self.state, self.experiment.lora, base, self.workdir)


class WrittenConfig(NamedTuple):
  """A configuration: `json` makes it again, `text` shows each value, defaults too."""

  json: str
  text: str


@contextlib.asynccontextmanager
async def open_run(
  experiment: Experiment, workdir: Path, progress: Progressing, config: WrittenConfig | None = None
) -> AsyncIterator[Run]:
  """A run, new or resumed; on leaving, the engine it started is stopped and files are closed.

  Raises:
    WorkdirBusy: another process has it.
    ValueError, FileNotFoundError: the model directory is not one that can be trained.
    EngineError: the engine did not start.
  """
  model = load_model(Path(experiment.model))
  require_architecture(experiment, model)
  require_layout(experiment, model)
  async with contextlib.AsyncExitStack() as stack:
    if hosts.leads():
      stack.enter_context(lock(workdir))
    mesh = make_mesh(devices=None, **experiment.mesh)
    hosts.check_mesh(mesh.size)
    whose = identity(experiment)
    state, host_state = _state(experiment, workdir, model, mesh, whose)
    step = host_state.weight_version
    if step:
      progress.say(f"resuming after step {step} from {workdir / 'checkpoints'}")
    if config is not None and hosts.leads():
      keep_config(workdir, config, progress)
    saver = checkpoint.Saver(workdir / "checkpoints", keep=experiment.keep_checkpoints)
    stack.callback(saver.close)
    deliver = make_deliver(experiment.products, push_adapters=experiment.push_adapters)
    served = hosts.gathered(deliver(state))
    sources = Sources("weights") if jax.process_count() > 1 else None
    opening = _stage(experiment, workdir, model, served, step, progress, sources)
    learner = _learner(experiment, model, mesh)
    stage = await stack.enter_async_context(opening) if hosts.leads() else None
    if sources is not None and not sources.share(stage and _transport(stage)):
      sources = None
    if sources is not None:
      progress.say(f"each of {jax.process_count()} processes pushes its own shards")
      served = deliver(state)
    yield Run(
      experiment=experiment,
      workdir=workdir,
      identity=whose,
      model=model,
      mesh=mesh,
      state=state,
      reference=open_reference(experiment, learner["policy"], model, mesh, state.beside),
      step=step,
      cursor=int(host_state.cursor["next"]),
      clip=_clip(experiment, host_state),
      explained=float(host_state.carry.get("explained", 0.0)),
      served=served,
      deliver=deliver,
      saver=saver,
      progress=progress,
      stage=stage,
      sources=sources,
      **learner,
    )


@contextlib.asynccontextmanager
async def _stage(
  experiment: Experiment,
  workdir: Path,
  model: Model,
  served: Any,
  step: int,
  progress: Progressing,
  sources: Sources | None,
) -> AsyncIterator[Stage]:
  directory = Path(experiment.model)
  about = {"model_directory": str(directory.resolve())}
  _write_whole(workdir / "run.json", json.dumps(about, indent=2) + "\n")
  metrics = MetricsWriter(workdir, resume_step=step)
  context = experiment.limits.context_tokens
  with contextlib.closing(metrics):
    host = await experiment.engine(
      EngineContext(
        model,
        served,
        step,
        directory,
        workdir,
        context,
        experiment.seed,
        progress.say,
        experiment.lora if experiment.push_adapters else None,
        experiment.lora is not None and experiment.lora.starts_elsewhere,
        sources,
      )
    )
    try:
      yield Stage(make_play(experiment, host.engine), host, metrics)
    finally:
      await host.close()


def _transport(stage: Stage) -> Transport | None:
  """What moves whole weights, None where that is nothing that several processes could share."""
  publisher = stage.host.publisher
  return publisher.transport if isinstance(publisher, SGLangPublisher) else None


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
  """Holds the work directory for this process; the lock goes with the process, however it ends."""
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / "lock").open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise WorkdirBusy(f"work directory {workdir} is in use by another process") from error
    yield


def _state(
  experiment: Experiment, workdir: Path, model: Model, mesh: Mesh, whose: Mapping[str, Any]
) -> tuple[TrainState, checkpoint.HostState]:
  """The last complete checkpoint's, or the start's."""
  path = checkpoint.latest(workdir / "checkpoints")
  if path is None:
    directory = Path(experiment.model)
    made_by = critic_of(experiment)
    state = make_state(
      model,
      experiment.optimizer,
      mesh,
      directory=directory,
      critic=made_by,
      products=experiment.products,
    )
    return state, checkpoint.HostState(experiment.seed, 0, {"next": 0})
  seen = require_same(path, whose)
  if seen.weight_version > experiment.steps:
    raise ValueError(
      f"{path} is after step {seen.weight_version}, this configuration ends at {experiment.steps}"
    )
  return checkpoint.restore(path, abstract_of(experiment, model, mesh))


def abstract_of(experiment: Experiment, model: Model, mesh: Mesh) -> TrainState:
  """The shapes and shardings of a run's state."""
  return abstract_state(
    model,
    experiment.optimizer,
    mesh,
    critic=critic_of(experiment),
    products=experiment.products,
  )


def export_adapter(
  model: Model, state: TrainState, how: Lora | None, base: Path, workdir: Path
) -> Path | None:
  """See `Run.export_adapter`."""
  if how is None or state.beside is None or state.beside.adapters is None:
    return None
  adapters = hosts.gathered(state.beside.adapters)
  if not hosts.leads():
    return None
  directory = workdir / "adapter"
  lora.save(model, adapters, how, directory, base=str(base.resolve()))
  return directory


def make_deliver(products: Products, *, push_adapters: bool = False) -> Callable[[TrainState], Any]:
  """What an engine is given of a state: weights, merged where there are adapters, or these alone.
  Merged is also what a model directory is given.
  """
  if push_adapters:
    return lambda state: state.beside and state.beside.adapters
  if products.lora is None:
    return lambda state: state.weights
  merge = jax.jit(functools.partial(whole_policy, products))
  return lambda state: merge(state.weights, state.beside)


def identity(experiment: Experiment) -> dict[str, Any]:
  """What may not change between the parts of one run; all else may."""
  return {
    "kind": "reinforcement learning",
    "seed": experiment.seed,
    "model": fingerprint(experiment.model),
    "reference": None if experiment.reference is None else fingerprint(experiment.reference),
    "training tasks": task_fingerprint(experiment.tasks.train.tasks),
    "held-out tasks": task_fingerprint(experiment.tasks.held_out),
    "adapters": written_lora(experiment.lora),
  }


def written_lora(how: Lora | None) -> dict[str, Any] | None:
  """As JSON gives it back. Checkpoints from before there were adapters have no such name."""
  return None if how is None else {**vars(how), "targets": list(how.targets)}


def require_same(path: Path, asked: Mapping[str, Any]) -> checkpoint.HostState:
  """The host's part of a checkpoint. Raises ValueError, naming the first difference, unless it is
  of the run asked for.
  """
  host = checkpoint.read_host(path)
  for name, value in asked.items():
    if host.run.get(name) != value:
      raise ValueError(
        f"{path} is of a run with {name} {host.run.get(name)}, this configuration has {value}: "
        "use another work directory"
      )
  return host


def _clip(experiment: Experiment, host: checkpoint.HostState) -> ClipController | None:
  """The experiment's, where a checkpoint left it."""
  if experiment.clip is None or "clip_offset" not in host.carry:
    return experiment.clip
  return dataclasses.replace(experiment.clip, offset=float(host.carry["clip_offset"]))


def critic_of(experiment: Experiment) -> MakeCritic | None:
  """What makes the run's critic, None where its algorithm needs no values."""
  return experiment.critic if "value" in experiment.algorithm.needs else None


def algorithm_of(algorithm: Algorithm, routers: Routers, model: Model) -> Algorithm:
  """The algorithm with the losses of the model's routers, if it has any.

  Raises ValueError where a run asks for router losses of a model that has no routers.
  """
  if model.functions.forward_routed is None:
    if routers != AS_CHECKPOINT:
      raise ValueError(f"routers is {routers}, but {model.family} has none")
    return algorithm
  balance = model.load_balance if routers.load_balance is None else routers.load_balance
  return with_router_loss(algorithm, load_balance=balance, z=routers.z)


def require_architecture(experiment: Experiment, model: Model) -> None:
  """Raises ValueError if the run was configured, and so planned, for other weights than these."""
  expected = experiment.architecture
  if expected is None:
    return

  def described(m: Model) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(m.abstract(), is_leaf=is_spec)
    return {".".join(parameter_path(path)): spec.shape for path, spec in leaves}

  here, planned = described(model), described(expected)
  wrong = [name for name in planned | here if planned.get(name) != here.get(name)]
  if wrong:
    name = wrong[0]
    raise ValueError(
      f"{experiment.model} holds {model.family} with {name} {here.get(name)}, the configuration is "
      f"for {expected.family} with {name} {planned.get(name)}"
    )


def require_layout(experiment: Experiment, model: Model) -> None:
  """Raises ValueError if the model cannot read rows as the batch lays them."""
  if experiment.batch.share_prompts and not model.functions.shares_prompts:
    raise ValueError(
      f"batch.share_prompts is True, and samples of {model.family} cannot continue a prompt "
      "that is laid once: --config=set:batch.share_prompts=False"
    )


def learner_options(experiment: Experiment) -> dict[str, Any]:
  """What evaluation and step are both made with."""
  return {
    "temperature": experiment.temperature,
    "dtype": jnp.dtype(experiment.dtype),
    "products": experiment.products,
    "kernels": experiment.kernels,
  }


def _learner(experiment: Experiment, model: Model, mesh: Mesh) -> Mapping[str, Callable[..., Any]]:
  options = learner_options(experiment)
  micro_rows = experiment.batch.micro_rows
  algorithm = algorithm_of(experiment.algorithm, experiment.routers, model)
  return {
    "policy": make_evaluate(model, mesh, rows=micro_rows, **options),
    "prepare": make_prepare(algorithm),
    "update": make_step(
      model,
      experiment.optimizer,
      algorithm,
      mesh,
      micro_rows=micro_rows,
      critic=critic_of(experiment),
      remat=experiment.remat,
      correction_rate=experiment.routers.correction_rate,
      **options,
    ),
  }


def keep_config(workdir: Path, config: WrittenConfig, progress: Progressing) -> None:
  """Writes `config.json` and `config.txt`; those that were different stay as `config.previous.*`.

  The text may differ where the JSON does not: a default has changed since the run began.
  """
  changed = []
  for path, written in (
    (workdir / "config.json", config.json),
    (workdir / "config.txt", config.text),
  ):
    if path.exists() and path.read_text() != written:
      path.replace(path.with_stem("config.previous"))
      changed.append(f"config.previous{path.suffix}")
    _write_whole(path, written)
  if changed:
    kept = " and ".join(changed)
    progress.say(f"the configuration is another than before, which is kept: {kept}")


def _write_whole(path: Path, text: str) -> None:
  """The file as it was or as it shall be, never a part."""
  partial = path.with_name(f"{path.name}.partial")
  partial.write_text(text)
  partial.replace(path)


def synchronise(state: TrainState) -> None:
  """Waits until the device has finished with the state, so that clocks mean something."""
  jax.block_until_ready(state)
