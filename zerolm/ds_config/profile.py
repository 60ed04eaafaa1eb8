"""`Profile`: a DeepSpeed JSON file, parsed once for the rest of the project.

Only this subpackage reads the raw JSON: `schema` reads its keys and values as DeepSpeed does,
`rules` checks combinations of keys, `implied` finds settings that the JSON fixes, and `resolve`
replaces "auto" and missing values. Imports DeepSpeed only through `schema`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.common.records import read_json
from zerolm.common.shipped import find_config
from zerolm.ds_config import schema
from zerolm.engine import reduction_choice
from zerolm.engine.config_keys import AUTO, is_number

# DeepSpeed's defaults for values missing in the JSON (deepspeed/runtime/zero/config.py, 0.19.8).
REDUCE_BUCKET, PREFETCH_BUCKET, PERSISTENCE_THRESHOLD = 500_000_000, 50_000_000, 100_000
MAX_LIVE_PARAMETERS, MODEL_PERSISTENCE_THRESHOLD = 1_000_000_000, sys.maxsize


@dataclass(frozen=True)
class Optimizer:
    """The `optimizer` block.

    Attributes:
        name: the optimizer's type as written in the file; AdamW if missing.
        params: the optimizer's parameters as written in the file.
    """

    name: str
    params: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The lower-case name, since DeepSpeed compares names case-insensitively."""
        return self.name.lower()


@dataclass(frozen=True)
class Buckets:
    """ZeRO's buffer sizes and thresholds, in number of values.

    Attributes:
        reduce: number of gradient values that are reduced in one message.
        prefetch: number of weights that stage 3 gathers ahead of their use.
        persistence_threshold: stage 3 keeps parameters up to this size on every rank.
        persistence_limit: maximum total size of the parameters kept on every rank.
        max_live: maximum number of gathered weights that stage 3 keeps at a time.
    """

    reduce: int
    prefetch: int
    persistence_threshold: int
    persistence_limit: int
    max_live: int


