#!/usr/bin/env bash
# Makes the environment that benchmarks/train_step.py compares with: google-tunix 0.1.7 on CPU jax 0.12.0.1.
# Usage: bash benchmarks/install_tunix.sh [DIRECTORY, default .venv-tunix]; PYTHON names a Python 3.12 or 3.13.
set -euo pipefail
directory=${1:-.venv-tunix}
python=${PYTHON:-python3.12}
"$python" -c 'import sys; assert sys.version_info[:2] in ((3, 12), (3, 13)), sys.version' ||
  { echo "install_tunix.sh: $python is not Python 3.12 or 3.13; set PYTHON to one" >&2; exit 1; }
"$python" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
pip jax==0.12.0.1 jaxlib==0.12.0.1 flax==0.12.12 optax==0.2.8 orbax-checkpoint==0.12.8 qwix==0.1.8 google-tunix==0.1.7
"$directory/bin/python" -c 'import importlib.metadata as m, jax, tunix; print("tunix", m.version("google-tunix"), "jax", jax.__version__)'
