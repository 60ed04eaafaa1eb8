#!/usr/bin/env bash
# Create or reuse .venv in the repository root, with the versions of constraints.txt.
#
#   bash launch/setup.sh                     # finds Python 3.10 or newer
#   PYTHON=python3.12 bash launch/setup.sh   # uses this interpreter
#
# To keep a torch that the machine already has (in a GPU image, for example), create .venv first:
#   python3 -m venv --system-site-packages .venv && bash launch/setup.sh
# Otherwise pip's own settings decide which build of torch is installed (CUDA or CPU).
#
# launch/demo.sh and tests/run.sh call this script; it does nothing if nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp=$venv/.zerolm-setup

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Hash of everything that .venv depends on, its path included: scripts in .venv/bin contain it.
expected_stamp() {
    local config=none
    [[ -f $venv/pyvenv.cfg ]] && config=$(grep -E '^(version|include-system)' $venv/pyvenv.cfg)
    {
        cat setup.cfg pyproject.toml constraints.txt launch/setup.sh
        printf '%s\n' "$PWD" "$config"
    } | sha256sum | cut -d ' ' -f 1
}

is_done() {
    [[ -x $venv/bin/python && -f $stamp && $(<$stamp) == "$(expected_stamp)" ]]
}

find_python() {
    local candidate rejected=()
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.11 python3.10; do
        if ! "$candidate" -c '' 2>/dev/null; then
            [[ $candidate != "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON does not run."
            continue
        elif ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            rejected+=("$candidate is older than 3.10")
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            rejected+=("$candidate has no venv module: apt-get install python3-venv")
        else
            echo "$candidate"
            return
        fi
        [[ $candidate != "${PYTHON:-}" ]] || break
    done
    fail "needs Python 3.10 or newer with the venv module." "${rejected[@]:-no python3 was found}"
}

stage() {
    printf 'setup: %s ...' "$1"
    local start=$SECONDS
    shift
    if ! "$@" >.cache/setup.log 2>&1; then
        printf ' failed\n\n'
        tail -n 30 .cache/setup.log >&2
        fail "the command was: $*" "its complete output is in .cache/setup.log"
    fi
    printf ' %d s\n' $((SECONDS - start))
}

pip_install() {
    $venv/bin/python -m pip install --disable-pip-version-check "$@"
}

make_environment() {
    local python
    python=$(find_python)
    stage "create $venv with $("$python" --version)" "$python" -m venv --clear $venv
}

# Print the version of a torch outside of .venv that is importable from inside, if there is one.
system_torch() {
    $venv/bin/python - <<'PYTHON'
import importlib.metadata
import sys

try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
if not str(torch.locate_file("")).startswith(sys.prefix):
    print(torch.version)
PYTHON
}

# False if .venv was copied or moved here, or its Python is gone, which pip cannot repair.
venv_works() {
    [[ -x $venv/bin/python ]] &&
        $venv/bin/python -c 'import sys; sys.exit(sys.prefix != sys.argv[1])' "$PWD/$venv" \
            2>/dev/null
}

command -v flock >/dev/null || fail "needs flock: apt-get install util-linux"
mkdir -p .cache
is_done && exit 0

exec 9>.cache/setup.lock
if ! flock --nonblock 9; then
    echo "setup: waiting for another setup in this directory"
    flock 9
fi
is_done && exit 0

command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    fail "needs a C++ compiler, to build DeepSpeed's operators: apt-get install g++"
venv_works || make_environment
$venv/bin/python -c 'import pip' 2>/dev/null ||
    stage "install pip" $venv/bin/python -m ensurepip

constraints=constraints.txt
torch=$(grep '^torch==' constraints.txt)
existing=$(system_torch)
if [[ -n $existing ]]; then
    echo "setup: keeping the machine's torch $existing"
    constraints=.cache/constraints.txt
    torch=torch==$existing
    { grep -v '^torch==' constraints.txt && echo "$torch"; } >$constraints
fi

# torch first: DeepSpeed's build imports it. DS_BUILD_OPS=0: operators are built on first use.
export DS_BUILD_OPS=0 PIP_NO_INPUT=1
stage "install $torch" pip_install "$torch" -c $constraints
stage "install build tools" pip_install setuptools wheel ninja numpy -c $constraints
stage "install $(grep '^deepspeed==' constraints.txt)" \
    pip_install --no-build-isolation deepspeed -c $constraints
stage "install zerolm and the rest" pip_install --no-build-isolation -e '.[dev]' -c $constraints

# Ranks on the CPUs of one machine communicate through a DeepSpeed operator. Compile it now, so that
# the first run need not wait. A killed build leaves a lock, which would make later builds wait.
include=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [[ -f $include/Python.h ]]; then
    export TORCH_EXTENSIONS_DIR=$PWD/.cache/torch_extensions DS_ACCELERATOR=cpu
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    find "$TORCH_EXTENSIONS_DIR" -name lock -delete
    PATH="$PWD/$venv/bin:$PATH" stage "build DeepSpeed's operator for communication on CPUs" \
        $venv/bin/python -c 'from deepspeed.accelerator import get_accelerator as get
get().create_op_builder("ShareMemCommBuilder").load()'
else
    echo "setup: note: no $include/Python.h: profiles that offload to the CPU need it" \
        "to compile their optimizer (apt-get install python3-dev)"
fi

expected_stamp >$stamp
echo "setup: done"
