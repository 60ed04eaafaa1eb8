"""Which DeepSpeed configs work: rules between keys, each found by running or in DeepSpeed's source.

DeepSpeed checks some of these after minutes of start-up, some with a bare assertion, some never.
Knows nothing of the settings of a run. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any

from zerolm import muon
from zerolm.ds_config import block, offload_device, precision, zero_stage
from zerolm.ds_optimizers import optimizer_problems, scheduler_problems
from zerolm.errors import did_you_mean
from zerolm.parallel_rules import ds_problems as parallel_problems
from zerolm.run_settings import SECRET_KEY
from zerolm.values import shown

# How deepspeed.runtime.config.DtypeEnum writes it.
BF16_NAMES = ("bfloat16", "bf16", "torch.bfloat16")
WRITER_KEYS = frozenset(
    {"data_parallel", "io_buffer_size", "io_buffer_double", "io_multiplier", "show_statistics"}
)
_ON_BY_DEFAULT = ("pipeline", "weight_quantization")  # when the block has no `enabled`
# What pretrain.py does not do, and what to do instead.
_UNSUPPORTED: dict[str, str] = {
    "autotuning": "pretrain.py has one trial, not a search. Remove the block.",
    "data_efficiency": "the order of the data is a function of the seed alone (--data). Remove it.",
    "datastates_ckpt": "needs a package of its own, and checkpoints are ours. Remove the block.",
    "expert_parallel": "DeepSpeed's AutoEP fails with transformers 5.23, and nothing here reads "
    "its checkpoints (docs/parallelism.md). Remove the block, use ZeRO 3.",
    "fp8": "no product in 8 bits is offered, see docs/speed.md. Remove the block, use bf16.",
    "hybrid_engine": "it is for reinforcement learning. Remove the block.",
    "pipeline": "DeepSpeed's engine for it takes its steps inside a loop of its own, where none "
    "can be looked at (docs/parallelism.md). Remove the block, use ZeRO 3.",
    "weight_quantization": "it is for inference. Remove the block.",
    "data_parallel_size": "it is the world size that the launcher starts. Remove the key.",
}


def rule_problems(
    ds_config: Mapping[str, Any], name: str, *, on_gpu: bool, world_size: int
) -> list[str]:
    """Find combinations that DeepSpeed or pretrain.py cannot run.

    Args:
        ds_config: as the user wrote it.
        name: of the file, for the messages.
        on_gpu: whether the run has accelerators.
        world_size: number of ranks.
    """
    problems = _zero_problems(ds_config, on_gpu, world_size)
    problems += _precision_problems(ds_config, on_gpu)
    problems += optimizer_problems(ds_config, on_gpu)
    problems += scheduler_problems(ds_config)
    problems += _unsupported_problems(ds_config)
    problems += parallel_problems(ds_config, world_size)
    problems += _checkpoint_problems(ds_config)
    return [f"{name}: {problem}" for problem in problems]


def _zero_problems(ds_config: Mapping[str, Any], on_gpu: bool, world_size: int) -> list[str]:
    zero, stage = block(ds_config, "zero_optimization"), zero_stage(ds_config)
    written = zero.get("stage", 1)
    if isinstance(written, bool) or written not in (0, 1, 2, 3):
        return [f"zero_optimization.stage: {shown(written)}, must be 1, 2 or 3. Correct it."]
    if written == 0:
        # engine.py scales the loss for a ZeROOptimizer only, so that gradients in fp16 would be
        # 2^16 too small; in fp32 there is no gradient norm; nothing reads its checkpoints.
        return [
            "zero_optimization.stage: 0, has no loss scaling, gradient norm or export. Use 1: the "
            "same numbers, with each optimizer state kept once."
        ]
    problems = _zero_option_problems(zero)
    if offload_device(ds_config, "param") != "none" and stage != 3:
        problems.append(
            f"zero_optimization.offload_param: needs stage 3, got {stage}. Use "
            f"ds_configs/zero3_offload.json or remove the key."
        )
    for what in ("optimizer", "param"):
        if offload_device(ds_config, what) == "nvme":
            key = f"zero_optimization.offload_{what}"
            if stage != 3:
                problems.append(f"{key}.device: nvme, needs stage 3, got {stage}. Use cpu instead.")
            if not block(zero, f"offload_{what}").get("nvme_path"):
                problems.append(
                    f"{key}.nvme_path: missing, device nvme needs it. Name a directory."
                )
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) is True and not on_gpu:
            problems.append(f"zero_optimization.{key}: true, needs a GPU. Remove the key.")
    if zero.get("zero_quantized_nontrainable_weights") is True:
        key = "zero_optimization.zero_quantized_nontrainable_weights"
        problems.append(f"{key}: true, but every weight is trained here. Remove the key.")
    secondary = zero.get("zero_hpz_partition_size", 1)
    if isinstance(secondary, int) and secondary > 1 and world_size % secondary:
        key = "zero_optimization.zero_hpz_partition_size"
        problems.append(f"{key}: {secondary}, must divide the world size {world_size}. Change it.")
    return problems


def _zero_option_problems(zero: Mapping[str, Any]) -> list[str]:
    """Find options that would change what is learned, or hide how it goes."""
    found: dict[str, str] = {}
    if zero.get("compute_grad_norm") is False:
        found["compute_grad_norm"] = "false, but train/grad_norm is watched here"
    if zero.get("load_from_fp32_weights") is False:
        found["load_from_fp32_weights"] = (
            "false, would resume from weights rounded to 16 bits, on another curve"
        )
    if zero.get("zenflow") is not None:
        found["zenflow"] = "delays the updates of most weights, which is another curve"
    return [
        f"zero_optimization.{key}: {why}. Remove the {'block' if key == 'zenflow' else 'key'}."
        for key, why in found.items()
    ]


def _precision_problems(ds_config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    problems = []
    fp16 = block(ds_config, "fp16").get("enabled")
    bf16_key = "bfloat16" if "bfloat16" in ds_config and "bf16" not in ds_config else "bf16"
    if fp16 is True and block(ds_config, bf16_key).get("enabled") is True:
        problems.append(
            f"fp16.enabled: true, and {bf16_key}.enabled: true too. Only one can be: remove fp16."
        )
    elif fp16 is True and not on_gpu and not cpu_has_fp16():
        problems.append("fp16.enabled: true, does not run on this CPU. Use bf16 instead.")
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    if accumulation not in (None, "fp32", "fp16", "bf16"):
        problems.append(
            f"data_types.grad_accum_dtype: {shown(accumulation)}, must be fp32, fp16 or bf16. "
            f"Correct it."
        )
    if block(ds_config, bf16_key).get("check_grad_overflow") is False:
        problems.append(
            f"{bf16_key}.check_grad_overflow: false, would take a step on gradients that are not "
            f"finite, and report their norm as -1. Remove the key."
        )
    return problems + _autocast_problems(ds_config)


def cpu_has_fp16() -> bool:
    """Tell whether this CPU multiplies in fp16, which DeepSpeed asks oneDNN."""
    import torch

    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return torch.backends.mkldnn.is_available() and asked is not None and bool(asked())


def _autocast_problems(ds_config: Mapping[str, Any]) -> list[str]:
    autocast = block(ds_config, "torch_autocast")
    if autocast.get("enabled") is not True:
        return []
    problems = []
    dtype = autocast.get("dtype")
    if dtype not in BF16_NAMES:
        # Without a dtype DeepSpeed lets torch choose, on a GPU float16 without a loss scale. With
        # float16 a GradScaler skips steps that engine.was_step_applied() says were taken.
        said = "missing" if dtype is None else shown(dtype)
        problems.append(
            f"torch_autocast.dtype: {said}, only bfloat16 is exact about steps that are skipped. "
            f'Write "dtype": "bfloat16".'
        )
    if precision(ds_config) == "fp16":
        problems.append(
            "torch_autocast.enabled: true, and fp16.enabled: true too. Only one can be: remove "
            "fp16."
        )
    if block(ds_config, "zero_optimization").get("zero_quantized_weights") is True:
        problems.append(
            "torch_autocast.enabled: true, does not work with zero_quantized_weights. Remove one."
        )
    return problems


def rule_notices(
    ds_config: Mapping[str, Any], name: str, *, on_gpu: bool, world_size: int
) -> list[str]:
    """Say what is allowed, but is not the same curve on another machine, or not what it seems.

    Args:
        ds_config, name, on_gpu, world_size: as for `rule_problems`.
    """
    zero, notices = block(ds_config, "zero_optimization"), []
    if "stage" not in zero:
        notices.append(
            "no zero_optimization.stage: the run has stage 1, the same numbers with each optimizer "
            "state kept once"
        )
    if block(ds_config, "checkpoint").get("writer") is not None:
        notices.append(
            "checkpoint.writer: pretrain.py's own writer takes its place, which follows "
            "`decoupled`; DeepSpeed's write what it then cannot load (DeepSpeed#8500)"
        )
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    if precision(ds_config) == "bf16" and accumulation != "fp32":
        notices.append(
            "gradients are accumulated in bf16; data_types.grad_accum_dtype fp32 is more exact"
        )
    notices += muon.notices(ds_config)
    quantized = [
        f"zero_optimization.{key}"
        for key in ("zero_quantized_weights", "zero_quantized_gradients")
        if zero.get(key) is True
    ]
    if quantized and on_gpu:
        notices.append(f"{' and '.join(quantized)}: rounds what ranks exchange: another curve")
    reduction, remedy = _reduction(ds_config)
    if reduction != "fp32" and world_size > 1:
        notices.append(
            f"ranks add up their gradients in {reduction}, so the curve depends a little on the "
            f"world size{remedy}"
        )
    return [f"{name}: {notice}" for notice in notices]


def _reduction(ds_config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the precision in which gradients are summed over ranks, and how to have fp32."""
    if block(ds_config, "torch_autocast").get("enabled") is True:
        # deepspeed/runtime/torch_autocast.py sets it for each weight of a linear layer.
        return "bf16", "; torch_autocast decides that"
    kind = ds_config.get("communication_data_type") or precision(ds_config)
    return str(kind), '; "communication_data_type": "fp32" is exact, at twice the bytes'


