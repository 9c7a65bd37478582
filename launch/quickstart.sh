#!/usr/bin/env bash
# From a clean clone to a language model that has learned something, in one command.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/quickstart.sh [--engine=embedded|sglang] [--workdir=DIR] [flags of launch.train]

Makes the environment, fetches SmolLM2-135M-Instruct, trains it with GRPO on word problems with a calculator, and
says what changed: finishing, reliability, reach. Minutes on two quiet CPU cores; run again, it goes on
where it stopped, or returns at once when all is done.

  --engine=embedded  rollouts from the JAX sampler in the trainer's process (default)
  --engine=sglang    rollouts from a real SGLang server, to which weights are pushed after every step
  --workdir=DIR      the run's files; default runs/quickstart or runs/quickstart-sglang

  bash launch/quickstart.sh --config=set:steps=5 --config=set:algorithm.high=0.3
TEXT
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
engine=embedded
workdir=
rest=()
for argument in "$@"; do
  case $argument in
    -h | --help)
      usage
      exit 0
      ;;
    --engine=embedded | --engine=sglang) engine=${argument#*=} ;;
    --engine=*)
      echo "quickstart: --engine is '${argument#*=}', expected embedded or sglang" >&2
      exit 2
      ;;
    --workdir=?*) workdir=${argument#*=} ;;
    --*=* | --show) rest+=("$argument") ;;
    *)
      echo "quickstart: unexpected argument '$argument'; see --help" >&2
      exit 2
      ;;
  esac
done

bash launch/environment.sh
config=(--config=config:quickstart)
if [[ $engine == sglang ]]; then
  bash third_party/sglang/install.sh
  config+=(--config=fiddler:use_sglang)
  workdir=${workdir:-runs/quickstart-sglang}
fi
.venv/bin/python -m launch.fetch_model
exec .venv/bin/python -m launch.train "${config[@]}" --workdir="${workdir:-runs/quickstart}" "${rest[@]}"
