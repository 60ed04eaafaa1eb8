#!/usr/bin/env bash
# torch 2.13.0 with tensorboard 2.21.0: SummaryWriter.add_scalar keeps a value as float32, so counts
# above 2**24 are rounded: a curve of token counts is off by up to 128 at 3 billion. Steps are 64-bit
# integers.
# Seen: 16777217 became 16777216, 3000000100 became 3000000000; step 1099511627776 kept
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 tensorboard==2.21.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

counts = (16_777_217, 3_000_000_100)
writer = SummaryWriter(sys.argv[1])
for step, count in zip((1, 2**40), counts, strict=True):
    writer.add_scalar("tokens", count, step)
writer.close()
events = EventAccumulator(sys.argv[1])
events.Reload()
read = [(event.step, int(event.value)) for event in events.Scalars("tokens")]
for count, (step, value) in zip(counts, read, strict=True):
    print(f"{count} became {value} at step {step}")
sys.exit(read != [(1, 16_777_216), (2**40, 3_000_000_000)])
PY