def _unsupported_problems(ds_config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, why in _UNSUPPORTED.items():
        value = ds_config.get(key)
        if isinstance(value, Mapping):
            asked = value.get("enabled", key in _ON_BY_DEFAULT) is not False
        else:
            asked = value is True or value not in (None, False, 1)
        if asked:
            problems.append(f"{key}: {shown(value)[:60]}, is not supported: {why}")
    if ds_config.get("gradient_allreduce_op", "mean") != "mean":
        problems.append(
            "gradient_allreduce_op: sum, makes gradients grow with the world size. Use mean."
        )
    if ds_config.get("managed_gradient_accumulation") is False:
        problems.append("managed_gradient_accumulation: false, is not supported. Remove the key.")
    if block(ds_config, "compile").get("deepcompile") is True:
        problems.append("compile.deepcompile: true, is not supported. Use --compile instead.")
    if block(ds_config, "wandb").get("enabled") is True:
        problems.append("wandb.enabled: true, would start a second W&B run. Use --wandb instead.")
    return [*problems, *_secrets(ds_config)]


def _secrets(value: Mapping[str, Any], where: str = "") -> list[str]:
    """Refuse secrets, since the whole config stands in run.json, on the run's page and in W&B."""
    problems = []
    for key, part in value.items():
        if isinstance(part, Mapping):
            problems += _secrets(part, f"{where}{key}.")
        elif isinstance(part, str) and part and SECRET_KEY.search(key):
            problems.append(
                f"{where}{key}: a secret, which everybody would see who sees the run. Remove it, "
                f"and set it in the environment (for Comet: COMET_API_KEY)."
            )
    return problems


def _checkpoint_problems(ds_config: Mapping[str, Any]) -> list[str]:
    checkpoint = block(ds_config, "checkpoint")
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
                f"checkpoint.writer.decoupled: {shown(decoupled)}, must be true (write behind "
                f"training) or false (training waits). Correct it."
            )
    if checkpoint.get("load_universal"):
        problems.append(
            "checkpoint.load_universal: true, is not supported: saves are incomplete with it "
            "(DeepSpeed#7546). Remove the key; a run goes on at any world size and stage without."
        )
    if checkpoint.get("use_node_local_storage"):
        problems.append(
            "checkpoint.use_node_local_storage: true, but a checkpoint is one directory that all "
            "nodes see. Remove the key and use a shared file system for --run_dir."
        )
    return problems
