#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.13.0: a StatefulDataLoader that resumes in the middle of an epoch has the
# rest of that epoch right, but without workers the next epochs are shuffled otherwise than in the
# run that was not interrupted, although the generator's state is in the checkpoint. With workers
# they are the same.
# Seen: no workers: rest of epoch 1 same True, epoch 2 same False; two workers: True, True
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torchdata==0.11.0 torch==2.13.0 numpy==2.2.6
cat >"$folder/resume.py" <<'PY'
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(num_workers):
    generator = torch.Generator().manual_seed(0)
    options = {"shuffle": True, "num_workers": num_workers, "generator": generator}
    return StatefulDataLoader(list(range(64)), batch_size=4, **options)


def numbers(batches):
    return [number for batch in batches for number in batch.tolist()]


def compare(num_workers):
    whole, resumed = loader(num_workers), loader(num_workers)
    epoch = iter(whole)
    for _ in range(3):
        next(epoch)
    state = whole.state_dict()
    rest, second = numbers(epoch), numbers(whole)
    resumed.load_state_dict(state)
    return numbers(resumed) == rest, numbers(resumed) == second


if __name__ == "__main__":
    found = [compare(0), compare(2)]
    print(f"rest of epoch 1, and epoch 2, as uninterrupted: no workers {found[0]}, two {found[1]}")
    sys.exit(found != [(True, False), (True, True)])
PY
"$folder/venv/bin/python" -W ignore "$folder/resume.py"
