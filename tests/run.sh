#!/usr/bin/env bash
# Set up, then check and test everything; what CI runs.
#
#   bash tests/run.sh                          # everything
#   bash tests/run.sh tests/zerolm -k resume   # arguments for pytest
#
# Exits with the code of the first step that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"

export TORCH_EXTENSIONS_DIR=$PWD/.venv/torch_extensions
mkdir -p "$TORCH_EXTENSIONS_DIR" .cache
exec 9>.cache/tests.lock
if ! flock --nonblock 9; then
    echo "tests/run.sh: another test run is using this directory" >&2
    exit 1
fi

# CPU offload needs this operator. Building takes two minutes, during the checks below.
DS_ACCELERATOR=cpu python -c 'from deepspeed.accelerator import get_accelerator as get
from zerolm.engine.operators import guard_builds
guard_builds(print)
get().create_op_builder("CPUAdamBuilder").load()' >.cache/operators.log 2>&1 &
operators=$!
trap 'kill "$operators" 2>/dev/null || true' EXIT

# No test may use the network, an account, or all cores of a shared machine.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset WANDB_API_KEY PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same files

# Of a checkout the files that git tracks; a stray one is not checked.
of_project() {
    python -c 'import sys; from tests import tracked; print(*tracked(*sys.argv[1:]), sep="\n")' "$@"
}
mapfile -t sources < <(of_project '**/*.py')
mapfile -t typed < <(of_project pretrain.py {zerolm,data_prep,launch}'/**/*.py')
echo "== ruff"
ruff check "${sources[@]}"
ruff format --check "${sources[@]}"
if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "== mypy"
    mypy "${typed[@]}"
else
    echo "== mypy: skipped, numpy 2.2, the last for Python 3.10, declares shapes of arrays otherwise"
fi
wait "$operators" || tail -n 20 .cache/operators.log >&2  # the tests that need it will fail, too
trap - EXIT
echo "== pytest"
# Two processes, one test file each: half of the time, tests wait for timeouts and for processes to
# start. Files stay in order, so that those with long tests start first and short ones fill the gaps.
exec python -m pytest --durations 10 --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
