"""Estimate the memory of a rank by component, and the largest micro-batch that fits.

The inputs are the model's config, its parameter shapes and the profile. Model states follow
measurements of DeepSpeed 0.19.8, which tests/zerolm/plan/test_memory.py repeats; activations are
traced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerolm.config import defaults
from zerolm.config.settings import Recompute
from zerolm.distributed.layout import Layout
from zerolm.ds_config.optimizers import OPTIMIZERS
from zerolm.ds_config.profile import Profile
from zerolm.engine.reduction_choice import DEEPSPEED_BUCKET
from zerolm.model import activation_memory
from zerolm.model.model import hidden_size
from zerolm.plan import exchange, muon_memory
from zerolm.plan.rank_share import (
    Shapes,
    even_layers,
    parts_of_rank,
    shapes_of_rank,
    shapes_of_stages,
    shard_values,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Moments per parameter of DeepSpeed optimizers that do not keep two like AdamW.
NUM_MOMENTS = {"adagrad": 1, "lion": 1}
# DeepSpeed's Lion for CPU offload also allocates a second moment, which stays zero.
NUM_MOMENTS_ON_HOST = {"adagrad": 1}


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a rank's model states once a step's gradients are complete.

    Attributes:
        weights: weights in the model's precision; under ZeRO-3 only the rank's shard and the small
            parameters.
        gradients: accumulated gradients, including the gradients of the shard that the rank
            updates.
        optimizer: moments, and the moving average of the weights if there is one.
        master: master weights of the rank's shard.
        secondary: hpZ's second copy of the weights, held from the forward pass until the update.
        host_...: the same states in host memory, when offloaded.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    master: int = 0
    secondary: int = 0
    host_weights: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0
    host_master: int = 0

    @property
    def device(self) -> int:
        states = self.weights + self.gradients + self.optimizer + self.master
        return states + self.secondary

    @property
    def host(self) -> int:
        return self.host_weights + self.host_gradients + self.host_optimizer + self.host_master


# -------------------------------------------------------------------------------------------------
# Model states


def model_states(
    shapes: Shapes,
    profile: Profile,
    layout: Layout,
    *,
    kept_bytes: int = 0,
    stage: int | None = None,
) -> ModelStates:
    """Return the bytes of one rank's weights, gradients, moments and master weights.

    Each parameter has a weight in its precision, a gradient, and a master weight and moments, which
    are fp32 unless the profile sets bf16. ZeRO-1 shards master weights and moments; ZeRO-2 also
    shards gradients, and ZeRO-3 also weights. hpZ adds a second copy of the weights.

    Args:
        shapes: {parameter name: shape}, with each tied parameter listed once.
        profile: the profile, resolved or as written by the user.
        kept_bytes: bytes per parameter that the optimizer keeps for features.
        stage: the pipeline stage; None: the largest.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1, for what is sharded; measurements
    of DeepSpeed 0.19.8's tensors for the rest.
    """
    shapes, world_size = shapes_of_rank(shapes, layout, profile.stage_layers, stage)
    stage = profile.zero_stage
    total = sum(map(math.prod, shapes.values()))
    shard = shard_values(shapes, layout._replace(partitions_weights=stage == 3))
    weight_bytes, gradient_bytes = profile.weight_bytes, profile.gradient_bytes
    separate = _has_separate_accumulator(profile)
    device = {
        "weights": weight_bytes * (shard if stage == 3 else total),
        "gradients": gradient_bytes * (shard if stage >= 2 or not separate else total),
        "optimizer": math.ceil(profile.moment_bytes * _num_moments(profile) * shard),
        "master": profile.master_bytes * shard,
    }
    if profile.uses_muon:
        parts = parts_of_rank(shapes, layout)
        device["optimizer"] = sum(
            muon_memory.state_bytes(part, profile, ranks) for part, ranks in parts
        )
        if stage == 2:
            device["gradients"] = sum(
                muon_memory.gradient_bytes(part, profile, ranks) for part, ranks in parts
            )
    device["optimizer"] += kept_bytes * shard
    if stage == 1 and profile.keeps_micro_batch_gradients:
        device["gradients"] += weight_bytes * total  # in addition to the fp32 sums
    if stage == 3 and world_size > 1:
        device["weights"] += weight_bytes * _persistent_values(shapes, profile)
    if (ranks := secondary_ranks(profile, world_size)) > 1:
        device["secondary"] = weight_bytes * -(-total // ranks)
    host: dict[str, int] = {}
    if profile.optimizer_offload != "none":
        host = {"host_" + name: device.pop(name) for name in ("optimizer", "master")}
        # The optimizer on the host reads gradients in the precision of the master weights there,
        # and stages 1 and 2 copy weights back through a buffer as large as the shard.
        host["host_gradients"] = profile.master_bytes * shard
        if stage < 3:
            host["host_weights"] = weight_bytes * shard
        # With 16-bit master weights stage 2 accumulates in the optimizer's own buffer.
        if stage == 3 or (stage == 2 and separate and profile.master_bytes == 4):
            host["host_gradients"] += device["gradients"]
        if stage >= 2 or not separate:
            device["gradients"] = 0
    if profile.param_offload != "none":
        # The second copy is stored with the shard (`remote_device` in partition_parameters.py).
        host["host_weights"] = weight_bytes * shard + device.pop("secondary", 0)
        device["weights"] -= weight_bytes * shard
    return ModelStates(**device, **host)


def _num_moments(profile: Profile) -> float:
    """Return how many moments the optimizer stores for each parameter value."""
    known = NUM_MOMENTS if profile.optimizer_offload == "none" else NUM_MOMENTS_ON_HOST
    if profile.optimizer.kind in known:
        return known[profile.optimizer.kind]
    if profile.optimizer.kind in map(str.lower, OPTIMIZERS):
        return 2
    from zerolm.optim import trial

    return trial.num_moments(profile.optimizer.name, profile.optimizer.params)


def _has_separate_accumulator(profile: Profile) -> bool:
    """Return whether gradients are accumulated in a buffer that the optimizer does not read."""
    return (profile.accumulation or 2) > 1 or profile.gradient_bytes != profile.weight_bytes


def secondary_ranks(profile: Profile, world_size: int) -> int:
    """Return the number of ranks that share hpZ's second copy of the weights, or 1 without hpZ.

    After the first forward pass of a step, weights are gathered from this copy
    (`ds_secondary_tensor`).
    """
    size = profile.zero.get("zero_hpz_partition_size", 1)
    is_used = profile.zero_stage == 3 and isinstance(size, int) and size > 1
    return min(size, world_size) if is_used else 1


def _persistent_values(shapes: Shapes, profile: Profile) -> int:
    """Return the number of values in the small parameters that ZeRO-3 stores on every rank."""
    kept = 0
    for shape in shapes.values():
        numel = math.prod(shape)
        small = numel <= profile.buckets.persistence_threshold
        if small and kept + numel <= profile.buckets.persistence_limit:
            kept += numel
    return kept


def buffer_bytes(shapes: Shapes, profile: Profile) -> tuple[int, int]:
    """Return the peak bytes of ZeRO's buffers on a rank: (reduce buckets, gathered weights).

    `overlap_comm` uses two reduce buckets; together they are never larger than all gradients. Stage
    1 with bf16 weights reduces its sums in place, or in flattened copies, as DeepSpeed does. Stage
    3 gathers up to `stage3_max_live_parameters` weights and one prefetch bucket.
    """
    numels = [math.prod(shape) for shape in shapes.values()]
    total, largest = sum(numels), max(numels, default=0)
    value, sizes = profile.weight_bytes, profile.buckets
    if profile.uses_bf16_optimizer:
        copies = min(total, DEEPSPEED_BUCKET + largest) if profile.all_reduces else 0
        return copies * profile.communication_bytes, 0
    buckets = (2 if profile.overlap_comm else 1) * max(largest, sizes.reduce)
    bucket_bytes = min(total, buckets) * max(value, profile.communication_bytes)
    if profile.optimizer_offload != "none" and profile.zero_stage < 3:
        bucket_bytes += largest * value  # temp_grad_buffer_for_gpu_offload
    if profile.zero_stage < 3:
        return bucket_bytes, 0
    return bucket_bytes, min(total, max(sizes.max_live, largest) + sizes.prefetch) * value


def checkpoint_bytes(
    shapes: Shapes, profile: Profile, *, kept_bytes: int = 0, experts: int = 1
) -> int:
    """Return the bytes of a complete checkpoint: all ranks' weights, master weights and moments.

    Below stage 3 the weights are saved in addition to the master weights; of divided experts, only
    those of the first rank.

    Args:
        kept_bytes: bytes per parameter that the optimizer keeps for features.
        experts: number of ranks over which experts are divided.
    """
    weights = weight_file_bytes(shapes, profile, experts)
    shapes = _of_all_stages(shapes, profile)
    degree = profile.tensor_parallel
    shapes, _ = shapes_of_rank(shapes, Layout(degree, tensor=degree))
    total = sum(map(math.prod, shapes.values()))
    if profile.uses_muon:
        states = muon_memory.state_bytes(shapes, profile)
    else:
        states = math.ceil(profile.moment_bytes * _num_moments(profile) * total)
    states += kept_bytes * total
    return degree * (total * profile.master_bytes + states) + weights


def _of_all_stages(shapes: Shapes, profile: Profile) -> Shapes:
    """Return the shapes of all pipeline stages, of which two may have copies of a matrix."""
    if profile.stages == 1:
        return shapes
    layers = profile.stage_layers or even_layers(shapes, profile.stages)
    stages = enumerate(shapes_of_stages(shapes, layers))
    return {f"{stage}/{name}": shape for stage, own in stages for name, shape in own.items()}


def weight_file_bytes(shapes: Shapes, profile: Profile, experts: int = 1) -> int:
    """Return the bytes of the weights in a checkpoint, which every rank loads; 0 under ZeRO-3."""
    if profile.zero_stage == 3:
        return 0
    shapes = _of_all_stages(shapes, profile)
    degree = profile.tensor_parallel
    shapes, _ = shapes_of_rank(shapes, Layout(degree * experts, tensor=degree, experts=experts))
    return degree * profile.weight_bytes * sum(map(math.prod, shapes.values()))


# -------------------------------------------------------------------------------------------------
# Activations


def activations_of(
    config: "PretrainedConfig",
    seq_len: int,
    precision: str,
    *,
    eager: bool = False,
    compiled: bool = False,
    chunk_tokens: int = 0,
) -> activation_memory.Activations:
    """Trace the activations of one sequence on a rank, or estimate them if tracing fails.

    Args:
        eager: eager attention, which keeps its score matrices.
        compiled: blocks are compiled; the compiler chooses the activations to keep.
        chunk_tokens: tokens per chunk of the loss; 0 to compute the loss in one chunk.
    """
    try:
        found = activation_memory.trace(config, seq_len, precision, eager=eager, compiled=compiled)
    except Exception:  # a model whose control flow depends on values cannot be traced
        if compiled:
            return activations_of(
                config, seq_len, precision, eager=eager, chunk_tokens=chunk_tokens
            )
        found = _estimated(config, seq_len, precision)
    return found.chunked(chunk_tokens, config, precision) if chunk_tokens else found


def _estimated(
    config: "PretrainedConfig", seq_len: int, precision: str
) -> activation_memory.Activations:
    text = config.get_text_config()
    hidden = hidden_size(config) or 0
    width = getattr(text, "moe_intermediate_size", None)
    width = width or getattr(text, "intermediate_size", None) or 4 * hidden
    experts = getattr(text, "num_experts_per_tok", None) or 1
    value = 4 if precision == "fp32" else 2
    layers = getattr(text, "num_hidden_layers", None) or 0
    layer = seq_len * value * defaults.layer_activations(hidden, width * experts)
    return activation_memory.Activations(
        layers=layers * layer,
        largest_layer=layer,
        inputs=layers * seq_len * value * hidden,
        outside=2 * seq_len * value * hidden,
        loss=4 * seq_len * text.vocab_size,
        loss_peak=activation_memory.LOGIT_GRADIENT_BYTES * seq_len * text.vocab_size,
    )


def stage_activations(
    found: activation_memory.Activations, layers: Sequence[int], stage: int, micro_batches: int
) -> activation_memory.Activations:
    """Return the activations of a pipeline stage, with those of all micro-batches in flight.

    In the order 1F1B, a stage stores as many micro-batches as there are stages from it on. Besides
    what its blocks save, it stores the hidden states that it sent. The last stage computes the
    loss.

    Args:
        found: of the whole model.
        layers: number of blocks of each stage.
        micro_batches: of a step on a replica.
    """
    stored = min(len(layers) - stage, micro_batches)
    share = stored * layers[stage] / sum(layers)
    is_last = stage == len(layers) - 1
    sent = found.inputs // sum(layers)  # hidden states of one micro-batch
    return replace(
        found,
        layers=int(found.layers * share),
        inputs=int(found.inputs * share),
        selective=int(found.selective * share),
        outside=found.outside if is_last else (stored + 2) * sent,  # and their gradient, twice
        loss=found.loss if is_last else 0,
        loss_peak=found.loss_peak if is_last else 0,
        chunk=found.chunk if is_last else 0,
    )


def stage_bytes(
    config: "PretrainedConfig",
    shapes: Shapes,
    profile: Profile,
    layout: Layout,
    found: activation_memory.Activations,
    checkpointing: Recompute,
    seq_len: int,
    sequences: int,
    micro_batches: int,
    kept_bytes: int = 0,
    rank_imbalance: float = exchange.IMBALANCE,
) -> list[int]:
    """Return the peak bytes of each pipeline stage: states, buffers and activations.

    Args:
        found: activations of a sequence in the whole model.
        seq_len: tokens of a sequence.
        sequences: in a micro-batch.
        micro_batches: of a step on a replica.
    """
    layers = profile.stage_layers or even_layers(shapes, layout.stages)
    total = []
    for stage in range(layout.stages):
        own, _ = shapes_of_rank(shapes, layout, layers, stage)
        states = model_states(shapes, profile, layout, kept_bytes=kept_bytes, stage=stage)
        activations = stage_activations(found, layers, stage, micro_batches)
        peak = activations.peak(checkpointing, sequences) + exchange.memory_bytes(
            config, own, layout, sequences * seq_len, profile.weight_bytes, bool(checkpointing),
            rank_imbalance, min(layout.stages - stage, micro_batches),
        )  # fmt: skip
        total.append(states.device + sum(buffer_bytes(own, profile)) + peak)
    return total


def activation_bytes(
    config: "PretrainedConfig",
    seq_len: int,
    precision: str,
    checkpointing: Recompute,
    sequences: int = 1,
    chunk_tokens: int = 0,
    compiled: bool = False,
) -> int:
    """Return the peak bytes of a micro-batch's activations, including logits and loss.

    Args:
        chunk_tokens: tokens per chunk of the loss; 0 to compute the loss in one chunk.
        compiled: blocks are compiled.
    """
    found = activations_of(config, seq_len, precision, compiled=compiled, chunk_tokens=chunk_tokens)
    return found.peak(checkpointing, sequences)


def fitting_micro_batch(
    per_rank: int,
    seq_len: int,
    *,
    config: "PretrainedConfig",
    shapes: Shapes,
    profile: Profile,
    layout: Layout,
    memory_bytes: int | None,
    checkpointing: Recompute,
    loss_chunk_tokens: int = 0,
    kept_bytes: int = 0,
    compiled: bool = False,
    rank_imbalance: float = exchange.IMBALANCE,
) -> int:
    """Return the largest micro-batch size that fits: a power of two that divides `per_rank`.

    Args:
        per_rank: sequences per rank and optimizer step.
        seq_len: tokens per sequence on one rank.
        memory_bytes: device memory; None on a CPU, where a few thousand tokens use all cores.
        loss_chunk_tokens: tokens per chunk of the loss; 0 to compute the loss in one chunk.
        kept_bytes: bytes per parameter that the optimizer keeps for features.
        compiled: blocks are compiled.
        rank_imbalance: see `exchange.busiest_share`.
    """
    if memory_bytes is None:
        largest = max(1, per_rank // layout.stages)  # so that no stage mostly waits
        size = defaults.micro_batch_size(per_rank, seq_len, defaults.CPU_MICRO_BATCH_TOKENS)
        while size > largest:
            size //= 2
        return max(1, size)
    free = int(memory_bytes * defaults.MEMORY_SHARE)
    sizes = defaults.micro_batch_candidates(per_rank)
    if layout.stages > 1:
        found = activations_of(
            config, seq_len, profile.precision, compiled=compiled, chunk_tokens=loss_chunk_tokens
        )

        def fits(size: int) -> bool:
            used = stage_bytes(
                config, shapes, profile, layout, found, checkpointing, seq_len, size,
                per_rank // size, kept_bytes, rank_imbalance,
            )  # fmt: skip
            return max(used) <= free

        enough = [size for size in sizes if per_rank // size >= layout.stages]
        return max(filter(fits, enough), default=1)
    states = model_states(shapes, profile, layout, kept_bytes=kept_bytes)
    free -= states.device + sum(buffer_bytes(shapes_of_rank(shapes, layout)[0], profile))
    found = activations_of(
        config,
        seq_len,
        profile.precision,
        compiled=compiled,
        chunk_tokens=loss_chunk_tokens,
    )
    row = exchange.memory_bytes(
        config, shapes, layout, seq_len, profile.weight_bytes, bool(checkpointing), rank_imbalance
    )
    fitting = (size for size in sizes if found.peak(checkpointing, size) + size * row <= free)
    return max(fitting, default=1)
