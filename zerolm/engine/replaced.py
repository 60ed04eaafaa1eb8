"""`REPLACED`: every attribute of DeepSpeed, torch and transformers that this project replaces.

`install` and `installed` do so, and nothing else does. Checked with DeepSpeed 0.19.8, torch 2.13
and transformers 5.23; a test fails if an attribute is no longer there, or if other code replaces
one. Entries in tables of functions that a library offers are not replacements. Standard library
only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Why an attribute is replaced.

    Attributes:
        by: modules of `zerolm` that replace it.
        why: what the original does or lacks.
        undone: whether the replacement ends with a context; if not, it lasts as long as the object,
            or the process.
    """

    by: str
    why: str
    undone: bool = False


UNDONE = True
ZERO, TRANSFORMERS = "deepspeed.runtime.zero", "transformers.integrations"
# {module or module:class: {attribute: row}}
REPLACED: dict[str, dict[str, Row]] = {
    "deepspeed": {"set_optimizer_flags": Row("engine.muon", "tags embeddings for Muon", UNDONE)},
    "deepspeed.launcher.launch": {
        "subprocess": Row("train.node_launcher", "each rank imports for itself"),
        "time": Row("train.node_launcher", "waits up to a second when all ranks have ended"),
    },
    "deepspeed.launcher.multinode_runner:MultiNodeRunner": {
        "add_export": Row("engine.launcher", "exports the working directory as PYTHONPATH"),
    },
    "deepspeed.launcher.runner": {
        "subprocess": Row("engine.launcher", "starts DeepSpeed's own node launcher"),
    },
    "deepspeed.ops.lion:FusedLion": {
        "step": Row("engine.kernel_fixes", "moves values that have had no gradient"),
    },
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": {
        "_update_hp_grad": Row("engine.gradient_sums", "moves 18 bytes per micro-batch, not 10"),
        "clear_hp_grads": Row("engine.gradient_sums", "clears twice: 4 bytes per step"),
        "get_grads_for_norm": Row("engine.step_gate", "cannot refuse a step by its norm"),
    },
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": {
        "load": Row("ds_files.checkpoints", "unpickles any class", UNDONE),
    },
    "deepspeed.runtime.compiler": {
        "compile": Row("engine.muon", "imports torch._inductor for Muon in every run", UNDONE),
    },
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        "_configure_distributed_model": Row(
            "engine.experts", "knows only the experts of DeepSpeed's own layers", UNDONE
        ),
        "has_moe_layers": Row("engine.experts", "writes a file for each expert", UNDONE),
        "checkpoint_engine": Row("ds_files.checkpoints", "writes files while training waits"),
        "_copy_recovery_script": Row("ds_files.checkpoints", "writes a file"),
        "_get_all_ckpt_names": Row("ds_files.checkpoints", "every rank lists all files", UNDONE),
        "_get_all_zero_checkpoint_names": Row("ds_files.checkpoints", "likewise", UNDONE),
        "_configure_bf16_optimizer": Row("engine.shard_groups", "shards over all ranks", UNDONE),
        "buffered_allreduce_fallback": Row(
            "engine.gradient_reduction engine.gradient_sums",
            "sends 8 bytes per step, not 4; on a single rank, moves 16 to 24 for nothing",
        ),
    },
    f"{ZERO}.linear": {
        "is_zero_param": Row("engine.zero3_hooks", "makes torch compile a graph for each block"),
    },
    f"{ZERO}.linear:LinearFunctionForZeroStage3": {
        "forward": Row("engine.zero3_hooks", "adds a bias in place to an output that is kept"),
    },
    f"{ZERO}.muon.original_muon": {
        "muon_update": Row("engine.muon", "scales each matrix as if its shape were (out, in)"),
    },
    f"{ZERO}.parameter_offload": {
        "register_external_parameter": Row("engine.zero3_hooks", "runs in dispatch modes"),
    },
    f"{ZERO}.parameter_offload:DeepSpeedZeRoOffload": {
        "pre_sub_module_forward_function": Row(
            "engine.zero3_hooks", "runs in dispatch modes, and its stack grows by recomputations"
        ),
        "post_sub_module_forward_function": Row("engine.zero3_hooks", "runs in dispatch modes"),
    },
    f"{ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator": {
        "construct_parameter_trace_from_module_trace": Row(
            "engine.zero3_hooks", "lacks the external weights that were gathered already"
        ),
        "trace_prologue": Row("engine.zero3_hooks", "keeps a trace that lacks external weights"),
        "fetch_sub_module": Row("engine.zero3_hooks", "gathers many blocks ahead of the device"),
    },
    f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer": {
        "_add_to_grad_partition_buffer": Row("engine.gradient_sums", "moves 18 bytes, not 10"),
        "scaled_global_norm": Row("engine.step_gate", "cannot refuse a step by its norm"),
        "_update_scale": Row("engine.step_gate", "takes a refused step for an overflow"),
    },
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3": {
        "_get_norm_groups": Row("engine.step_gate", "cannot refuse a step by its norm"),
        "_apply_muon_to_accumulated_grads": Row("engine.step_gate", "ignores a refusal"),
        "_apply_muon_updates_cpu_offload": Row("engine.step_gate", "ignores a refusal"),
    },
    "torch.nn:Linear": {"__class__": Row("model.chunked_loss fp8.layers", "no chunks, no fp8")},
    "torch.nn:Module": {
        "forward": Row("model.compile model.activation_memory model.stages", "whole, not compiled"),
        "register_parameter": Row("model.stages", "allocates what other stages have", UNDONE),
    },
    "torch.utils.cpp_extension": {
        "_jit_compile": Row("engine.operators", "waits forever for the lock of a killed build"),
        "_run_ninja_build": Row("engine.operators", "compiles for minutes without a line"),
    },
    "tqdm:tqdm": {"__init__": Row("evaluate.lm_eval", "lm-eval cannot disable all bars", UNDONE)},
    "transformers:PretrainedConfig": {
        "__getattribute__": Row("model.config_keys", "does not record what is read", UNDONE),
    },
    "transformers:PreTrainedModel": {
        "_check_and_adjust_attn_implementation": Row(
            "attention.stand_ins", "refuses the kernels of a GPU on a CPU", UNDONE
        ),
    },
    "transformers.masking_utils": {
        "find_packed_sequence_indices": Row("model.document_mask", "guesses documents", UNDONE),
    },
    "transformers.modeling_flash_attention_utils": {
        "_lazy_imports": Row("attention.stand_ins", "imports the kernels of a GPU", UNDONE),
        "_loaded_implementation": Row("attention.stand_ins", "the imported kernel", UNDONE),
    },
    f"{TRANSFORMERS}.flash_attention": {
        "get_target_dtype": Row("attention.stand_ins", "casts float32", UNDONE),
    },
    f"{TRANSFORMERS}.hub_kernels": {
        "is_torchdynamo_exporting": Row(
            "preflight.observed_model", "if false, kernels of a GPU are called on a CPU", UNDONE
        ),
    },
    f"{TRANSFORMERS}.moe": {
        "_grouped_mm": Row("model.activation_memory", "fails on the meta device", UNDONE),
    },
}
NAMES = {name for rows in REPLACED.values() for name in rows}


def install(owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute permanently."""
    assert name in NAMES, f"{name} is not in REPLACED"
    setattr(owner, name, replacement)


@contextmanager
def installed(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute inside this context."""
    is_own, original = name in vars(owner), vars(owner).get(name)
    install(owner, name, replacement)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
