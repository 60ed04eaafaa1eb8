"""Count the places at which the host waits for the device, in several kinds of runs.

    RANK=0 WORLD_SIZE=1 ... python host_reads_worker.py JOBS.json OUTPUT.json

A job is {name: flags of pretrain.py}. The output is {name: {place: number in a step}}.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

from tests.zerolm.train.host_reads import count_ours

STEPS = 4

torch.distributed.init_process_group("gloo")
deepspeed.init_distributed("gloo")
jobs = json.loads(Path(sys.argv[1]).read_text())
counts = {name: count_ours(flags, STEPS) for name, flags in jobs.items()}
found = {
    name: {" ".join(place): count / STEPS for place, count in places.items()}
    for name, places in counts.items()
}
Path(sys.argv[2]).write_text(json.dumps(found))
os._exit(0)
