#!/usr/bin/env bash
# datasets 5.2.0: split_dataset_by_node gives each rank its own shards of a streamed dataset, but a
# shuffle after it without a seed, which every rank draws for itself, shuffles the shards before they
# are divided, so ranks read the same examples, and others are read by none. With a seed, or with
# the shuffle of an ordinary Dataset's shard, the parts are disjoint.
# Seen: 2 ranks of 64 examples each in 8 shards: without a seed they read 80 to 112 different ones of
# the 128 in an epoch (in 1 of 20 runs all 128), with a seed always 128
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

from datasets import Dataset
from datasets.distributed import split_dataset_by_node

stream = Dataset.from_dict({"i": range(128)}).to_iterable_dataset(num_shards=8)


def num_read(seed):
    """Return how many of the 128 examples two ranks read together, each of them 64."""
    parts = [
        split_dataset_by_node(stream, rank, 2).shuffle(seed=seed, buffer_size=4) for rank in (0, 1)
    ]
    return len({example["i"] for part in parts for example in part})


unseeded, seeded = [num_read(None) for _ in range(20)], [num_read(seed) for seed in range(20)]
print(f"of 128 examples in one epoch of two ranks: without a seed {unseeded}, with {set(seeded)}")
sys.exit(set(seeded) != {128} or sum(unseeded) / 20 > 120)
PY
