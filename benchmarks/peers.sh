#!/usr/bin/env bash
# Create a virtual environment with what benchmarks.tokenize_speed and stream_speed compare with.
# It also sees the packages of the Python that runs this script. litdata and mosaicml-streaming are
# installed without their dependencies, which include CUDA libraries and another torch.
#     bash benchmarks/peers.sh .venv-peers
set -euo pipefail
target=${1:?"usage: bash benchmarks/peers.sh DIRECTORY"}
packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
python -m venv "$target"
own=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$packages" > "$own/main.pth"
"$target/bin/python" -m pip install -q --no-deps \
    litdata==0.2.76 lightning-utilities tifffile obstore loguru
"$target/bin/python" -m pip install -q --no-deps \
    mosaicml-streaming==0.13.0 zstd Brotli python-snappy cramjam paramiko pybind11
"$target/bin/python" -c 'import datatrove' 2>/dev/null ||
    "$target/bin/python" -m pip install -q --no-deps datatrove==0.10.1 dill multiprocess humanize loguru
"$target/bin/python" -c 'import datatrove, litdata; print("ready")'
