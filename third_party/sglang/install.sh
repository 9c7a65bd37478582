#!/usr/bin/env bash
# Installs SGLang into its own Python 3.11 environment, apart from the trainer's.
#
#   bash third_party/sglang/install.sh [DIRECTORY]     default: .venv-sglang at the repository root
#
# With CUDA (nvidia-smi answers): stock sglang[all]. Without: the pinned set of lock.txt, installed without
# its CUDA dependencies, and the package cpu_adapter/. Running it again is instant while nothing changed. A
# stamp is written last; whatever fails or is interrupted before that is removed.
set -euo pipefail

SGLANG_VERSION=0.5.23
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:-$(cd "$here/../.." && pwd)/.venv-sglang}
case $target in /*) ;; *) target=$PWD/$target ;; esac

fail() {
  echo "sglang install: $*" >&2
  exit 1
}

# Three tries, since package indexes fail now and then; what was downloaded is cached in between.
retry() {
  local try
  for try in 1 2 3; do
    if "$@"; then return 0; fi
    if [ "$try" -lt 3 ]; then
      echo "sglang install: try $try of 3 failed, again in $((10 * try)) s" >&2
      sleep $((10 * try))
    fi
  done
  return 1
}

# The first interpreter that really runs and is 3.11: a pyenv shim on PATH may be a name without one behind.
find_python311() {
  local candidate
  for candidate in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3.11 python3 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' \
      2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then kind=cuda; else kind=cpu; fi
stamp=$target/agentrl-stamp
want="$kind $SGLANG_VERSION $(cat "$here/lock.txt" "$here/install.sh" \
  $(find "$here/cpu_adapter" -type f \( -name '*.py' -o -name '*.toml' -o -name '*.pth' \) | LC_ALL=C sort) |
  sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$target/bin/python" -c '' 2>/dev/null; then
  echo "sglang install: $target is up to date ($kind)"
  exit 0
fi

python=$(find_python311) || fail "no Python 3.11 with venv found on PATH or among pyenv's versions"
# Only what this script made may be removed.
building=$target/agentrl-building
if [ -e "$target" ] && [ ! -f "$stamp" ] && [ ! -f "$building" ]; then
  [ -z "$(ls -A "$target")" ] || fail "$target was not made by this script; move it or name another directory"
fi
trap '[ -f "$stamp" ] || rm -rf "$target"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "sglang install: making $target ($kind) with $("$python" --version), a few minutes"
rm -rf "$target"
mkdir -p "$target"
: >"$building"
"$python" -m venv "$target" || fail "$python could not make a virtual environment in $target"
# pip and not uv: only pip's index finds the CPU build of torch pinned here. Bytecode is made by the check.
pip=("$target/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
if [ "$kind" = cuda ]; then
  retry "${pip[@]}" "sglang[all]==$SGLANG_VERSION" || fail "pip could not install sglang $SGLANG_VERSION"
  check='import sglang, torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
else
  retry "${pip[@]}" --no-deps -r "$here/lock.txt" || fail "pip could not install lock.txt"
  retry "${pip[@]}" --no-deps "$here/cpu_adapter" || fail "pip could not install cpu_adapter"
  check='import sglang, torch, torchvision, transformers; from sgl_kernel import silu_and_mul'
fi
# The check imports what a server does, and keeps the bytecode even where PYTHONDONTWRITEBYTECODE is set: a server
# is three processes, and each would compile 6,000 files at every start.
check="import logging; logging.disable(logging.WARNING); $check"
check+='; import sglang.srt.entrypoints.http_server, sglang.srt.models.registry'
(cd / && unset PYTHONDONTWRITEBYTECODE && "$target/bin/python" -W ignore -c "$check") || fail "the installed packages do not import (see above)"
rm "$building"
echo "$want" >"$stamp"
echo "sglang install: $target is ready ($kind)"
