"""Refuses keys of a DeepSpeed JSON, alone or in combination, and lists notices about others.

Each rule was found by running DeepSpeed or reading its source; DeepSpeed checks some of them after
minutes of start-up, some with a bare assertion, and some not at all. Must not depend on the
settings of a run. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerolm.common.secrets import SECRET_KEY
from zerolm.common.values import shown
from zerolm.ds_config import muon
from zerolm.ds_config.construction import construction_problems
from zerolm.ds_config.optimizers import optimizer_problems, scheduler_problems
from zerolm.ds_config.parallel_rules import ds_problems as parallel_problems
from zerolm.ds_config.precision import precision_problems
from zerolm.ds_config.profile import Profile, block, is_number

QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")
_MISSING = object()


class Refusal(NamedTuple):
    """A key that is refused regardless of the rest of the file.

    Attributes:
        key: dotted.
        values: a key of `REFUSED_VALUES`.
    """

    key: str
    values: str
    why: str
    instead: str = "Remove the key"


REFUSED_VALUES: dict[str, Callable[[Any], bool]] = {
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "below 1": lambda value: is_number(value) and value < 1,
    '"sum"': lambda value: value == "sum",
    "any": lambda value: value not in (None, False, _MISSING),
    "any, also null": lambda value: value not in (False, _MISSING),
    "enabled": lambda value: _is_enabled(value, False),
    "not disabled": lambda value: _is_enabled(value, True),
}
REFUSALS = (
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "true",
        "pretraining trains every weight",
    ),
    Refusal("zero_optimization.compute_grad_norm", "false", "spike checks need train/grad_norm"),
    Refusal(
        "zero_optimization.load_from_fp32_weights",
        "false",
        "a resume would start with weights rounded to 16 bits, which changes the loss curve",
    ),
    Refusal(
        "zero_optimization.elastic_checkpoint",
        "true",
        "DeepSpeed cannot load the checkpoints that it writes with it",
    ),
    Refusal(
        "zero_optimization.pipeline_loading_checkpoint",
        "true",
        "below stage 3 DeepSpeed loads no checkpoint with it, and at stage 3 one rank after "
        "another",
    ),
    Refusal(
        "zero_optimization.stage3_module_granularity_threshold",
        "any",
        "DeepSpeed fails in the backward pass with it; name the modules in leaf_module",
    ),
    Refusal(
        "zero_optimization.round_robin_gradients",
        "true",
        "DeepSpeed then takes other values for the master weights of a parameter, so averages, "
        "--qk_clip and --init_from would read or change the wrong ones",
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        "below 1",
        "what stays on the device is updated by a second AdamW, which keeps its first learning "
        "rate and whose moments are in no checkpoint",
    ),
    *(
        Refusal(
            f"zero_optimization.offload_optimizer.{key}",
            "true",
            "its loss curve on NVMe has not been compared with plain PyTorch's, and elsewhere it "
            "does nothing",
        )
        for key in ("pipeline_read", "pipeline_write", "fast_init")
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        "true",
        "it needs CUDA, updates weights before a step can be refused, and its moments are not "
        "saved in checkpoints (docs/settings.md)",
    ),
    Refusal(
        "zero_optimization.zenflow",
        "any",
        "it delays the updates of most weights: 3% from AdamW's loss after 20 steps "
        "(docs/settings.md)",
        "Remove the block",
    ),
    Refusal(
        "gradient_allreduce_op", '"sum"', "it multiplies gradients by the world size", "Use mean"
    ),
    Refusal(
        "managed_gradient_accumulation", "false", "the loop would have to sum gradients itself"
    ),
    Refusal(
        "compile.deepcompile",
        "true",
        "its loss curve has not been compared with plain PyTorch's (docs/settings.md)",
        "Use --compile",
    ),
    Refusal(
        "checkpoint.load_universal",
        "any",
        "it makes saves incomplete (DeepSpeed#7546)",
        "Remove the key: runs resume at any world size and stage without it",
    ),
    Refusal(
        "checkpoint.use_node_local_storage",
        "any",
        "a checkpoint is one directory shared by all nodes",
        "Remove the key, and use a shared file system for --run_dir",
    ),
    # The block's presence enables the feature, whatever it contains
    # (deepspeed/datastates/config.py).
    Refusal(
        "datastates_ckpt",
        "any, also null",
        "pretrain.py writes the checkpoints",
        "Remove the block",
    ),
    Refusal(
        "expert_parallel",
        "enabled",
        "with DeepSpeed's AutoEP a checkpoint can be neither resharded nor exported "
        "(docs/experts.md)",
        "Remove the block, and use --expert_parallel N, or ZeRO 3",
    ),
    Refusal(
        "data_efficiency",
        "enabled",
        "it works only through DeepSpeed's own data loader; the data order here depends only on "
        "--data and the seed",
        "Remove the block, and use --data_stage (docs/data_order.md)",
    ),
    Refusal(
        "autotuning",
        "enabled",
        "pretrain.py is one run, not a search",
        "Remove the block, and use zerolm plan --search",
    ),
    Refusal("fp8", "enabled", "DeepSpeed does not read it", "Remove the block, use bf16 and --fp8"),
    Refusal("hybrid_engine", "enabled", "it is for reinforcement learning", "Remove the block"),
    Refusal("weight_quantization", "not disabled", "it is for inference", "Remove the block"),
    Refusal("data_parallel_size", "any", "the launcher decides the world size"),
)


def rule_problems(profile: Profile, *, on_gpu: bool, world_size: int) -> list[str]:
    """Find key combinations that DeepSpeed or pretrain.py does not support."""
    problems = _zero_problems(profile, on_gpu, world_size)
    problems += precision_problems(profile, on_gpu)
    problems += optimizer_problems(profile, on_gpu)
    problems += scheduler_problems(profile)
    problems += construction_problems(profile)
    problems += _refusals(profile)
    problems += parallel_problems(profile, world_size)
    problems += _secrets(profile.json)
    return [f"{profile.name}: {problem}" for problem in problems]


def _zero_problems(profile: Profile, on_gpu: bool, world_size: int) -> list[str]:
    zero, stage = profile.zero, profile.zero_stage
    if stage == 0:
        written = shown(zero.get("stage"))
        return [f"zero_optimization.stage: {written} must be 1, 2 or 3. Correct it."]
    problems = []
    if profile.param_offload != "none" and stage != 3:
        problems.append(
            f"zero_optimization.offload_param: needs stage 3, got {stage}. Use "
            f"ds_configs/zero3_offload.json or remove the key."
        )
    for name, device in profile.offloads.items():
        if device == "nvme":
            key = f"zero_optimization.{name}"
            if stage != 3:
                problems.append(f"{key}.device: nvme needs stage 3, got {stage}. Use cpu instead.")
            if not block(zero, name).get("nvme_path"):
                problems.append(
                    f"{key}.nvme_path: missing, but device nvme needs it. Add a directory."
                )
    if profile.block("aio").get("use_gds") is True and not on_gpu:
        problems.append("aio.use_gds: true needs a GPU. Remove the key.")
    for key in QUANTIZED_KEYS:
        if zero.get(key) is True and not on_gpu:
            problems.append(f"zero_optimization.{key}: true needs a GPU. Remove the key.")
    secondary = zero.get("zero_hpz_partition_size", 1)
    if isinstance(secondary, int) and secondary > 1 and world_size % secondary:
        key = "zero_optimization.zero_hpz_partition_size"
        problems.append(f"{key}: {secondary} must divide the world size {world_size}. Change it.")
    return problems


def rule_notices(profile: Profile, *, on_gpu: bool, world_size: int) -> list[str]:
    """List notices about options that change the loss curve or are easily misunderstood."""
    notices = []
    if profile.zero.get("stage", 0) == 0:
        # engine.py scales the loss only for a ZeROOptimizer, so at stage 0 fp16 gradients would be
        # too small by a factor of 2^16, and in fp32 there is no gradient norm. zerolm cannot read
        # stage 0 checkpoints.
        is_what = "is missing" if "stage" not in profile.zero else "is 0"
        notices.append(
            f"zero_optimization.stage {is_what}: using stage 1, which computes the same as stage 0 "
            "with sharded optimizer states"
        )
    notices += _without_effect(profile) + _other_trackers(profile)
    if profile.block("checkpoint").get("writer") is not None:
        notices.append(
            "checkpoint.writer: pretrain.py uses its own writer, which follows `decoupled`; "
            "DeepSpeed cannot load the files of its own writers (DeepSpeed#8500)"
        )
    if profile.precision == "bf16" and profile.grad_accum_dtype != "fp32":
        notices.append(
            "gradients are accumulated in bf16; data_types.grad_accum_dtype fp32 is more exact"
        )
    notices += muon.notices(profile)
    quantized = [
        f"zero_optimization.{key}" for key in QUANTIZED_KEYS if profile.zero.get(key) is True
    ]
    if quantized and on_gpu:
        notices.append(
            f"{' and '.join(quantized)}: quantizes communication, which changes the loss curve"
        )
    reduction, remedy = _reduction(profile)
    if reduction != "fp32" and world_size > 1:
        notices.append(
            f"gradients are reduced in {reduction}, so the loss curve depends slightly on the "
            f"world size{remedy}"
        )
    return [f"{profile.name}: {notice}" for notice in notices]


def _without_effect(profile: Profile) -> list[str]:
    """List notices about options that DeepSpeed reads, but that have no effect in a run."""
    found = []
    if used := [key for key, on in profile.block("activation_checkpointing").items() if on]:
        found.append(
            f"activation_checkpointing.{used[0]}: has no effect, since Hugging Face models do not "
            f"call DeepSpeed's checkpointing; use --gradient_checkpointing"
        )
    if used := [key for key, on in profile.block("compile").items() if on]:
        found.append(
            f"compile.{used[0]}: has no effect without deepcompile, which is not supported; use "
            f"--compile"
        )
    if profile.block("comms_logger").get("enabled") is True:
        found.append("comms_logger: its table is printed at the end of the run")
    return found


def _other_trackers(profile: Profile) -> list[str]:
    """List notices about enabled monitors of DeepSpeed, and what zerolm does instead."""
    instead = {
        "wandb": "pretrain.py logs to W&B itself, with the block's project, group and team; see "
        "--wandb",
        "tensorboard": "pretrain.py writes TensorBoard files itself, to tensorboard/ in the run "
        "directory; the block's paths are not used",
        "csv_monitor": "pretrain.py writes no CSV files; metrics.jsonl in the run directory "
        "contains every metric",
        "comet": "pretrain.py does not log to Comet; use --wandb or --tensorboard",
    }
    return [
        f"{key}.enabled: DeepSpeed's own monitor is not used: {what}"
        for key, what in instead.items()
        if profile.block(key).get("enabled") is True
    ]


def _reduction(profile: Profile) -> tuple[str, str]:
    """Return the precision in which gradients are summed over ranks, and how to change that."""
    if profile.block("torch_autocast").get("enabled") is True:
        # deepspeed/runtime/torch_autocast.py sets this precision for each weight of a linear layer.
        return "bf16", "; torch_autocast requires it"
    dtype = str(profile.communication_dtype or profile.precision)
    return dtype, '; "communication_data_type": "fp32" is exact, but sends twice the bytes'


def _refusals(profile: Profile) -> list[str]:
    problems = []
    for key, values, why, instead in REFUSALS:
        *path, name = key.split(".")
        value = block(profile.json, *path).get(name, _MISSING)
        if REFUSED_VALUES[values](value):
            problems.append(f"{key}: {shown(value)[:60]} is not supported: {why}. {instead}.")
    return problems


def _is_enabled(value: Any, default: bool) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled", default) is not False
    return value not in (None, False, _MISSING)


def _secrets(value: Mapping[str, Any], where: str = "") -> list[str]:
    """Refuse secrets, since the JSON is copied to run.json, the HTML report and W&B."""
    problems = []
    for key, part in value.items():
        if isinstance(part, Mapping):
            problems += _secrets(part, f"{where}{key}.")
        elif isinstance(part, str) and part and SECRET_KEY.search(key):
            problems.append(
                f"{where}{key}: a secret, which would be copied to run.json, the report and W&B. "
                f"Remove it, and set it in the environment (for Comet: COMET_API_KEY)."
            )
    return problems
