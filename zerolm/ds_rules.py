"""Which DeepSpeed configs work: rules between keys, each found by running or in DeepSpeed's source.

DeepSpeed checks some of these after minutes of start-up, some with a bare assertion, some never.
Knows nothing of the settings of a run. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.ds_config import block, offload_device, optimizer_offload, precision, zero_stage
from zerolm.ds_optimizers import optimizer_problems, scheduler_problems
from zerolm.values import shown

_ON_BY_DEFAULT = ("pipeline", "weight_quantization")  # when the block has no `enabled`
# What pretrain.py does not do, and what to do instead.
_UNSUPPORTED: dict[str, str] = {
    "autotuning": "pretrain.py has one trial, not a search. Remove the block.",
    "data_efficiency": "the order of the data is a function of the seed alone (--data). Remove it.",
    "datastates_ckpt": "needs a package of its own, and checkpoints are ours. Remove the block.",
    "expert_parallel": "experts are sharded by ZeRO here. Remove the block.",
    "hybrid_engine": "it is for reinforcement learning. Remove the block.",
    "pipeline": "models are not split into pipeline stages. Remove the block, use ZeRO 3.",
    "tensor_parallel": "ranks of a tensor group need identical data. Remove it, use ZeRO 3.",
    "weight_quantization": "it is for inference. Remove the block.",
    "sequence_parallel_size": "sequences are not split over ranks. Remove the key.",
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
    problems += _checkpoint_problems(ds_config)
    return [f"{name}: {problem}" for problem in problems]


def _zero_problems(ds_config: Mapping[str, Any], on_gpu: bool, world_size: int) -> list[str]:
    zero, stage = block(ds_config, "zero_optimization"), zero_stage(ds_config)
    written = zero.get("stage", 0)
    if isinstance(written, bool) or written not in (0, 1, 2, 3):
        return [f"zero_optimization.stage: {shown(written)}, must be 0, 1, 2 or 3. Correct it."]
    problems = []
    if offload_device(ds_config, "param") != "none" and stage != 3:
        problems.append(
            f"zero_optimization.offload_param: needs stage 3, got {stage}. Use "
            f"ds_configs/zero3_offload.json or remove the key."
        )
    if optimizer_offload(ds_config) != "none" and stage < 1:
        problems.append(
            f"zero_optimization.offload_optimizer: needs stage 1 or higher, got {stage}. Use "
            f"ds_configs/zero2_offload.json or remove the key."
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
    if zero.get("compute_grad_norm") is False:
        key = "zero_optimization.compute_grad_norm"
        problems.append(f"{key}: false, but train/grad_norm is watched here. Remove the key.")
    return problems


def _precision_problems(ds_config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    problems = []
    fp16 = block(ds_config, "fp16").get("enabled")
    bf16_key = "bfloat16" if "bfloat16" in ds_config and "bf16" not in ds_config else "bf16"
    if fp16 is True and block(ds_config, bf16_key).get("enabled") is True:
        problems.append(
            f"fp16.enabled: true, and {bf16_key}.enabled: true too. Only one can be: remove fp16."
        )
    elif fp16 is True and not on_gpu:
        problems.append("fp16.enabled: true, does not run on CPU. Use bf16 instead.")
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    if accumulation not in (None, "fp32", "fp16", "bf16"):
        problems.append(
            f"data_types.grad_accum_dtype: {shown(accumulation)}, must be fp32, fp16 or bf16. "
            f"Correct it."
        )
    elif zero_stage(ds_config) == 0 and accumulation not in (None, precision(ds_config)):
        problems.append(
            f"data_types.grad_accum_dtype: {accumulation}, must be {precision(ds_config)} like the "
            f"weights at stage 0. Use stage 1 or higher, or remove the key."
        )
    return problems


def _unsupported_problems(ds_config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, why in _UNSUPPORTED.items():
        value = ds_config.get(key)
        if isinstance(value, Mapping):
            asked = value.get("enabled", key in _ON_BY_DEFAULT) is not False
            if key == "tensor_parallel":
                asked = value.get("autotp_size", 0) not in (0, 1)
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
    return problems


def _checkpoint_problems(ds_config: Mapping[str, Any]) -> list[str]:
    checkpoint = block(ds_config, "checkpoint")
    problems = []
    if checkpoint.get("writer") is not None:
        kind = block(checkpoint, "writer").get("type", "fast")
        problems.append(
            f"checkpoint.writer: type {shown(kind)}, writes what DeepSpeed then cannot load "
            f"(DeepSpeed#8500). Remove the block: checkpoints are written by pretrain.py."
        )
    if checkpoint.get("load_universal"):
        problems.append(
            "checkpoint.load_universal: true, is not supported yet: saves are incomplete with it "
            "(DeepSpeed#7546). Remove the key; a run resumes from its own checkpoints."
        )
    if checkpoint.get("use_node_local_storage"):
        problems.append(
            "checkpoint.use_node_local_storage: true, but a checkpoint is one directory that all "
            "nodes see. Remove the key and use a shared file system for --run_dir."
        )
    return problems
