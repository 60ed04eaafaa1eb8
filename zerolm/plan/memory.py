"""What a rank needs in memory, line by line, and the largest micro-batch that fits.

Knows the model by its config and shapes, and the ZeRO profile. Model states are what DeepSpeed
0.19.8 was found to keep (tests/zerolm/test_memory.py measures it); activations are traced.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolm import activations, defaults, ds_config, muon, parallel
from zerolm.recomputation import Recompute

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]

# Values that an optimizer keeps of each parameter, where they are not AdamW's two.
MOMENTS = {"adagrad": 1, "lion": 1, "sgd": 0}
# On the CPU DeepSpeed's Lion makes Adam's second moment too, and leaves it zero.
MOMENTS_ON_HOST = {"adagrad": 1, "sgd": 0}
# deepspeed/runtime/zero/config.py, 0.19.8: what DeepSpeed takes where the JSON says nothing
REDUCE_BUCKET, PREFETCH_BUCKET, PERSISTENCE_THRESHOLD = 500_000_000, 50_000_000, 100_000
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a rank's model states when the gradient of a step is whole.

    Attributes:
        weights: that the model computes with; ZeRO-3's share of them, and the small ones it keeps.
        gradients: as they are accumulated, and the share that the rank updates.
        optimizer: moments.
        master: float32 weights of the rank's share.
        host_...: the same on the host, by offload.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    master: int = 0
    host_weights: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0
    host_master: int = 0

    @property
    def device(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.master

    @property
    def host(self) -> int:
        return self.host_weights + self.host_gradients + self.host_optimizer + self.host_master


def hidden_size(config: "PretrainedConfig") -> int | None:
    """Return the model's width, the largest of several, as Hugging Face's Trainer does."""
    text = config.get_text_config()
    size = getattr(text, "hidden_size", None)
    return size or max(getattr(text, "hidden_sizes", None) or [0]) or None


# -------------------------------------------------------------------------------------------------
# Model states


def model_states(shapes: Shapes, ds: Mapping[str, Any], world_size: int) -> ModelStates:
    """Return the bytes of weights, gradients, moments and master weights of one rank.

    Per parameter: the weight in its precision, a master weight in fp32, the optimizer's moments in
    fp32 and a gradient. ZeRO 1 divides master weights and moments by the world size, 2 the
    gradients too, 3 the weights too.

    Args:
        shapes: of every parameter, tied ones once.
        ds: resolved, or as written.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1, for what is divided; DeepSpeed
    0.19.8's attributes, measured, for what is kept beside.
    """
    shapes, world_size = parallel.held(shapes, ds, world_size)
    stage = ds_config.zero_stage(ds)
    optimizer, weights = (ds_config.offload_device(ds, what) for what in ("optimizer", "param"))
    total = sum(map(math.prod, shapes.values()))
    share = -(-total // world_size)
    if stage == 3:  # cuts each parameter by itself
        share = sum(-(-math.prod(shape) // world_size) for shape in shapes.values())
    value = 4 if ds_config.precision(ds) == "fp32" else 2
    accumulated = gradient_bytes(ds)
    split = share if stage else total
    summed = _sums_before(ds)
    device = {
        "weights": value * (share if stage == 3 else total),
        "gradients": accumulated * (split if stage >= 2 or (stage and not summed) else total),
        "optimizer": 4 * _moments(ds) * split,
        "master": 0 if stage == 0 and value == 4 else 4 * split,
    }
    if muon.chosen(ds):
        device["optimizer"] = muon.state_bytes(shapes, ds, world_size if stage else 1)
        if stage == 2:
            device["gradients"] = muon.gradient_bytes(shapes, ds, world_size, accumulated)
    if stage == 1 and optimizer == "none" and accumulated != value:
        device["gradients"] += value * total  # the micro-batch's own, beside the fp32 sums
    if stage == 3 and world_size > 1:
        device["weights"] += value * _persistent(shapes, ds)
    if optimizer == "none":
        return ModelStates(**device)
    host = {"host_" + name: device.pop(name) for name in ("optimizer", "master")}
    # The optimizer on the host reads fp32 gradients there, and stage 1 and 2 copy weights back
    # through a buffer of the share's size.
    host["host_gradients"] = 4 * share
    if stage < 3:
        host["host_weights"] = value * share
    if stage == 3 or (stage == 2 and summed):
        host["host_gradients"] += device["gradients"]
    if stage >= 2 or not summed:
        device["gradients"] = 0
    if weights != "none":
        host["host_weights"] = value * share
        device["weights"] -= value * share
    return ModelStates(**device, **host)


def _moments(ds: Mapping[str, Any]) -> int:
    """Return how many values the optimizer keeps of each parameter."""
    offloaded = ds_config.optimizer_offload(ds) != "none"
    known = MOMENTS_ON_HOST if offloaded else MOMENTS
    return known.get(ds_config.optimizer_type(ds).lower(), 2)


def state_bytes(shapes: Shapes, ds: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Return the bytes of weights, gradients and optimizer states per rank: (device, host)."""
    states = model_states(shapes, ds, world_size)
    return states.device, states.host


