#!/usr/bin/env bash
# mosaicml-streaming 0.13.0, torch 2.14.1: with epoch_size below the size of the data set and
# shuffle=False, the shards at the end are never read, in no epoch, and some at the front in every
# one: the choice of each epoch goes through the shards in order and stops at epoch_size. With
# shuffle=True every sample is read about as often.
# Seen: 20 samples, epoch_size 10, 40 epochs: in order 6 samples never and 6 in all; shuffled 0, 0
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.14.1 torchvision==0.29.1 numpy==2.1.3 \
    mosaicml-streaming==0.13.0
cat >"$folder/read.py" <<'PY'
import collections
import sys

from streaming import MDSWriter, StreamingDataset

if __name__ == "__main__":
    with MDSWriter(out=sys.argv[1], columns={"i": "int"}, size_limit=200) as writer:
        for i in range(20):
            writer.write({"i": i})
    found = []
    for shuffle in (False, True):
        counts = collections.Counter()
        samples = StreamingDataset(local=sys.argv[1], batch_size=2, shuffle=shuffle, epoch_size=10)
        for _ in range(40):
            counts.update(sample["i"] for sample in samples)
        never, always = set(range(20)) - set(counts), [i for i in counts if counts[i] == 40]
        found.append((len(never), len(always)))
        print(f"shuffle {shuffle}: never {sorted(never)}, in all epochs {sorted(always)}")
    sys.exit(not (found[0][0] > 3 and found[0][1] > 3) or found[1] != (0, 0))
PY
"$folder/venv/bin/python" -W ignore "$folder/read.py" "$folder/set" 2>/dev/null
