#!/usr/bin/env bash
# Makes the Python environment that everything else runs in; does nothing when it is already right.
#
# A stamp, written last, holds a hash of all that the environment is made from. Without the right stamp the
# folder is made anew from nothing, so an interrupted or outdated environment never passes for a whole one.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/environment.sh [--python=VERSION] [--dir=DIR] [--extra=NAME]

  --python=VERSION  3.11, 3.12 or 3.13; default: the newest of them that really runs here
  --dir=DIR         where to make it; default: .venv at the repository root
  --extra=NAME      cuda13 or tpu: jax for that accelerator on top of the pins; default: CPU
                    plan-tpu or plan-gpu: only its compiler, for launch.plan on any machine

Looks for Pythons on PATH, then among pyenv's versions ($PYENV_ROOT or ~/.pyenv). Uses uv if it runs, else
venv and pip. Anything else that was installed into DIR is lost when the pins change.
TEXT
}

say() { printf 'environment: %s\n' "$*"; }
fail() {
  printf 'environment: error: %s\n' "$*" >&2
  exit 1
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
dir=$root/.venv
wanted=
extra=
for argument in "$@"; do
  case $argument in
    --python=3.11 | --python=3.12 | --python=3.13) wanted=${argument#*=} ;;
    --python=*) fail "--python is '${argument#*=}', expected 3.11, 3.12 or 3.13" ;;
    --dir=?*) dir=$(realpath -m -- "${argument#*=}") ;;
    --extra=cuda13 | --extra=tpu | --extra=plan-tpu | --extra=plan-gpu) extra=${argument#*=} ;;
    --extra=*) fail "--extra is '${argument#*=}', expected cuda13, tpu, plan-tpu or plan-gpu" ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown argument '$argument'; see --help" ;;
  esac
done

# pyenv's shims exist for versions that are not active and only print an error, so a candidate counts when
# it has run and named its own version. Prints the program behind a shim or link.
run_as() { # PROGRAM VERSION
  local probe='import ssl, sys, venv; print("%d.%d" % sys.version_info[:2], sys.executable)' answer
  answer=$(timeout 20 "$1" -c "$probe" 2>/dev/null </dev/null) || return 1
  [[ ${answer%% *} == "$2" ]] && printf '%s\n' "${answer#* }"
}

candidates() { # VERSION -> one program a line, best first
  type -aP "python$1" || true
  type -aP python3 || true
  local versions=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
  [[ -d $versions ]] || return 0
  find "$versions" -maxdepth 1 -name "$1.*" | sort -rV | sed 's|$|/bin/python|'
}

find_python() { # sets `python` and `version`
  local tried="3.13 3.12 3.11"
  [[ -z $wanted ]] || tried=$wanted
  for version in $tried; do
    while IFS= read -r candidate; do
      if python=$(run_as "$candidate" "$version"); then return; fi
    done < <(candidates "$version")
  done
  fail "no Python ${tried// / or } that runs, on PATH or in pyenv; install one and run this again"
}

find_python
lock=$root/third_party/python/py312.txt
[[ $version != 3.11 ]] || lock=$root/third_party/python/py311.txt
identity=$(
  cat "$lock" "$root/setup.py" | sha256sum | cut -d' ' -f1
  printf '%s\n' "$version" "$extra" "$root"
)
stamp=$dir/.agentrl-stamp

complete() { [[ -f $stamp && $(<"$stamp") == "$identity" && -x $dir/bin/python ]]; }

describe() { say "$1 $dir with Python $version ($python)${extra:+, jax for $extra}"; }

if complete; then
  describe "using"
  exit 0
fi

# One writer at a time in this checkout (they share its egg-info); whoever waited finds the work done.
if command -v flock >/dev/null; then
  exec 9<"$root"
  flock -w 1800 9 || fail "waited 1800 s for another environment.sh of $root"
  if complete; then
    describe "using"
    exit 0
  fi
fi

# Only what this script made may be removed.
building=$dir/.agentrl-building
if [[ -e $dir && ! -f $stamp && ! -f $building ]]; then
  [[ -d $dir && -z $(ls -A -- "$dir") ]] || fail "$dir was not made by this script; move it or give --dir"
fi

step="starting"
finished=
clean_up() {
  [[ -z $finished ]] || return 0
  rm -rf -- "$dir"
  printf 'environment: error: failed while %s; %s was removed\n' "$step" "$dir" >&2
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

describe "making"
rm -rf -- "$dir"
mkdir -p -- "$dir"
: >"$building"
if timeout 20 uv --version >/dev/null 2>&1 </dev/null; then
  say "installing $(grep -c == "$lock") packages with uv"
  step="making a virtual environment with uv"
  uv venv --quiet --allow-existing --no-python-downloads --python "$python" "$dir"
  install() { uv pip install --quiet --python "$dir/bin/python" "$@"; }
else
  say "installing $(grep -c == "$lock") packages with pip (uv is not here, or does not run)"
  step="making a virtual environment (on Debian: apt-get install python$version-venv)"
  "$python" -m venv "$dir"
  install() {
    "$dir/bin/python" -m pip install -qq --no-compile --disable-pip-version-check --no-input "$@"
  }
fi
step="installing the packages of ${lock#"$root"/}"
install -r "$lock"
step="installing this repository"
install --no-deps --no-build-isolation -e "$root"
if [[ -n $extra ]]; then
  step="installing jax for $extra"
  jax=$("$dir/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))')
  case $extra in
    plan-gpu) install --no-deps "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" ;;
    *) install "jax[${extra#plan-}]==$jax" ;;
  esac
fi
step="importing jax and this package"
# Bytecode of the packages is kept even where PYTHONDONTWRITEBYTECODE is set: else every process compiles them anew.
(cd / && unset PYTHONDONTWRITEBYTECODE && "$dir/bin/python" -c 'import jax, agentrl_jax.orchestrate.sync_loop')
rm -f -- "$building"
printf '%s\n' "$identity" >"$stamp"
finished=yes
describe "made"
