"""One small supervised model and one undisturbed run from it, for all tests of training."""

import pytest

from tests.launch.commands import run
from tests.launch.small_runs import command


@pytest.fixture(scope="session")
def places(tmp_path_factory):
  """What the configuration above reads from the environment, and a shared compilation cache."""
  root = tmp_path_factory.mktemp("train")
  environment = {
    "AGENTRL_TEST_MODEL": str(root / "model"),
    "AGENTRL_TEST_DATA": str(root / "tasks"),
    "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  config = "--config=config:tests.launch.small_runs.supervised"
  code, output = run(["launch.sft", config, f"--workdir={root}/sft"], **environment)
  assert code == 0, output[-3000:]
  (root / "sft" / "model").rename(root / "model")
  return environment


@pytest.fixture(scope="session")
def whole(places, tmp_path_factory):
  """The work directory of a run that nothing disturbed, and what it printed."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  code, output = run(command(workdir), **places)
  assert code == 0, output[-3000:]
  return workdir, output
