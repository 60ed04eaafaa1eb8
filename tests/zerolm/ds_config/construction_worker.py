"""Build an engine from each of some DeepSpeed JSONs, and print what came of it.

    python -m tests.zerolm.ds_config.construction_worker < configs.json

Reads {name: JSON}; writes {name: [error, rates of the first steps]}, in a world of one process.
"""

import contextlib
import json
import os
import sys


def main() -> None:
    import deepspeed
    import torch

    configs, found = json.load(sys.stdin), {}
    with contextlib.redirect_stdout(sys.stderr):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = sys.argv[1]
        deepspeed.init_distributed("gloo")
        for name, config in configs.items():
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            rates: list[float] = []
            try:
                engine, *_ = deepspeed.initialize(
                    model=model, config=config, model_parameters=list(model.parameters())
                )
                for _ in range(4):
                    rates += [group["lr"] for group in engine.optimizer.param_groups][:1]
                    engine.backward(engine(torch.ones(1, 8)).sum())
                    engine.step()
                found[name] = ["", rates]
            except Exception as error:
                found[name] = [f"{type(error).__name__}: {error}", rates]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
