"""Build an engine from each of some DeepSpeed JSONs, and write what came of it.

Usage: construction_worker.py CONFIGS.json FOUND.json

Reads {name: JSON}; writes {name: [error, rates of the first steps, their betas]}, in a world of
one process.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch


def main(configs: str, result: str) -> None:
    deepspeed.init_distributed("gloo")
    found = {}
    for name, config in json.loads(Path(configs).read_text()).items():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        rates: list[float] = []
        betas: list[list[float]] = []
        try:
            engine, *_ = deepspeed.initialize(
                model=model, config=config, model_parameters=list(model.parameters())
            )
            for _ in range(4):
                rates += [group["lr"] for group in engine.optimizer.param_groups][:1]
                betas += [group["betas"] for group in engine.optimizer.param_groups][:1]
                engine.backward(engine(torch.ones(1, 8)).sum())
                engine.step()
            found[name] = ["", rates, betas]
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}", rates, betas]
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
