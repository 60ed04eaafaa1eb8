"""Check which combinations of keys in a DeepSpeed JSON work.

Each rule was found by running DeepSpeed or reading its source; DeepSpeed checks some of them after
minutes of start-up, some with a bare assertion, some never. Must not depend on the settings of a
run. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.common.secrets import SECRET_KEY
from zerolm.common.values import shown
from zerolm.ds_config import muon
from zerolm.ds_config.optimizers import optimizer_problems, scheduler_problems
from zerolm.ds_config.parallel_rules import ds_problems as parallel_problems
from zerolm.ds_config.precision import precision_problems
from zerolm.ds_config.profile import Profile, block

QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")
_ON_BY_DEFAULT = ("pipeline", "weight_quantization")  # if the block has no `enabled`
# Keys that pretrain.py does not support: the reason and the fix.
_UNSUPPORTED: dict[str, str] = {
    "autotuning": "pretrain.py is one run, not a search (see zerolm plan --search). Remove the "
    "block.",
    "data_efficiency": "it works only through DeepSpeed's own data loader, and the data order here "
    "depends only on --data and the seed. Remove the block.",
    "expert_parallel": "with DeepSpeed's AutoEP a checkpoint can be neither resharded nor exported "
    "(docs/experts.md). Remove the block, use ZeRO 3.",
    "fp8": "DeepSpeed does not read it. Remove the block, use bf16 and the flag --fp8.",
    "hybrid_engine": "it is for reinforcement learning. Remove the block.",
    "pipeline": "DeepSpeed's pipeline engine steps the optimizer inside its own training loop, "
    "where a step cannot be checked (docs/parallelism.md). Remove the block, use ZeRO 3.",
    "weight_quantization": "it is for inference. Remove the block.",
    "data_parallel_size": "the launcher decides the world size. Remove the key.",
}


def rule_problems(profile: Profile, *, on_gpu: bool, world_size: int) -> list[str]:
    """Find combinations of keys that DeepSpeed or pretrain.py does not support.

    Args:
        on_gpu: whether the run has accelerators.
        world_size: number of ranks.
    """
    problems = _zero_problems(profile, on_gpu, world_size)
    problems += precision_problems(profile, on_gpu)
    problems += optimizer_problems(profile, on_gpu)
    problems += scheduler_problems(profile)
    problems += _unsupported_problems(profile)
    problems += parallel_problems(profile, world_size)
    problems += _checkpoint_problems(profile)
    return [f"{profile.name}: {problem}" for problem in problems]


def _zero_problems(profile: Profile, on_gpu: bool, world_size: int) -> list[str]:
    zero, stage = profile.zero, profile.zero_stage
    if stage == 0:
        written = shown(zero.get("stage"))
        return [f"zero_optimization.stage: {written}, must be 1, 2 or 3. Correct it."]
    problems = _zero_option_problems(zero)
    if profile.param_offload != "none" and stage != 3:
        problems.append(
            f"zero_optimization.offload_param: needs stage 3, got {stage}. Use "
            f"ds_configs/zero3_offload.json or remove the key."
        )
    for name, device in profile.offloads.items():
        if device == "nvme":
            key = f"zero_optimization.{name}"
            if stage != 3:
                problems.append(f"{key}.device: nvme, needs stage 3, got {stage}. Use cpu instead.")
            if not block(zero, name).get("nvme_path"):
                problems.append(
                    f"{key}.nvme_path: missing, device nvme needs it. Name a directory."
                )
    if profile.block("aio").get("use_gds") is True and not on_gpu:
        problems.append("aio.use_gds: true, needs a GPU. Remove the key.")
    for key in QUANTIZED_KEYS:
        if zero.get(key) is True and not on_gpu:
            problems.append(f"zero_optimization.{key}: true, needs a GPU. Remove the key.")
    if zero.get("zero_quantized_nontrainable_weights") is True:
        key = "zero_optimization.zero_quantized_nontrainable_weights"
        problems.append(f"{key}: true, but pretraining trains every weight. Remove the key.")
    secondary = zero.get("zero_hpz_partition_size", 1)
    if isinstance(secondary, int) and secondary > 1 and world_size % secondary:
        key = "zero_optimization.zero_hpz_partition_size"
        problems.append(f"{key}: {secondary}, must divide the world size {world_size}. Change it.")
    return problems


def _zero_option_problems(zero: Mapping[str, Any]) -> list[str]:
    """Find options that would change the loss curve, or disable a metric that checks rely on."""
    found: dict[str, str] = {}
    if zero.get("compute_grad_norm") is False:
        found["compute_grad_norm"] = "false, but the stability checks need train/grad_norm"
    if zero.get("load_from_fp32_weights") is False:
        found["load_from_fp32_weights"] = (
            "false, would resume from weights rounded to 16 bits and change the loss curve"
        )
    if block(zero, "offload_optimizer").get("super_offload") is True:
        found["offload_optimizer.super_offload"] = (
            "needs CUDA, updates weights before a step can be refused, and its moments are in no "
            "checkpoint (docs/settings.md)"
        )
    if zero.get("zenflow") is not None:
        found["zenflow"] = (
            "delays the updates of most weights: 3% from AdamW's loss after 20 steps "
            "(docs/settings.md)"
        )
    return [
        f"zero_optimization.{key}: {why}. Remove the {'block' if key == 'zenflow' else 'key'}."
        for key, why in found.items()
    ]


def rule_notices(profile: Profile, *, on_gpu: bool, world_size: int) -> list[str]:
    """List options that are allowed, but change the loss curve or are easily misread.

    Args:
        on_gpu, world_size: as for `rule_problems`.
    """
    notices = []
    if profile.zero.get("stage", 0) == 0:
        # engine.py scales the loss for a ZeROOptimizer only, so at stage 0 fp16 gradients would be
        # 2^16 too small; in fp32 there is no gradient norm; nothing here reads its checkpoints.
        is_what = "is missing" if "stage" not in profile.zero else "is 0"
        notices.append(
            f"zero_optimization.stage {is_what}: using stage 1, which has the results of stage 0 "
            f"with sharded optimizer states"
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
    """List options that DeepSpeed reads, but that nothing on the path of a run uses."""
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
    """List the blocks of DeepSpeed's monitors, of which `implied` takes what it can."""
    instead = {
        "wandb": "pretrain.py logs to W&B itself, with the block's project, group and team; see "
        "--wandb",
        "tensorboard": "pretrain.py writes TensorBoard files itself, to tensorboard/ of the run "
        "directory; the block's paths are not used",
        "csv_monitor": "pretrain.py writes no CSV files; metrics.jsonl in the run directory has "
        "every metric",
        "comet": "pretrain.py does not log to Comet; use --wandb or --tensorboard",
    }
    return [
        f"{key}.enabled: DeepSpeed's own monitor is not used: {what}"
        for key, what in instead.items()
        if profile.block(key).get("enabled") is True
    ]


