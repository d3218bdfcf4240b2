#!/usr/bin/env bash
# Lints, type-checks and tests the repository in its own environment; makes that when it is absent.
# usage: bash launch/test.sh [PYTEST ARGUMENT ...]      e.g. -m soak, -k parse, tests/unit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
  --help | -h)
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

cd "$ROOT"
SECONDS=0
prepare_environment test smollm2 search plan
echo "== environment ready after ${SECONDS} s"

step() {
  local name=$1 code=0 start=$SECONDS
  shift
  echo "== $name"
  "$@" || code=$?
  if [ "$code" -ne 0 ]; then
    fail "$name failed with exit code $code after $((SECONDS - start)) s" "$code"
  fi
  echo "== $name passed in $((SECONDS - start)) s"
}

step 'ruff check' "$PYTHON" -m ruff check .
step 'mypy' "$PYTHON" -m mypy
step 'pytest' "$PYTHON" -m pytest "$@"
echo "== all passed in ${SECONDS} s"
