"""Instrumentation for tests and `zerolm plan --probe`: what a rank keeps and trains on.

Off unless an environment variable names a directory, in which each rank then writes a file:
`ZEROLM_MEMORY_PROBE`: bytes of weights, gradients, optimizer states and buffers, before each
optimizer step; `ZEROLM_LEDGER`: the sequences of each step.
"""

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerolm.common.faults import FLIP, fault_point
from zerolm.common.files import write_json

MEMORY_VARIABLE, LEDGER_VARIABLE = "ZEROLM_MEMORY_PROBE", "ZEROLM_LEDGER"
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
MASTERS = (
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
    master = [getattr(optimizer, name, None) for name in MASTERS]
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


def record_memory(engine: Any, step: int) -> None:
    """Write `model_state_bytes` of this rank, if `ZEROLM_MEMORY_PROBE` names a directory."""
    directory = os.environ.get(MEMORY_VARIABLE)
    if directory:
        found = {"step": step, **model_state_bytes(engine)}
        write_json(Path(directory) / f"rank-{engine.global_rank:05d}.json", found)


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


def record_sequences(step: int, micro_batches: Iterable[Mapping[str, Any]]) -> None:
    """Append the sequences of a step to this rank's ledger, if `ZEROLM_LEDGER` names a directory.

    Args:
        micro_batches: tensors `sequence_ids` and `sources`, one entry per row.
    """
    directory = os.environ.get(LEDGER_VARIABLE)
    if directory:
        line: dict[str, Any] = {"step": step, "sequences": [], "sources": []}
        for batch in micro_batches:
            line["sequences"] += batch["sequence_ids"].tolist()
            line["sources"] += batch["sources"].tolist()
        with open(Path(directory, f"rank-{int(os.environ.get('RANK', 0)):05d}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


def read_sequences(directory: str | Path) -> dict[int, list[int]]:
    """Return {step: sequence numbers of all ranks, ascending}; repeated steps: the last one."""
    return {
        step: sorted(number for entry in entries for number in entry["sequences"])
        for step, entries in _last_lines(directory).items()
    }


def read_sources(directory: str | Path) -> dict[int, dict[int, int]]:
    """Return {step: {sequence number: source}} of all ranks; repeated steps: the last one."""
    return {
        step: {
            number: source
            for entry in entries
            for number, source in zip(entry["sequences"], entry["sources"], strict=True)
        }
        for step, entries in _last_lines(directory).items()
    }


def _last_lines(directory: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return {step: the last line of each rank}, steps ascending."""
    steps: dict[int, dict[str, dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.name] = entry
    return {step: list(ranks.values()) for step, ranks in sorted(steps.items())}


def fault_after_step(engine: Any, step: int) -> None:
    """Trigger the faults after an optimizer step; a flip is one of this rank's master weights."""
    if fault_point("step.end", step) == FLIP:
        from zerolm.integrity.checks import flip_bit
        from zerolm.integrity.zero_state import MASTERS as KIND
        from zerolm.integrity.zero_state import states

        flip_bit(next(each.values for each in states(engine) if each.kind == KIND))
