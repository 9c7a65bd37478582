"""How an experiment's episodes are played, whoever plays them: training, evaluation,
demonstrations.
"""

from pathlib import Path

from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.rollout.engine import Engine
from agentrl_jax.rollout.episode import Play


def make_play(experiment: Experiment, engine: Engine) -> Play:
  """The experiment's environments, limits and scorer around `engine`."""
  tasks = experiment.tasks
  return Play(
    build=tasks.build,
    engine=engine,
    renderer=tasks.renderer(Path(experiment.model)),
    limits=experiment.limits,
    combine=tasks.combine,
    threshold=tasks.threshold,
    temperature=experiment.temperature,
  )
