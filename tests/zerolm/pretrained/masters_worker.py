"""Compare the master weights of fresh engines with `MODEL`: `masters_worker.py MODEL JOBS.json`.

Rank 0 prints, for each job (flags of pretrain.py), the number of parameters whose masters differ
from the float32 values of the model, and of weights that differ from the rounded ones.
"""

import json
import os
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param
from transformers import AutoModelForCausalLM

from zerolm.distributed import collectives, process_group
from zerolm.engine.parameters import gathered
from zerolm.preflight import check
from zerolm.train.engine_building import build_engine


def main(model: str, path: str) -> None:
    rank, _, device = process_group.init()
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for flags in json.loads(Path(path).read_text()):
        plan = check.check([str(flag) for flag in flags], environment)
        engine = build_engine(plan, [], device, lambda *_: None)
        masters = weights = 0
        for name, parameter in engine.module.named_parameters():
            value = expected.get_parameter(name).detach()
            masters += not torch.equal(safe_get_full_fp32_param(parameter).cpu(), value)
            with gathered([parameter]):
                held = parameter.detach().cpu()
                weights += not torch.equal(held, value.to(held.dtype))
        collectives.print_rank0(rank, json.dumps([masters, weights, str(held.dtype)]))
        engine.destroy()
    process_group.destroy()
    process_group.exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
