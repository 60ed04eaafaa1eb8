"""Check which combinations of keys in a DeepSpeed JSON work.

Each rule was found by running DeepSpeed or reading its source; DeepSpeed checks some of them after
minutes of start-up, some with a bare assertion, some never. Must not depend on the settings of a
run. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.common.errors import did_you_mean
from zerolm.common.secrets import SECRET_KEY
from zerolm.common.values import shown
from zerolm.ds_config import muon
from zerolm.ds_config.optimizers import optimizer_problems, scheduler_problems
from zerolm.ds_config.parallel_rules import ds_problems as parallel_problems
from zerolm.ds_config.profile import Profile, block

BF16_NAMES = ("bfloat16", "bf16", "torch.bfloat16")  # as deepspeed.runtime.config.DtypeEnum
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")
WRITER_KEYS = frozenset(
    {"data_parallel", "io_buffer_size", "io_buffer_double", "io_multiplier", "show_statistics"}
)
_ON_BY_DEFAULT = ("pipeline", "weight_quantization")  # if the block has no `enabled`
# Keys that pretrain.py does not support: the reason and the fix.
_UNSUPPORTED: dict[str, str] = {
    "autotuning": "pretrain.py is one run, not a search (see zerolm plan --search). Remove the "
    "block.",
    "data_efficiency": "it works only through DeepSpeed's own data loader, and the data order here "
    "depends only on --data and the seed. Remove the block.",
    "datastates_ckpt": "pretrain.py writes its own checkpoints. Remove the block.",
    "expert_parallel": "DeepSpeed's AutoEP fails with transformers 5.23, and its checkpoints "
    "cannot be read here (docs/parallelism.md). Remove the block, use ZeRO 3.",
    "fp8": "8-bit matmuls are not supported, see docs/speed.md. Remove the block, use bf16.",
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
    problems += _precision_problems(profile, on_gpu)
    problems += optimizer_problems(profile, on_gpu)
    problems += scheduler_problems(profile)
    problems += _unsupported_problems(profile)
    problems += parallel_problems(profile, world_size)
    problems += _checkpoint_problems(profile)
    return [f"{profile.name}: {problem}" for problem in problems]


def _zero_problems(profile: Profile, on_gpu: bool, world_size: int) -> list[str]:
    zero, stage = profile.zero, profile.zero_stage
    written = zero.get("stage", 1)
    if isinstance(written, bool) or written not in (0, 1, 2, 3):
        return [f"zero_optimization.stage: {shown(written)}, must be 1, 2 or 3. Correct it."]
    if written == 0:
        # engine.py scales the loss for a ZeROOptimizer only, so fp16 gradients would be 2^16 too
        # small; in fp32 there is no gradient norm; no code here reads stage 0 checkpoints.
        return [
            "zero_optimization.stage: 0, has no loss scaling, gradient norm or export. Use 1: the "
            "same results, with sharded optimizer states."
        ]
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
    if zero.get("zenflow") is not None:
        found["zenflow"] = (
            "delays the updates of most weights: 3% from AdamW's loss after 20 steps "
            "(docs/settings.md)"
        )
    return [
        f"zero_optimization.{key}: {why}. Remove the {'block' if key == 'zenflow' else 'key'}."
        for key, why in found.items()
    ]


def _precision_problems(profile: Profile, on_gpu: bool) -> list[str]:
    problems = []
    fp16 = profile.block("fp16").get("enabled")
    bf16_key = "bfloat16" if "bfloat16" in profile.json and "bf16" not in profile.json else "bf16"
    if fp16 is True and profile.block(bf16_key).get("enabled") is True:
        problems.append(
            f"fp16.enabled: true, but {bf16_key}.enabled is true too. Only one may be: remove fp16."
        )
    elif fp16 is True and not on_gpu and not cpu_has_fp16():
        problems.append("fp16.enabled: true, is not supported by this CPU. Use bf16 instead.")
    if profile.grad_accum_dtype not in (None, "fp32", "fp16", "bf16"):
        problems.append(
            f"data_types.grad_accum_dtype: {shown(profile.grad_accum_dtype)}, must be fp32, fp16 "
            f"or bf16. Correct it."
        )
    if profile.block(bf16_key).get("check_grad_overflow") is False:
        problems.append(
            f"{bf16_key}.check_grad_overflow: false, would step on non-finite gradients and report "
            f"their norm as -1. Remove the key."
        )
    return problems + _autocast_problems(profile)


def cpu_has_fp16() -> bool:
    """Return whether this CPU supports fp16 matmuls; DeepSpeed asks oneDNN in the same way."""
    import torch

    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def _autocast_problems(profile: Profile) -> list[str]:
    autocast = profile.block("torch_autocast")
    if autocast.get("enabled") is not True:
        return []
    problems = []
    dtype = autocast.get("dtype")
    if dtype not in BF16_NAMES:
        # Without a dtype torch chooses float16 on a GPU, without a loss scale. With float16 a
        # GradScaler skips steps that engine.was_step_applied() reports as taken.
        problems.append(
            f"torch_autocast.dtype: {'missing' if dtype is None else shown(dtype)}, must be "
            f"bfloat16, since DeepSpeed does not report steps that float16 autocast skips. Write "
            f'"dtype": "bfloat16".'
        )
    if profile.precision == "fp16":
        problems.append(
            "torch_autocast.enabled: true, but fp16.enabled is true too. Only one may be: remove "
            "fp16."
        )
    if profile.zero.get("zero_quantized_weights") is True:
        problems.append(
            "torch_autocast.enabled: true, does not work with zero_quantized_weights. Remove one."
        )
    return problems


def rule_notices(profile: Profile, *, on_gpu: bool, world_size: int) -> list[str]:
    """List options that are allowed, but change the loss curve or are easily misread.

    Args:
        on_gpu, world_size: as for `rule_problems`.
    """
    notices = []
    if "stage" not in profile.zero:
        notices.append(
            "zero_optimization.stage is missing: using stage 1, which has the results of stage 0 "
            "with sharded optimizer states"
        )
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
            enabled = value is True or value not in (None, False, 1)
        if enabled:
            problems.append(f"{key}: {shown(value)[:60]}, is not supported: {why}")
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
    if profile.block("wandb").get("enabled") is True:
        problems.append("wandb.enabled: true, would start a second W&B run. Use --wandb instead.")
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
    writer = checkpoint.get("writer")
    if writer is not None:
        known = WRITER_KEYS | {"type", "decoupled"}
        unknown = sorted(set(writer) - known) if isinstance(writer, Mapping) else ["writer"]
        problems += [
            f"checkpoint.writer.{key}: DeepSpeed has no such key.{did_you_mean(key, known)} "
            f"Correct or remove it."
            for key in unknown
        ]
        decoupled = block(checkpoint, "writer").get("decoupled", False)
        if decoupled is not True and decoupled is not False:
            problems.append(
                f"checkpoint.writer.decoupled: {shown(decoupled)}, must be true (write in the "
                f"background) or false (training waits). Correct it."
            )
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
