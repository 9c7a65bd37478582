"""The turns most worth a retry or a look, by a trained critic:

  python -m launch.score_turns --checkpoint=runs/x --trajectories=FILE.jsonl,FILE.jsonl

Prints a table and saves a picture. A turn's score is how far the expected return fell over it, in
usual errors of successful runs. Runs above the threshold are flagged: of successful ones at most
`--false_alarms`, if they are like those in `--calibration`.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl
import numpy as np
from absl import flags
from fiddle.experimental import serialization
from rich.console import Console
from rich.table import Table

from agentrl_jax.analysis import turn_scores
from agentrl_jax.analysis.transcript import escape
from agentrl_jax.analysis.turn_plot import plot_turns
from agentrl_jax.analysis.turn_scores import Trace
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.supervised import recorded
from agentrl_jax.orchestrate.trained import Trained, open_trained
from agentrl_jax.rollout.records import Episode, Outcome
from launch import command, configuration

CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "A run's directory, or one checkpoint of it; its algorithm has a critic."
)
TRAJECTORIES = flags.DEFINE_list("trajectories", None, "Files of recorded episodes, .jsonl.")
CALIBRATION = flags.DEFINE_list(
  "calibration", [], "Files whose successful episodes set the scale; default: those to be scored."
)
FALSE_ALARMS = flags.DEFINE_float("false_alarms", 0.1, "Share of successful runs to flag at most.")
TOP = flags.DEFINE_integer("top", 20, "Rows of the table.", lower_bound=1)
GAMMA = flags.DEFINE_float("gamma", 1.0, "Discount between turns, as the critic was trained.")
OUTPUT = flags.DEFINE_string("output", "turn_scores.png", "The picture.")


def main(arguments: Sequence[str]) -> int:
  del arguments
  if CHECKPOINT.value is None or not TRAJECTORIES.value:
    raise ValueError("--checkpoint and --trajectories are needed: a run, and what to score")
  trained = open_trained(*experiment_of(Path(CHECKPOINT.value)))
  episodes, traces = read(trained, TRAJECTORIES.value)
  known = read(trained, CALIBRATION.value)[1] if CALIBRATION.value else traces
  good = [t for t in known if t.success]
  gamma = GAMMA.value
  scale = turn_scores.surprise_scale(good, gamma)
  largest = [float(turn_scores.turn_scores(t, scale, gamma).max()) for t in good]
  threshold = turn_scores.conformal_threshold(largest, FALSE_ALARMS.value)
  found = turn_scores.alarms(traces, scale, threshold, gamma)
  console = Console(highlight=False, emoji=False)
  console.print(table(episodes, traces, scale, threshold))
  lead = "" if math.isnan(found.lead) else f", {found.lead:.1f} turns before the end"
  console.print(
    f"threshold {threshold:.2f} from {len(good)} successful runs; flagged: {found.caught:.0%} of "
    f"failed runs{lead}, {found.false:.0%} of successful ones; AUROC {found.auroc:.3f}"
    f" ({found.auroc_early:.3f} before the last turn)",
    markup=False,
    soft_wrap=True,
  )
  plot_turns(traces, scale, threshold, Path(OUTPUT.value), gamma=gamma)
  console.print(f"picture: {OUTPUT.value}", markup=False, soft_wrap=True)
  return 0


def experiment_of(path: Path) -> tuple[Experiment, Path]:
  """The configuration that a run's directory holds, and `path` itself.

  Raises FileNotFoundError where there is none.
  """
  for directory in (path, path.parent.parent):
    if (directory / "config.json").is_file():
      read = functools.partial(serialization.load_json, (directory / "config.json").read_text())
      config = configuration.imported(read)
      experiment = fdl.build(config)
      if not isinstance(experiment, Experiment):
        raise ValueError(f"{directory / 'config.json'} is not of a reinforcement learning run")
      return experiment, path
  raise FileNotFoundError(f"{path} is in no run's directory: there is no config.json")


def read(trained: Trained, paths: Sequence[str]) -> tuple[list[Episode], list[Trace]]:
  """Scored episodes of the files and their traces. Raises ValueError where there is none."""
  every = recorded(*paths)(Path())
  episodes = [e for e in every if e.outcome is not Outcome.FAULT and e.turn_rewards]
  if not episodes:
    raise ValueError(f"{', '.join(paths)}: {len(every)} episodes, none of them scored")
  values = trained.values(episodes)
  return episodes, [
    Trace(v.value, v.turn, np.asarray(e.turn_rewards), v.boot, success=e.outcome is Outcome.SUCCESS)
    for v, e in zip(values, episodes, strict=True)
  ]


def table(
  episodes: Sequence[Episode], traces: Sequence[Trace], scale: float, threshold: float
) -> Table:
  """The highest scores first; a score above the threshold is marked."""
  rows = []
  for episode, trace in zip(episodes, traces, strict=True):
    values = np.append(turn_scores.turn_values(trace), trace.boot)
    said = [str(m["content"]) for m in episode.text if m.get("role") == "assistant"]
    said = said[len(said) - len(trace.reward) :]  # before them are the opening's examples
    scores = turn_scores.turn_scores(trace, scale, GAMMA.value)
    rows += [(scores[k], k, episode, values[k : k + 2], said[k]) for k in range(len(scores))]
  made = Table(box=None, header_style="bold")
  numbers = ("score", "turn", "value", "after")
  for name in ("score", "", "episode", "turn", "value", "after", "outcome", "what it did"):
    made.add_column(name, justify="right" if name in numbers else "left")
  rows.sort(key=lambda row: -row[0])
  for score, k, episode, (before, after), text in rows[: TOP.value]:
    made.add_row(
      f"{score:.2f}",
      "alarm" if score > threshold else "",
      escape(episode.trajectory_id),
      f"{k + 1}/{len(episode.turn_rewards)}",
      f"{before:.3f}",
      f"{after:.3f}",
      str(episode.outcome),
      escape(text)[:60].replace("[", r"\["),
    )
  return made


if __name__ == "__main__":
  command.run(main)
