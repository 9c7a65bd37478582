"""Losses through the commands: every recipe trains, and so does a loss outside the repository."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.losses import recipes
from agentrl_jax.ops import scales
from agentrl_jax.orchestrate import tiny
from configs import tiny_rl
from launch.configuration import written
from launch.explain import algorithms
from tests.reference.batches import by_hand, lay_out

ROOT = pathlib.Path(__file__).parents[2]
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
RECIPES = list(algorithms(["all"]))


def launch(arguments, **environment):
  """The command's output; it must end well."""
  path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
  done = subprocess.run(
    [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600,
    env={**os.environ, **CACHE, "PYTHONPATH": path, **environment},
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  directory = tmp_path_factory.mktemp("tiny") / "model"
  directory.mkdir()
  tiny.tiny_llama(vocab_size=300, embed=32, layers=1, heads=2, kv_heads=1, ffw=64)(directory)
  return directory


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_three_steps(recipe, model, cache, tmp_path):
  launch(
    [
      "launch.train", "--config=config:tests.launch.smallest.smallest",
      f"--workdir={tmp_path}/run",
    ],
    AGENTRL_TINY=str(model), AGENTRL_RECIPE=recipe, JAX_COMPILATION_CACHE_DIR=cache,
  )  # fmt: skip
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  losses = [x["loss"] for x in map(json.loads, lines) if "loss" in x]
  assert len(losses) == 3
  assert all(abs(x) < 1e3 for x in losses)


@pytest.mark.slow
def test_the_entropy_moves_the_upper_clip_also_over_a_restart(model, cache, tmp_path):
  """A random model's entropy is far above the target: the clip narrows by a step a step."""
  command = ["launch.train", "--config=config:tests.launch.smallest.controlled"]
  for steps in ("2", "3"):
    launch(
      [*command, f"--workdir={tmp_path}/run"], AGENTRL_TINY=str(model), AGENTRL_RECIPE="ac2",
      AGENTRL_STEPS=steps, JAX_COMPILATION_CACHE_DIR=cache,
    )  # fmt: skip
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  clips = [json.loads(line)["clip_high"] for line in lines]
  assert clips == pytest.approx([0.34, 0.32, 0.30])


def documented() -> str:
  """The complete file that docs/losses.md shows."""
  found = re.search(
    r"```python\n(# my_loss\.py\n.*?)```", (ROOT / "docs/losses.md").read_text(), re.S
  )
  assert found
  return found.group(1)


def test_the_documented_loss_is_short():
  assert len(documented().splitlines()) <= 25


def test_the_documented_scale_halves_turns():
  """Of three tokens the first two are the first half; of four, two; one token is a first half."""
  found = re.search(r"```python\n(def HALF.*?)```", (ROOT / "docs/losses.md").read_text(), re.S)
  assert found
  names = {**vars(scales), "jnp": jnp}
  exec(found.group(1), names)
  made = lay_out([by_hand([-1, 0, 0, 0, -1, 1, 1, 1, 1, -1, 2], [0.0, 0.0, 1.0])])
  units = names["HALF"](made.batch)
  np.testing.assert_array_equal(units.ids, [[-1, 0, 0, 1, -1, 2, 2, 3, 3, -1, 4]])
  assert units.size == 2 * len(made.batch.turn_traj)


@pytest.mark.parametrize("algorithm", [recipes.grpo(), fdl.Config(functools.partial(recipes.grpo))])
def test_what_a_configuration_cannot_hold_is_said(algorithm):
  """Closures and partial applications have no name to be imported by."""
  config = tiny_rl()
  config.algorithm = algorithm
  with pytest.raises(ValueError, match="of a module's function, not what it returned"):
    written(types.SimpleNamespace(value=config))


def test_the_text_of_a_configuration_has_its_defaults():
  lines = written(types.SimpleNamespace(value=tiny_rl())).text.splitlines()
  assert "steps = 40" in lines
  assert "limits.seconds = 600.0  (default)" in lines
  assert "remat = save_everything  (default)" in lines
  assert "mesh = {}  (default)" in lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_loss_outside_the_repository_trains_with_one_command(model, cache, tmp_path):
  (tmp_path / "my_loss.py").write_text(documented())
  path = os.pathsep.join([str(ROOT), str(tmp_path)])
  launch(
    [
      "launch.train", "--config=config:my_loss.config", "--config=set:algorithm.strength=0.2",
      f'--config=set:model="{model}"', "--config=set:steps=2", "--config=set:engine.slots=16",
      "--config=set:batch.groups=2", "--config=set:batch.members=4",
      "--config=set:batch.only_mixed=False", "--config=set:evaluation.tasks=2",
      "--config=set:evaluation.samples=1", f"--workdir={tmp_path}/run",
    ],
    PYTHONPATH=path, JAX_COMPILATION_CACHE_DIR=cache,
  )  # fmt: skip
  config = (tmp_path / "run" / "config.json").read_text()
  assert "my_loss" in config and "0.2" in config
