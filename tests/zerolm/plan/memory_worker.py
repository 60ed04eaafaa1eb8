"""One rank: builds DeepSpeed engines in turn, trains two steps, and counts the bytes each keeps.

Writes `{name: {component: bytes}}` of the rank with the most to the given file. The peak is after a
micro-batch of the second step, when the optimizer has its states.
"""

import gc
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # before zero.Init, as in pretrain.py
from torch import distributed

from tests.zerolm.plan.memory_cases import MODELS, SEQ_LEN, VOCABULARY, cases
from zerolm.model.build import build_model
from zerolm.optim.parameter_groups import parameter_groups

# Attributes of DeepSpeed's optimizers, 0.19.8.
GRADIENTS = ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu")
GRADIENT_BUFFERS = ("grad_partitions_flat_buffer",)
MUON_MOMENTA = "_muon_pending_momentum"
WEIGHT_COPIES = "param_buffer_of_bit16_for_cpu_offload_groups"  # copied back to the device
BUFFERS = (
    "ipg_buckets",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer",
)
MASTER_COPIES = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


def model_state_bytes(engine: Any) -> dict[str, int]:
    """Return the bytes of an engine's live tensors, by kind: weights, master, optimizer, ...

    A storage is counted once, for the first kind that holds it. Host and device memory together.

    Args:
        engine: after the last backward pass of a step, and after a first optimizer step, which
            allocates the optimizer states.
    """
    seen: set[int] = set()
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = list(engine.module.parameters())
    master = [getattr(optimizer, name, None) for name in MASTER_COPIES]
    gradients = [getattr(optimizer, name, None) for name in (*GRADIENTS, *GRADIENT_BUFFERS)]
    gradients += [getattr(one, name, None) for one in parameters for name in ("grad", "grad_accum")]
    gradients += [one.grad for one in _tensors(master)]
    owned = {
        "weights": [
            parameters,
            [getattr(one, "ds_tensor", None) for one in parameters],
            getattr(optimizer, WEIGHT_COPIES, None),
        ],
        "master": master,
        "optimizer": [
            [value for state in inner.state.values() for value in state.values()],
            getattr(optimizer, MUON_MOMENTA, None),
        ],
        "gradients": gradients,
        "buffers": [getattr(optimizer, name, None) for name in BUFFERS],
        "others": [one for one in gc.get_objects() if type(one) is torch.Tensor],
    }
    return {name: sum(_new_bytes(_tensors(what), seen)) for name, what in owned.items()}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dict__"):
        yield from _tensors(list(vars(value).values()))


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() > 64:
            seen.add(storage._cdata)
            yield storage.nbytes()


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
