"""Reads a run's trajectories in the terminal: `python -m launch.view DIR --step=12 --only=failure`.

First a table of the step's groups, then its episodes: turns with rewards, tool calls, tokens
coloured by log-prob and, where the step was trained on, by advantage. DIR is a work directory or
a .jsonl file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from tokenizers import Tokenizer

from agentrl_jax.analysis.transcript import LEGEND, escape, overview, transcript
from agentrl_jax.rollout.records import Episode, from_json
from launch import command

STEP = flags.DEFINE_integer("step", None, "The step to read; default: the last one.", lower_bound=0)
GROUP = flags.DEFINE_string("group", None, "Only this group.")
ONLY = flags.DEFINE_enum("only", None, ["success", "failure", "fault"], "Only this outcome.")
EPISODES = flags.DEFINE_integer("episodes", None, "At most this many.", lower_bound=0)
WIDEST = 200  # columns of the table of groups


def main(arguments: Sequence[str]) -> int:
  if len(arguments) != 2:
    raise ValueError("expected one directory: python -m launch.view DIR")
  path = find_trajectories(Path(arguments[1]), STEP.value)
  episodes, notice = read_episodes(path)
  chosen = [e for e in episodes if GROUP.value in (None, e.group_id)]
  if GROUP.value is not None and not chosen:
    raise ValueError(f"{path} has no group {GROUP.value!r}; --group takes a name of the table")
  chosen = [e for e in chosen if ONLY.value in (None, e.outcome)][: EPISODES.value]
  tokenizer, missing = find_tokenizer(path)
  advantages = read_advantages(path)

  console = Console(highlight=False, markup=False, emoji=False)
  with console.capture() as capture:
    for line in (f"{path}: {len(episodes)} episodes", notice, missing):
      if line:
        console.print(line, soft_wrap=True)
    table = overview(episodes)
    console.width = max(console.width, needed(console, table))
    console.print(table)
    if console.is_terminal:
      console.print(f"tokens: {LEGEND}", style="dim")
    for episode in chosen:
      console.print()
      advantage = advantages.get(episode.trajectory_id)
      console.print(transcript(episode, tokenizer, advantage), end="", soft_wrap=True)
    if not chosen:
      console.print("no episode to show")
  show(capture.get(), paged=console.is_terminal)
  return 0


def needed(console: Console, table: Table) -> int:
  """Columns for the whole table: lines that wrap can be read, numbers that are cut cannot."""
  return Measurement.get(console, console.options.update(width=WIDEST), table).maximum


def find_trajectories(path: Path, step: int | None) -> Path:
  """The file of a step, the last one by default. Raises FileNotFoundError naming what there is."""
  if path.is_file():
    return path
  directory = path / "trajectories"
  found = {}
  for file in directory.glob("step_*.jsonl"):
    if name := re.fullmatch(r"step_(\d+)\.jsonl", file.name):
      found[int(name[1])] = file
  if not found:
    raise FileNotFoundError(f"no trajectories at {directory}/step_NNNNNN.jsonl")
  if step is not None and step not in found:
    raise FileNotFoundError(f"no step {step} in {directory}; it has {min(found)} to {max(found)}")
  return found[max(found) if step is None else step]


def read_episodes(path: Path) -> tuple[list[Episode], str | None]:
  """The episodes of a file, and a notice if its last line was cut.

  Raises ValueError, naming file and line, for any other line that is no episode.
  """
  *lines, rest = path.read_text(errors="surrogateescape").split("\n")
  episodes = []
  for number, line in enumerate(lines, 1):
    try:
      episodes.append(from_json(line))
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: line {number}: {escape(str(error))}") from error
  if not rest:
    return episodes, None
  try:
    return [*episodes, from_json(rest)], None
  except (ValueError, RecursionError):
    return episodes, f"line {len(lines) + 1} is cut short (its writer was stopped) and left out"


def read_advantages(path: Path) -> Mapping[str, list[float]]:
  """Trajectory id -> advantages of its action tokens; empty where none were written.

  Raises ValueError, naming file and line, for a line that is not one; a cut last line is left out.
  """
  path = path.with_suffix(".advantages.jsonl")
  if not path.exists():
    return {}
  found = {}
  for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
    try:
      row = json.loads(line)
      found[row["trajectory_id"]] = [float(value) for value in row["advantage"]]
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f"{path}: line {number} holds no advantages ({error!r})") from error
  return found


def find_tokenizer(path: Path) -> tuple[Tokenizer | None, str | None]:
  """The tokenizer of the run's model, or None and why text is shown as recorded."""
  run = path.parent.parent / "run.json"
  try:
    directory = Path(json.loads(run.read_text())["model_directory"])
    return Tokenizer.from_file(str(directory / "tokenizer.json")), None
  except Exception as error:  # tokenizers raises bare Exceptions
    reason = str(error) if str(error) else type(error).__name__
    return None, f"no tokenizer through {run} ({reason}): messages as recorded, tokens as ids"


def show(text: str, *, paged: bool) -> None:
  """Prints, through `less` on a terminal that has it."""
  pager = shutil.which("less")
  if paged and pager:
    subprocess.run([pager, "-RFX"], input=text, text=True, errors="surrogateescape", check=False)
    return
  try:
    sys.stdout.write(text)
    sys.stdout.flush()
  except BrokenPipeError:  # `| head` has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
  command.run(main, positional=1)
