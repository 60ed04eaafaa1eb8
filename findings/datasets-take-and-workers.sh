#!/usr/bin/env bash
# datasets 5.2.0, torch 2.13.0: which examples take(n) and skip(n) of a streamed dataset mean depends
# on the DataLoader's workers (and on the number of ranks after split_dataset_by_node), as the n is
# divided among the shards' readers. A held-out part take(6) that is read without workers is partly
# trained on by the rest, skip(6), read with two, and other examples are in neither.
# Seen: take(6): 0 1 2 3 4 5; skip(6) with two workers: 3 7 8 9; in both: 3; in neither: 6
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 torch==2.13.0 numpy==2.2.6
cat >"$folder/split.py" <<'PY'
import sys

from datasets import Dataset
from torch.utils.data import DataLoader


def read(stream, num_workers):
    return {example["i"] for example in DataLoader(stream, None, num_workers=num_workers)}


if __name__ == "__main__":
    stream = Dataset.from_dict({"i": range(10)}).to_iterable_dataset(num_shards=3)
    held_out, trained = read(stream.take(6), 0), read(stream.skip(6), 2)
    both, neither = held_out & trained, set(range(10)) - held_out - trained
    print(f"held out {sorted(held_out)}, trained on {sorted(trained)};", end=" ")
    print(f"in both {sorted(both)}, in neither {sorted(neither)}")
    sys.exit(not (both and neither))
PY
"$folder/venv/bin/python" "$folder/split.py" 2>/dev/null
