#!/usr/bin/env bash
# Trains, evaluates and reports one config on this machine. See usage() below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'TEXT'
usage: bash launch/local.sh [CONFIG] [--workdir=DIR] [--seeds=0,1,2] [--config.KEY=VALUE ...]

Trains, evaluates and reports one experiment on this machine. The first call makes .venv in the
repository root and installs the pinned versions there; later calls reuse it.

  CONFIG              config file (default configs/tiny.py); may carry a variant, FILE.py:VARIANT
  --workdir=DIR       where checkpoints, metrics.jsonl, results.json and report.html go
                      (default runs/<config name> in the repository root)
  --seeds=A,B,...     one run for each seed in <workdir>/seed_<n>, then a table of mean and range
  --config.KEY=VALUE  overrides one value of the config
  --help              this text

Any other argument goes to `python -m agentspec.train` unchanged. A config path is looked up from
the current directory, then from the repository root. The exit code is that of the first step that
failed.

Environment: AGENTSPEC_PYTHON (interpreter for .venv), AGENTSPEC_EXTRAS (further extras of
setup.py, comma separated, e.g. tpu), JAX_PLATFORMS (left alone: JAX picks the accelerator that is
installed), JAX_COMPILATION_CACHE_DIR (default .cache/jax in the repository root).
TEXT
}

config=configs/tiny.py
workdir=
seeds=
train_args=()     # everything but our own options, as given
override_args=()  # the --config.* among them, which evaluate needs as well

if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  config=$1
  shift
fi
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h)
      usage
      exit 0
      ;;
    --config=*) config=${1#*=} ;;
    --workdir=*) workdir=${1#*=} ;;
    --seeds=*) seeds=${1#*=} ;;
    --config | --workdir | --seeds)
      [ $# -gt 1 ] || fail "$1 needs a value" 2
      case $1 in
        --config) config=$2 ;;
        --workdir) workdir=$2 ;;
        --seeds) seeds=$2 ;;
      esac
      shift
      ;;
    --config.* | --noconfig.*)
      train_args+=("$1")
      override_args+=("$1")
      # `--config.a.b value`: the value is the next word.
      if [ "${1#*=}" = "$1" ] && [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then
        train_args+=("$2")
        override_args+=("$2")
        shift
      fi
      ;;
    *) train_args+=("$1") ;;
  esac
  shift
done

file=${config%%:*}
variant=${config#"$file"}
if [ -f "$file" ]; then
  file=$(cd "$(dirname "$file")" && pwd)/$(basename "$file")
elif [ -f "$ROOT/$file" ]; then
  file=$ROOT/$file
else
  fail "no config file $file in $PWD or $ROOT" 2
fi
config=$file$variant
name=$(basename "$file" .py)
workdir=${workdir:-$ROOT/runs/$name}
case $seeds in
  *[!0-9,]* | ,* | *, | *,,*) fail "--seeds=$seeds: whole numbers with commas are wanted" 2 ;;
esac
if [ -n "$seeds" ]; then
  for argument in ${override_args[@]+"${override_args[@]}"}; do
    case $argument in
      --config.seed | --config.seed=*) fail "give either --seeds or $argument, not both" 2 ;;
    esac
  done
fi

extras=()
case $name in
  hotpot_smollm2) extras+=(search smollm2) ;;
  hotpot*) extras+=(search) ;;
esac
if [ -n "${AGENTSPEC_EXTRAS:-}" ]; then
  IFS=, read -r -a more <<<"$AGENTSPEC_EXTRAS"
  extras+=("${more[@]}")
fi
prepare_environment ${extras[@]+"${extras[@]}"}

export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$ROOT/.cache/jax}
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

# module NAME ARGUMENT...: -P keeps files of the current directory from shadowing modules.
module() {
  local name=$1
  shift
  "$PYTHON" -P -m "agentspec.$name" "$@"
}

# run_once DIR ARGUMENT...: the three steps; further arguments come after the user's own.
run_once() {
  local dir=$1
  shift
  module train --config="$config" --workdir="$dir" ${train_args[@]+"${train_args[@]}"} "$@"
  module evaluate --config="$config" --workdir="$dir" \
    ${override_args[@]+"${override_args[@]}"} "$@"
  module report --workdir="$dir"
}

if [ -z "$seeds" ]; then
  run_once "$workdir"
else
  report_args=()
  IFS=, read -r -a seed_list <<<"$seeds"
  for seed in "${seed_list[@]}"; do
    echo "== seed $seed"
    run_once "$workdir/seed_$seed" --config.seed="$seed"
    report_args+=(--workdir="$workdir/seed_$seed")
  done
  module report "${report_args[@]}" --out="$workdir/report.html"
fi
