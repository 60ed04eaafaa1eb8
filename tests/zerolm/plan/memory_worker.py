"""One rank: builds DeepSpeed engines in turn, trains two steps, and counts the bytes each keeps.

Writes `{name: {component: bytes}}` of the rank with the most to the given file. The peak is after a
micro-batch of the second step, when the optimizer has its states.
"""

import gc
import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch._dynamo  # before zero.Init, as in pretrain.py
from torch import distributed

from tests.zerolm.plan.memory_cases import MODELS, SEQ_LEN, VOCABULARY, cases
from zerolm.engine.states import model_state_bytes
from zerolm.model.build import build_model
from zerolm.optim.parameter_groups import parameter_groups


def measure(model_name: str, ds: dict) -> dict[str, int]:
    """Train two steps and return the most bytes by component."""
    stage = ds["zero_optimization"]["stage"]
    precision = torch.bfloat16 if "bf16" in ds else torch.float32
    model = build_model(
        MODELS[model_name],
        seed=0,
        dtype=precision,
        zero3_config=ds if stage == 3 else None,
        attn_implementation="sdpa",
        gradient_checkpointing=False,
        device=torch.device("cpu"),
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, 0.1), config=ds
    )
    most: dict[str, int] = {}
    accumulation = ds["gradient_accumulation_steps"]
    for step in range(2):
        for micro in range(accumulation):
            engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
            ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            del loss
            if step == 1:
                found = model_state_bytes(engine)
                copies = [getattr(one, "ds_secondary_tensor", None) for one in model.parameters()]
                found["secondary"] = sum(one.nbytes for one in copies if one is not None)
                if sum(found.values()) > sum(most.values()):
                    most = found
        engine.step()
    engine.destroy()
    return most


def main() -> None:
    deepspeed.init_distributed("gloo")
    results: dict[str, dict[str, int]] = {}
    for name, model_name, ds in cases(distributed.get_world_size()):
        ranks: list[dict[str, int]] = [{}] * distributed.get_world_size()
        distributed.all_gather_object(ranks, measure(model_name, ds))
        results[name] = max(ranks, key=lambda one: sum(one.values()))
        gc.collect()
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if not word.startswith("--local_rank")]
    main()
