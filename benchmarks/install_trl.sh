#!/usr/bin/env bash
# Makes the environment that benchmarks/train_step.py and train_step_smollm2.py compare with: TRL 1.16.0 on CPU torch 2.13.0.
# Usage: bash benchmarks/install_trl.sh [DIRECTORY, default .venv-trl]; PYTHON names a Python 3.11.
set -euo pipefail
directory=${1:-.venv-trl}
python=${PYTHON:-python3.11}
"$python" -c 'import sys; assert sys.version_info[:2] == (3, 11), sys.version' ||
  { echo "install_trl.sh: $python is not Python 3.11; set PYTHON to one" >&2; exit 1; }
"$python" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
# torch first and alone: what trl asks for would draw in a CUDA build. --no-deps for the same reason.
pip torch==2.13.0 numpy==2.4.6
pip transformers==5.19.0 accelerate==1.15.0 datasets==5.2.0
pip --no-deps trl==1.16.0
"$directory/bin/python" -c 'import torch, trl; print("trl", trl.__version__, "torch", torch.__version__)'
