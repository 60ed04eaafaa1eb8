#!/usr/bin/env bash
# Create or extend .venv in the repository root, with the versions of constraints.txt.
#
#   bash launch/setup.sh                     # to train, and to prepare data; finds Python 3.10 to 3.14
#   bash launch/setup.sh pipeline dedup      # with more extras of setup.cfg; dev has what tests need
#   PYTHON=python3.12 bash launch/setup.sh   # uses this interpreter
#
# ZEROLM_TORCH=VERSION chooses the build of torch, ZEROLM_TORCH_INDEX=URL adds an index for it, and
# `python3 -m venv --system-site-packages .venv` beforehand keeps the torch of a GPU image
# (docs/installation.md). launch/demo.sh and tests/run.sh call this script; it does nothing if
# nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp=$venv/.zerolm-setup # a hash, then the extras, then the version of torch

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Hash of everything that .venv depends on, its path included: scripts in .venv/bin contain it.
expected_hash() {
    {
        cat setup.cfg pyproject.toml constraints.txt launch/setup.sh launch/install.py
        echo "$PWD"
        grep -E '^(version|include-system)' $venv/pyvenv.cfg
    } | sha256sum | cut -d ' ' -f 1
}

# True if .venv has these extras and the torch that is wanted, and nothing has changed.
is_done() {
    local hash extras torch extra
    [[ -x $venv/bin/python && -f $stamp ]] || return 1
    { read -r hash && read -r extras && read -r torch; } <$stamp || return 1
    [[ $hash == "$(expected_hash)" && ${ZEROLM_TORCH:-$torch} == "$torch" ]] || return 1
    [[ -z ${ZEROLM_TORCH_INDEX:-} || $torch == *+* ]] || return 1 # it may have a CPU build
    for extra in "$@"; do
        [[ " $extras " == *" $extra "* ]] || return 1
    done
}

make_environment() {
    local python why="no python3 was found"
    local candidates=(python3 python3.12 python3.13 python3.14 python3.11 python3.10)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        "$python" -c '' 2>/dev/null || continue
        why="$python is older, or has no venv module: apt-get install python3-venv"
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
            2>/dev/null || continue
        echo "setup: create $venv with $("$python" --version)"
        "$python" -m venv --clear $venv || fail "$python -m venv failed"
        return
    done
    [[ -z ${PYTHON:-} || $why != no* ]] || fail "PYTHON=$PYTHON does not run."
    fail "needs Python 3.10 or newer with the venv module." "$why"
}

command -v flock >/dev/null || fail "needs flock: apt-get install util-linux"
mkdir -p .cache
exec 9>.cache/setup.lock
if ! is_done "$@" && ! flock --nonblock 9; then
    echo "setup: waiting for another setup in this directory"
    flock 9
fi
is_done "$@" && exit 0

command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    fail "needs a C++ compiler, to build DeepSpeed's operators: apt-get install g++"
# A .venv that was copied or moved here, or whose Python is gone, cannot be repaired by pip.
$venv/bin/python -c 'import sys; sys.exit(sys.prefix != sys.argv[1])' "$PWD/$venv" 2>/dev/null ||
    make_environment
$venv/bin/python -c 'import pip' 2>/dev/null || $venv/bin/python -m ensurepip ||
    fail "$venv/bin/python -m ensurepip failed"

# A .venv that has more extras keeps them.
extras=()
[[ ! -f $stamp ]] || read -r -a extras < <(sed -n 2p $stamp)
mapfile -t extras < <(printf '%s\n' "${extras[@]}" "$@" | sort -u | grep .)
$venv/bin/python -I launch/install.py "${extras[@]}"
{
    expected_hash
    echo "${extras[*]}"
    $venv/bin/python -c 'import importlib.metadata; print(importlib.metadata.version("torch"))'
} >$stamp.new
mv $stamp.new $stamp
echo "setup: done"