def gradient_bytes(ds: Mapping[str, Any]) -> int:
    """Return the bytes of an accumulated gradient value."""
    accumulated = ds_config.block(ds, "data_types").get("grad_accum_dtype")
    return 4 if (accumulated or ds_config.precision(ds)) == "fp32" else 2


def communication_bytes(ds: Mapping[str, Any]) -> int:
    """Return the bytes of a gradient value as ranks exchange it."""
    kind = ds.get("communication_data_type") or ds_config.precision(ds)
    return 4 if kind == "fp32" else 2


def _sums_before(ds: Mapping[str, Any]) -> bool:
    """Whether gradients are summed over micro-batches apart from what the optimizer reads."""
    value = 4 if ds_config.precision(ds) == "fp32" else 2
    accumulation = ds_config.count(ds, "gradient_accumulation_steps") or 2
    return accumulation > 1 or gradient_bytes(ds) != value


def _persistent(shapes: Shapes, ds: Mapping[str, Any]) -> int:
    """Return how many values ZeRO-3 keeps whole on every rank: those of small parameters."""
    key = "stage3_param_persistence_threshold"
    threshold = _zero_number(ds, key, PERSISTENCE_THRESHOLD)
    limit = _zero_number(ds, "stage3_model_persistence_threshold", 1 << 62)
    kept = 0
    for shape in shapes.values():
        numel = math.prod(shape)
        if numel <= threshold and kept + numel <= limit:
            kept += numel
    return kept


def _zero_number(ds: Mapping[str, Any], key: str, default: int) -> int:
    value = ds_config.block(ds, "zero_optimization").get(key)
    return int(value) if ds_config.is_number(value) else default