@dataclass(frozen=True)
class Profile:
    """A parsed DeepSpeed JSON. Invalid values count as missing.

    Attributes:
        name: the file's name, for messages.
        problems: unknown keys, and values of a wrong type; `rules` finds all other problems.
        json: the values as DeepSpeed reads them, or as resolved for `deepspeed.initialize`.
        zero: the `zero_optimization` block.
        zero_stage: 1 if missing or 0 (see `resolve`); 0 if the value is not a stage.
        precision: dtype of the weights, `fp32`, `bf16` or `fp16` (see `weight_precision`).
        compute_precision: dtype of matmuls; differs from `precision` under `torch_autocast`.
        grad_accum_dtype: dtype of accumulated gradients; None means `precision`.
        communication_dtype: dtype in which gradients are reduced; None means `precision`.
        optimizer_offload, param_offload: `none`, `cpu` or `nvme`.
        scheduler: type of the `scheduler` block; None if there is no block.
        scheduler_params: the scheduler's parameters as written.
        gradient_clipping: None if missing or "auto".
        tensor_parallel, sequence_parallel: numbers of ranks per group; 1 if the value is invalid.
        stages: number of pipeline stages; 1 if the value is invalid.
        stage_layers: number of blocks of each stage; empty if missing.
        batch_size, micro_batch_size: numbers of sequences; None if missing or "auto".
        accumulation: micro-batches per step; None if missing or "auto".
        overlap_comm: None if missing.
        buckets: buffer sizes, with DeepSpeed's defaults filled in.
    """

    name: str
    problems: list[str]
    json: dict[str, Any]
    zero: Mapping[str, Any]
    zero_stage: int
    precision: str
    compute_precision: str
    grad_accum_dtype: str | None
    communication_dtype: str | None
    optimizer_offload: str
    param_offload: str
    optimizer: Optimizer
    scheduler: str | None
    scheduler_params: Mapping[str, Any]
    gradient_clipping: float | None
    tensor_parallel: int
    sequence_parallel: int
    stages: int
    stage_layers: tuple[int, ...]
    batch_size: int | None
    micro_batch_size: int | None
    accumulation: int | None
    overlap_comm: bool | None
    buckets: Buckets

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """Read a JSON file, or an hjson file, which DeepSpeed also accepts.

        Raises:
            ConfigError: the file is missing, not readable, or not an object.
        """
        example = "DeepSpeed's JSON, for example ds_configs/zero2.json"
        return cls.parse(read_json(find_config(path), example, _loads), str(path))

    @classmethod
    def parse(cls, value: Mapping[str, Any], name: str = "DeepSpeed JSON") -> "Profile":
        """Parse a JSON object; the attribute `problems` lists its problems."""
        value, problems = schema.read(without_comments(value))
        zero = block(value, "zero_optimization")
        weights, _ = weight_precision(value)
        autocast = block(value, "torch_autocast").get("enabled") is True
        stage, clipping = zero.get("stage", 1), value.get("gradient_clipping")
        optimizer, scheduler = block(value, "optimizer"), block(value, "scheduler")
        overlap = zero.get("overlap_comm")
        return cls(
            name=name,
            problems=[f"{name}: {problem}" for problem in problems],
            json=value,
            zero=zero,
            zero_stage=max(1, stage) if stage in (0, 1, 2, 3) else 0,
            precision=weights,
            compute_precision="bf16" if autocast else weights,  # `rules` refuses other autocasts
            grad_accum_dtype=block(value, "data_types").get("grad_accum_dtype"),
            communication_dtype=value.get("communication_data_type"),
            optimizer_offload=_offload(zero, "cpu_offload", "offload_optimizer"),
            param_offload=_offload(zero, "cpu_offload_param", "offload_param"),
            optimizer=Optimizer(
                str(optimizer.get("type", "AdamW")), block(optimizer, "params")
            ),
            scheduler=str(scheduler.get("type")) if scheduler else None,
            scheduler_params=block(scheduler, "params"),
            gradient_clipping=float(clipping) if is_number(clipping) else None,
            tensor_parallel=_degree(block(value, "tensor_parallel").get("autotp_size", 1)),
            sequence_parallel=_degree(value.get("sequence_parallel_size", 1)),
            stages=_degree(block(value, "pipeline").get("stages", 1)),
            stage_layers=_degrees(block(value, "pipeline").get("layers")),
            batch_size=_count(value.get("train_batch_size")),
            micro_batch_size=_count(value.get("train_micro_batch_size_per_gpu")),
            accumulation=_count(value.get("gradient_accumulation_steps")),
            overlap_comm=None if overlap is None else bool(overlap),
            buckets=_buckets(zero),
        )  # fmt: skip

    def block(self, *path: str) -> Mapping[str, Any]:
        """Return a nested block of the JSON; empty if the block is missing or not an object."""
        return block(self.json, *path)

    @property
    def offloads(self) -> dict[str, str]:
        """The device of each offload block: `offload_optimizer` and `offload_param`."""
        return {"offload_optimizer": self.optimizer_offload, "offload_param": self.param_offload}

    @property
    def uses_muon(self) -> bool:
        return self.optimizer.kind == "muon"

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed uses its BF16_Optimizer class, which happens only under stage 1."""
        return (
            self.zero_stage == 1
            and self.precision == "bf16"
            and self.grad_accum_dtype == "fp32"
            and self.optimizer_offload == "none"
        )

    @property
    def all_reduces(self) -> bool:
        """Whether stage 1 or 2 all-reduces gradients instead of reducing each to its owner only."""
        asked = self.block("zero_optimization").get(reduction_choice.KEY) is True
        in_parts = self.tensor_parallel > 1 or self.sequence_parallel > 1
        is_other = in_parts if self.uses_bf16_optimizer else self.optimizer_offload != "none"
        return asked or self.uses_muon or is_other

    @property
    def keeps_micro_batch_gradients(self) -> bool:
        """Whether stage 1 keeps a micro-batch's gradients until the end of its backward pass."""
        if self.optimizer_offload != "none" or self.gradient_bytes == self.weight_bytes:
            return False
        # If the key is not in the JSON, `resolve` sets it to true.
        freed = self.block("bf16").get("immediate_grad_update", True)
        return not (self.uses_bf16_optimizer and freed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in the model's precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def master_bytes(self) -> int:
        """Bytes of one master weight: 4, or 2 with `bf16_master_weights_and_grads`."""
        keys = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
        low = any(
            self.block(key).get(f"{name}_master_weights_and_grads") is True
            for key, name in keys.items()
        )
        return 2 if low else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of one optimizer state value: 4, or 2 with `bf16_optimizer_states`."""
        bf16 = self.block("bf16") or self.block("bfloat16")
        return 2 if bf16.get("bf16_optimizer_states") is True else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient value."""
        return 4 if (self.grad_accum_dtype or self.precision) == "fp32" else 2

    @property
    def communication_bytes(self) -> int:
        """Bytes of one gradient value in the reduction over ranks."""
        return 4 if (self.communication_dtype or self.precision) == "fp32" else 2


def block(value: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return a nested object of a JSON object; empty if it is missing or not an object."""
    found: Any = value
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def without_comments(value: Any) -> Any:
    """Return a JSON value without comment keys: `_...`, `//...`, `#...` and `$schema`."""
    if isinstance(value, list):
        return [without_comments(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_comments(inner)
        for key, inner in value.items()
        if not key.startswith(("_", "//", "#")) and key != "$schema"
    }


def is_degree(value: Any) -> bool:
    """Return whether a JSON value is a valid degree of parallelism, a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _degree(value: Any) -> int:
    return value if is_degree(value) else 1


def _degrees(value: Any) -> tuple[int, ...]:
    is_valid = isinstance(value, list) and all(map(is_degree, value))
    return tuple(value) if is_valid else ()


def _count(value: Any) -> int | None:
    return int(value) if is_number(value) and value >= 1 and value == int(value) else None


def weight_precision(value: Mapping[str, Any], default: str | None = None) -> tuple[str, str]:
    """Return the precision of the weights, and the JSON value or rule that determines it.

    Args:
        default: `--precision`, which applies if the JSON has "auto" or no block.
    """
    bf16_key = "bfloat16" if "bfloat16" in value and "bf16" not in value else "bf16"
    bf16 = block(value, bf16_key).get("enabled")
    fp16 = block(value, "fp16").get("enabled")
    for name, key, enabled in (("bf16", bf16_key, bf16), ("fp16", "fp16", fp16)):
        if enabled is True:
            return name, f"{key}.enabled: true"
    if default is not None:
        return default, ""
    if AUTO in (bf16, fp16):
        if bf16 is False:
            return "fp16", f'fp16.enabled is "auto" and {bf16_key}.enabled is false'
        return "bf16", f'{bf16_key if bf16 == AUTO else "fp16"}.enabled is "auto"'
    return "fp32", "the file enables neither bf16 nor fp16"


def _offload(zero: Mapping[str, Any], old_key: str, key: str) -> str:
    if zero.get(old_key) is True:
        return "cpu"
    return str(block(zero, key).get("device") or "none")


def _buckets(zero: Mapping[str, Any]) -> Buckets:
    def number(key: str, default: int) -> int:
        value = zero.get(key)
        return int(value) if is_number(value) else default

    return Buckets(
        reduce=number("reduce_bucket_size", REDUCE_BUCKET),
        prefetch=number("stage3_prefetch_bucket_size", PREFETCH_BUCKET),
        persistence_threshold=number("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD),
        persistence_limit=number("stage3_model_persistence_threshold", MODEL_PERSISTENCE_THRESHOLD),
        max_live=number("stage3_max_live_parameters", MAX_LIVE_PARAMETERS),
    )


def _loads(text: str, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError as error:
        import hjson

        try:
            return hjson.loads(text, **options)
        except hjson.HjsonDecodeError:
            raise error from None
