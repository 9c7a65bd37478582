#!/usr/bin/env bash
# Installs all that the tests need and runs them; without pytest arguments, all but the slow ones.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/test.sh [--python=VERSION] [pytest arguments]

  bash launch/test.sh                          the whole suite, real SGLang server and real model included
  bash launch/test.sh tests/losses -x          some of it
  bash launch/test.sh -m "not sglang"          without the server
  bash launch/test.sh --python=3.11            with another Python (3.11, 3.12 or 3.13), in its own .venv-VERSION

SGLang or the model that cannot be installed is an error where CI is set; elsewhere their tests are skipped.
TEXT
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
venv=.venv
environment=()
case ${1-} in
  -h | --help)
    usage
    exit 0
    ;;
  --python=*)
    venv=.venv-${1#*=}
    environment=("$1" "--dir=$venv")
    shift
    ;;
esac
[[ $# -gt 0 ]] || set -- -m "not slow" --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

need() { # WHAT COMMAND...
  local what=$1
  shift
  if "$@"; then return; fi
  if [[ -n ${CI-} ]]; then
    echo "test: error: $what could not be made" >&2
    exit 1
  fi
  echo "test: $what could not be made; the tests that need it will be skipped" >&2
}

bash launch/environment.sh "${environment[@]}"
need "the SGLang environment" bash third_party/sglang/install.sh
need "the model" "$venv/bin/python" -m launch.fetch_model
export HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # many tests start processes, and each would compile all that it imports
exec "$venv/bin/python" -m pytest "$@"
