"""What a run has learned so far, opened to be read: its weights and its critic.

Unlike `open_run` it writes nothing and takes no lock, so a run that goes on may be looked at.
"""

import dataclasses
from pathlib import Path

from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.critic import Critic
from agentrl_jax.learner.evaluate import EvaluateFn, make_evaluate
from agentrl_jax.learner.rows import rows_per_micro_batch
from agentrl_jax.learner.state import TrainState
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.model import Model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.run import abstract_of
from agentrl_jax.orchestrate.turn_values import EpisodeValues, episode_values
from agentrl_jax.rollout.records import Episode


@dataclasses.dataclass(frozen=True)
class Trained:
  """A checkpoint of an experiment; `step` optimizer steps of the loop lie behind it."""

  experiment: Experiment
  model: Model
  state: TrainState
  step: int
  evaluate: EvaluateFn
  rows: int

  def values(self, episodes: list[Episode], critic: Critic | None = None) -> list[EpisodeValues]:
    """The critic's, or another's, of scored episodes. Raises ValueError where there is none."""
    critic = critic or self.state.critic
    if critic is None:
      raise ValueError("this run has no critic: its algorithm needs no values")
    return episode_values(
      lambda weights, batch, critic: self.evaluate(weights, batch, critic, self.state.beside),
      self.state.weights,
      critic,
      episodes,
      row_length=self.experiment.batch.row_length,
      micro_rows=self.rows,
    )


def open_trained(experiment: Experiment, path: Path) -> Trained:
  """The checkpoint at `path`, or the latest of the work directory `path`.

  Raises:
    FileNotFoundError: no complete checkpoint is there.
    CheckpointError: it is not of this experiment.
  """
  found = path if (path / checkpoint.MARKER).exists() else checkpoint.latest(path / "checkpoints")
  if found is None:
    raise FileNotFoundError(f"{path} is no complete checkpoint, and has none in checkpoints/")
  model, mesh = load_model(Path(experiment.model)), make_mesh(devices=None, **experiment.mesh)
  state, host = checkpoint.restore(found, abstract_of(experiment, model, mesh))
  rows = experiment.batch.micro_rows
  evaluate = make_evaluate(
    model, mesh, temperature=experiment.temperature, rows=rows, products=experiment.products
  )
  return Trained(
    experiment, model, state, host.weight_version, evaluate, rows_per_micro_batch(rows, mesh)
  )
