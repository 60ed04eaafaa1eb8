#!/usr/bin/env bash
# Set up, then check and test everything; what CI runs.
#
#   bash tests/run.sh                          # everything
#   bash tests/run.sh tests/zerolm -k resume   # these words go to pytest
#
# Ends with the exit code of the first step that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

# DeepSpeed's operators are built once, here, whatever else this user runs. The lock of a build that
# was killed would make every rank of every later run wait for ever.
export TORCH_EXTENSIONS_DIR=$PWD/.cache/torch_extensions
mkdir -p "$TORCH_EXTENSIONS_DIR"
exec 9>.cache/tests.lock
if ! flock --nonblock 9; then
    echo "tests/run.sh: another one runs in this directory" >&2
    exit 1
fi
find "$TORCH_EXTENSIONS_DIR" -name lock -delete

# Offload to the CPU and Muon need these, three minutes of a core: built while the checks run.
DS_ACCELERATOR=cpu python -c 'from deepspeed.accelerator import get_accelerator as get
for name in "CPUAdamBuilder", "FusedAdamBuilder":
    get().create_op_builder(name).load()' >.cache/operators.log 2>&1 &
operators=$!
trap 'kill "$operators" 2>/dev/null || true' EXIT

# No test may need a network, an account, or all of a shared machine.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset WANDB_API_KEY

echo "== ruff"
ruff check
ruff format --check
echo "== mypy"
mypy
wait "$operators" || tail -n 20 .cache/operators.log >&2  # the tests that need it will say so too
trap - EXIT
echo "== pytest"
# Two processes, a file to each: half of the time the tests wait for timeouts and starts. In order of
# the files, so that those with the long tests come first and the short ones fill up.
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