def buffer_bytes(shapes: Shapes, ds: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of ZeRO's buffers on a rank at their fullest: (buckets, gathered weights).

    Buckets hold gradients on their way, two with `overlap_comm`, and never more than all of them.
    Under stage 3 the weights in use are gathered: as many as `stage3_max_live_parameters`, and a
    prefetched bucket of the next.
    """
    numels = [math.prod(shape) for shape in shapes.values()]
    total, largest = sum(numels), max(numels, default=0)
    zero = ds_config.block(ds, "zero_optimization")
    stage = ds_config.zero_stage(ds)
    value = 4 if ds_config.precision(ds) == "fp32" else 2
    bucket = max(largest, _zero_number(ds, "reduce_bucket_size", REDUCE_BUCKET))
    buckets = (2 if zero.get("overlap_comm") else 1) * bucket
    buckets = min(total, buckets) * max(value, communication_bytes(ds))
    if ds_config.optimizer_offload(ds) != "none" and stage < 3:
        buckets += largest * value  # temp_grad_buffer_for_gpu_offload
    if stage < 3:
        return buckets, 0
    live = _zero_number(ds, "stage3_max_live_parameters", MAX_LIVE_PARAMETERS)
    prefetch = _zero_number(ds, "stage3_prefetch_bucket_size", PREFETCH_BUCKET)
    return buckets, min(total, max(live, largest) + prefetch) * value


def checkpoint_bytes(shapes: Shapes, ds: Mapping[str, Any]) -> int:
    """Return the bytes of one checkpoint of all ranks: weights, master weights, moments.

    Below stage 3 the weights are there beside the fp32 master weights of the optimizer.
    """
    value = 4
    if ds_config.zero_stage(ds) < 3:
        value += 4 if ds_config.precision(ds) == "fp32" else 2
    parts = parallel.parts(ds)
    shapes, _ = parallel.held(shapes, ds, parts)
    total = sum(map(math.prod, shapes.values()))
    states = muon.state_bytes(shapes, ds) if muon.chosen(ds) else 4 * _moments(ds) * total
    return parts * (total * value + states)


# -------------------------------------------------------------------------------------------------
# Activations


def activations_of(
    config: "PretrainedConfig",
    seq_len: int,
    precision: str,
    *,
    eager: bool = False,
    chunk_tokens: int = 0,
) -> activations.Activations:
    """Return what one sequence keeps for its backward pass: traced, or estimated.

    Args:
        precision: of the weights.
        eager: attention that keeps all its scores.
        chunk_tokens: whose logits are there at a time; 0: all.
    """
    try:
        found = activations.trace(config, seq_len, precision, eager=eager)
    except Exception:  # a class that computes with values cannot be traced: the formula stays
        found = _estimated(config, seq_len, precision)
    return found.chunked(chunk_tokens, config, precision) if chunk_tokens else found


def _estimated(config: "PretrainedConfig", seq_len: int, precision: str) -> activations.Activations:
    text = config.get_text_config()
    hidden = hidden_size(config) or 0
    width = getattr(text, "moe_intermediate_size", None)
    width = width or getattr(text, "intermediate_size", None) or 4 * hidden
    experts = getattr(text, "num_experts_per_tok", None) or 1
    value = 4 if precision == "fp32" else 2
    layers = getattr(text, "num_hidden_layers", None) or 0
    layer = seq_len * value * defaults.layer_activations(hidden, width * experts)
    return activations.Activations(
        layers=layers * layer,
        largest_layer=layer,
        inputs=layers * seq_len * value * hidden,
        outside=2 * seq_len * value * hidden,
        loss=4 * seq_len * text.vocab_size,
        loss_peak=activations.LOGIT_GRADIENT_BYTES * seq_len * text.vocab_size,
    )


def activation_bytes(
    config: "PretrainedConfig",
    seq_len: int,
    precision: str,
    checkpointing: Recompute,
    sequences: int = 1,
    chunk_tokens: int = 0,
) -> int:
    """Return the bytes of activations of a micro-batch at their peak, logits and loss included.

    Args:
        sequences: of a micro-batch.
        chunk_tokens: whose logits are there at a time; 0: all.
    """
    found = activations_of(config, seq_len, precision, chunk_tokens=chunk_tokens)
    return found.peak(checkpointing, sequences)


def fitting_micro_batch(
    per_rank: int,
    seq_len: int,
    *,
    config: "PretrainedConfig",
    shapes: Shapes,
    ds: Mapping[str, Any],
    world_size: int,
    memory_bytes: int | None,
    checkpointing: Recompute,
    loss_chunk_tokens: int = 0,
) -> int:
    """Return the largest power of two that divides `per_rank` sequences and fits the device.

    Args:
        memory_bytes: of the device; None on a CPU, where a few thousand tokens fill the cores.
        loss_chunk_tokens: whose logits are there at a time; 0: all.
    """
    if memory_bytes is None:
        return defaults.micro_batch_size(per_rank, seq_len, defaults.CPU_MICRO_BATCH_TOKENS)
    free = int(memory_bytes * defaults.MEMORY_SHARE)
    free -= state_bytes(shapes, ds, world_size)[0] + sum(buffer_bytes(shapes, ds))
    precision = ds_config.precision(ds)
    found = activations_of(config, seq_len, precision, chunk_tokens=loss_chunk_tokens)
    sizes = defaults.micro_batch_candidates(per_rank)
    return max((size for size in sizes if found.peak(checkpointing, size) <= free), default=1)