def _reduction(profile: Profile) -> tuple[str, str]:
    """Return the precision in which gradients are summed over ranks, and how to get fp32."""
    if profile.block("torch_autocast").get("enabled") is True:
        # deepspeed/runtime/torch_autocast.py sets it for each weight of a linear layer.
        return "bf16", "; torch_autocast requires it"
    dtype = str(profile.communication_dtype or profile.precision)
    return dtype, '; "communication_data_type": "fp32" is exact, at twice the bytes'


def _unsupported_problems(profile: Profile) -> list[str]:
    problems = []
    for key, why in _UNSUPPORTED.items():
        value = profile.json.get(key)
        if isinstance(value, Mapping):
            enabled = value.get("enabled", key in _ON_BY_DEFAULT) is not False
        else:
            enabled = value not in (None, False)
        if enabled:
            problems.append(f"{key}: {shown(value)[:60]}, is not supported: {why}")
    # On by its presence, whatever it contains (deepspeed/datastates/config.py).
    if profile.json.get("datastates_ckpt", False) is not False:
        problems.append(
            "datastates_ckpt: is not supported: pretrain.py writes its own checkpoints. Remove the "
            "block."
        )
    if profile.json.get("gradient_allreduce_op", "mean") != "mean":
        problems.append(
            "gradient_allreduce_op: sum, would scale gradients by the world size. Use mean."
        )
    if profile.json.get("managed_gradient_accumulation") is False:
        problems.append("managed_gradient_accumulation: false, is not supported. Remove the key.")
    if profile.block("compile").get("deepcompile") is True:
        problems.append(
            "compile.deepcompile: true, is not supported: its loss curve has not been compared "
            "with plain PyTorch's (docs/settings.md). Use --compile instead."
        )
    return [*problems, *_secrets(profile.json)]


def _secrets(value: Mapping[str, Any], where: str = "") -> list[str]:
    """Refuse secrets, because the JSON is copied to run.json, the HTML report and W&B."""
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


def _checkpoint_problems(profile: Profile) -> list[str]:
    checkpoint = profile.block("checkpoint")
    problems = []
    if checkpoint.get("load_universal"):
        problems.append(
            "checkpoint.load_universal: true, is not supported: it makes saves incomplete "
            "(DeepSpeed#7546). Remove the key: runs resume at any world size and stage without it."
        )
    if checkpoint.get("use_node_local_storage"):
        problems.append(
            "checkpoint.use_node_local_storage: true, but a checkpoint is one directory shared by "
            "all nodes. Remove the key, and use a shared file system for --run_dir."
        )
    return problems
