#!/usr/bin/env bash
# datasets 5.2.0: the state of a streamed dataset contains its epoch, but load_state_dict does not set
# it, and a state of another epoch than the dataset's (0 when it is new) is left aside without a
# message, so a run that resumes in epoch 3 reads all of epoch 0 again, unless it calls
# set_epoch(3) itself.
# Seen: epoch 3: 5 2, saved, then 4 1 0 3; resumed: 3 2 5 4 0 1 (epoch 0: 3 2 5 4 0 1); resumed with
# set_epoch: 4 1 0 3
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

from datasets import Dataset


def shuffled():
    stream = Dataset.from_dict({"i": range(6)}).to_iterable_dataset()
    return stream.shuffle(seed=0, buffer_size=6)


def numbers(stream):
    return [example["i"] for example in stream]


stream = shuffled()
epoch_0 = numbers(stream)
stream.set_epoch(3)
running = iter(stream)
seen = [next(running)["i"] for _ in range(2)]
state = stream.state_dict()
rest = numbers(running)
resumed = shuffled()
resumed.load_state_dict(state)
found = numbers(resumed)
resumed = shuffled()
resumed.set_epoch(state["epoch"])
resumed.load_state_dict(state)
told = numbers(resumed)
print(f"epoch {state['epoch']}: {seen}, saved, then {rest}; resumed: {found};", end=" ")
print(f"epoch 0: {epoch_0}; resumed with set_epoch: {told}")
sys.exit(found != epoch_0 or told != rest)
PY
