"""Muon for matrices, with AdamW for embeddings, the head, norms and biases: DeepSpeed's own.

Momentum whose matrices are made orthogonal by a Newton-Schulz iteration before each step (Jordan et
al. 2024, kellerjordan.github.io/posts/muon). ZeRO does it on whole matrices, gathered for it; what
reaches the optimizer is the finished update. Here is which parameters that is for, what of it
DeepSpeed 0.19.8 gets wrong or cannot do, and how much it keeps. torch and DeepSpeed are imported by
need.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zerolm.ds_config import (
    block,
    optimizer_offload,
    optimizer_type,
    precision,
    zero_stage,
)
from zerolm.ds_schema import AUTO
from zerolm.errors import did_you_mean
from zerolm.settings import Settings
from zerolm.values import shown

AUTO_PARAMS = ("lr", "betas", "eps", "weight_decay")
PARAMS = ("lr", "muon_lr", "adam_lr", "momentum", "ns_method", "betas", "eps", "weight_decay")
SWITCHES = ("adam_w_mode", "torch_adam", "per_head_muon")
NEWTON_SCHULZ = ("gram", "standard")
MOMENTUM, ADAM_EPSILON = 0.95, 1e-8
# Of tables that are looked up or written out by, in the names of transformers' models.
NO_MATRICES = ("embed", "lm_head", "wte", "wpe")


def chosen(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether a ds config names Muon."""
    return optimizer_type(ds_config).lower() == "muon"


def problems(ds_config: Mapping[str, Any]) -> list[str]:
    """Find what DeepSpeed's Muon cannot do, or would pass over in silence."""
    found = _param_problems(ds_config)
    clipping = ds_config.get("gradient_clipping")
    if clipping != AUTO and clipping != 0:
        said = "missing, which is 1.0" if clipping is None else shown(clipping)
        found.append(
            f"gradient_clipping: {said}, with Muon it shrinks the orthogonalised update "
            f"(DeepSpeed#8439). Set it to 0."
        )
    if (
        zero_stage(ds_config) == 3
        and block(ds_config, "zero_optimization").get("reduce_scatter", True) is not False
    ):
        found.append(
            "zero_optimization.reduce_scatter: true, Muon at stage 3 needs false. Set it to false."
        )
    return found


def _param_problems(ds_config: Mapping[str, Any]) -> list[str]:
    """Find what DeepSpeed's Muon would not read: it leaves unknown parameters out in silence."""
    params = block(ds_config, "optimizer", "params")
    known = (*PARAMS, *SWITCHES)
    found = [
        f"optimizer.params.{key}: not a parameter of Muon, DeepSpeed would ignore it."
        f"{did_you_mean(key, known) or ' Remove it.'}"
        for key in params
        if key not in known
    ]
    for key in ("muon_lr", "adam_lr", "momentum", "eps", "weight_decay", "lr"):
        value = params.get(key, 0)
        if value == AUTO and key in AUTO_PARAMS:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        if not number or (key == "momentum" and value >= 1):
            below = " below 1" if key == "momentum" else ""
            found.append(
                f"optimizer.params.{key}: {shown(value)}, must be a number of at least 0{below}. "
                f"Correct it."
            )
    method = params.get("ns_method", NEWTON_SCHULZ[0])
    if method not in NEWTON_SCHULZ:
        found.append(
            f"optimizer.params.ns_method: {shown(method)}, must be one of "
            f"{', '.join(NEWTON_SCHULZ)}. Correct it."
        )
    rates = [key for key in ("muon_lr", "adam_lr") if key in params]
    if rates and "scheduler" in ds_config:
        found.append(
            f"optimizer.params.{rates[0]}: {shown(params[rates[0]])}, but DeepSpeed's schedulers "
            f"give all parameters one rate. Remove the scheduler block, and use --schedule."
        )
    return found


def setting_problems(ds_config: Mapping[str, Any], settings: Settings) -> list[str]:
    """Refuse adaptive clipping of what is not the gradient."""
    if not settings.adaptive_clip or not chosen(ds_config):
        return []
    return [
        f"{settings.where('adaptive_clip')}: {settings.adaptive_clip}, but Muon's norm is that of "
        f"its orthogonalised update, which clipping only shrinks. Remove the flag."
    ]


def shape_problems(
    ds_config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str
) -> list[str]:
    """Refuse a model whose experts lie in one tensor where DeepSpeed takes flat matrices only.

    Args:
        shapes: of every parameter.
        name: of the JSON file, for the messages.
    """
    if not (chosen(ds_config) and _is_bf16_optimizer(ds_config)):
        return []
    return [
        f"{name}: optimizer.type: Muon, at stage 1 with bf16 and fp32 gradients it takes no "
        f"tensor of several matrices, as {tensor} is {list(shape)}. Use stage 2 or 3."
        for tensor, shape in shapes.items()
        if len(shape) > 2 and is_for_matrices(tensor, shape)
    ][:1]


def _is_bf16_optimizer(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether DeepSpeed takes its BF16_Optimizer for the run."""
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    return (
        zero_stage(ds_config) == 1
        and precision(ds_config) == "bf16"
        and accumulation == "fp32"
        and optimizer_offload(ds_config) == "none"
    )


def notices(ds_config: Mapping[str, Any]) -> list[str]:
    """Say what is not as the ds config says it."""
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    plain = zero_stage(ds_config) == 2 and optimizer_offload(ds_config) == "none"
    if not (chosen(ds_config) and plain and precision(ds_config) == "bf16"):
        return []
    if accumulation != "fp32":
        return []
    return [
        "Muon at stage 2 adds up the gradients of its matrices over micro-batches in bf16, and "
        "keeps its momentum in bf16, whatever data_types.grad_accum_dtype says; stages 1 and 3 do "
        "it in fp32"
    ]


def fill(params: dict[str, Any], *, on_plain_cpu: bool) -> None:
    """Write down what DeepSpeed would take where the JSON says nothing.

    Args:
        params: of the optimizer, changed.
        on_plain_cpu: without offload. DeepSpeed's fused AdamW would compile a kernel there for a
            minute; torch's is the same arithmetic.
    """
    for key, value in (
        ("momentum", MOMENTUM),
        ("ns_method", NEWTON_SCHULZ[0]),
        ("eps", ADAM_EPSILON),
    ):
        params[key] = value if params.get(key, AUTO) == AUTO else params[key]
    if on_plain_cpu:
        params.setdefault("torch_adam", True)


# -------------------------------------------------------------------------------------------------
# Which parameters


def is_for_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Tell by name and shape whether Muon takes a parameter; `tagging` asks the model itself."""
    return len(shape) >= 2 and not any(word in name.lower() for word in NO_MATRICES)


@contextmanager
def tagging(model: Any) -> Iterator[None]:
    """Keep embeddings and the head out of Muon's matrices while `deepspeed.initialize` tags them.

    DeepSpeed tells them by "embed" and "lm_head" in the name, and would give GPT-2's `wte` and
    `wpe` to Muon. It looks at `ds_shape`, so that partitioned parameters count as what they are.
    """
    import deepspeed
    from torch import nn

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables += [model.get_input_embeddings(), model.get_output_embeddings()]
    original = deepspeed.set_optimizer_flags

    def tag(config_class: Any, tagged: Any) -> None:
        original(config_class, tagged)
        for table in tables:
            if table is not None:
                setattr(table.weight, "use_muon", False)  # noqa: B010

    deepspeed.set_optimizer_flags = tag
    try:
        yield
    finally:
        deepspeed.set_optimizer_flags = original


def shares(model: Any) -> str:
    """Say how many parameters went where, by the tags that the optimizer's groups were made of."""
    counts, values = {True: 0, False: 0}, {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.use_muon] += 1
        values[parameter.use_muon] += math.prod(getattr(parameter, "ds_shape", parameter.shape))
    return (
        f"Muon: {counts[True]} tensors of matrices with {values[True]:,} values; AdamW: the "
        f"{counts[False]} others with {values[False]:,}"
    )


# -------------------------------------------------------------------------------------------------
# What it keeps


def state_bytes(
    shapes: Mapping[str, tuple[int, ...]], ds_config: Mapping[str, Any], world_size: int = 0
) -> int:
    """Return the bytes of the states: one momentum of matrices, AdamW's two of the others.

    ZeRO-1 and 2 keep the momentum in the precision of the gradients that they reduce, and a second
    one for the step at hand, so that a step can be refused.

    Args:
        world_size: of the fullest rank of so many; 0: of all parameters, as in a checkpoint, where
            matrices that two ranks share count once.
    """
    matrices = sum(_numels(shapes))
    others = sum(map(math.prod, shapes.values())) - matrices
    if not world_size:
        return _momentum_bytes(ds_config) * matrices + 8 * others
    if keeps_whole_matrices(ds_config):
        held = 2 * _momentum_bytes(ds_config) * whole_values(shapes, ds_config, world_size)
    else:
        held = _momentum_bytes(ds_config) * -(-matrices // world_size)
    return held + 8 * -(-others // world_size)


def _momentum_bytes(ds_config: Mapping[str, Any]) -> int:
    """Return the bytes of a value of the momentum."""
    single = keeps_whole_matrices(ds_config) and precision(ds_config) != "fp32"
    return 2 if single else 4


def keeps_whole_matrices(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether a rank has all of each matrix that it has a part of: ZeRO-1 and 2."""
    return (
        chosen(ds_config)
        and zero_stage(ds_config) in (1, 2)
        and optimizer_offload(ds_config) == "none"
        and not _is_bf16_optimizer(ds_config)
    )


def whole_values(
    shapes: Mapping[str, tuple[int, ...]], ds_config: Mapping[str, Any], world_size: int
) -> int:
    """Return the values of the matrices that the fullest rank has a part of, at ZeRO-1 and 2.

    They lie one after another in a flat tensor, which the ranks share equally; a part of a matrix
    has its whole gradient and momentum. So with many ranks each keeps at least the largest matrix.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_partition_info, 0.19.8.
    """
    numels = _numels(shapes)
    if block(ds_config, "zero_optimization").get("round_robin_gradients"):
        numels = [numel for first in range(world_size) for numel in numels[first::world_size]]
    alignment = 2 * world_size
    share = -(-sum(numels) // alignment) * alignment // world_size
    held, begin = [0] * world_size, 0
    for numel in numels:
        for rank in range(begin // share, (begin + numel - 1) // share + 1):
            held[rank] += numel
        begin += numel
    return max(held)


def gradient_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    ds_config: Mapping[str, Any],
    world_size: int,
    accumulated: int,
) -> int:
    """Return the bytes of the fullest rank's gradients at ZeRO-2, as they are summed.

    Those of matrices are whole and in their own precision. Without offload there are beside them
    either those of the others, in theirs, or at the end of a step the orthogonalised updates.

    Args:
        accumulated: bytes of a value of the others.
    """
    value = 4 if precision(ds_config) == "fp32" else 2
    others = -(-(sum(map(math.prod, shapes.values())) - sum(_numels(shapes))) // world_size)
    whole = whole_values(shapes, ds_config, world_size)
    sums = value * whole + accumulated * others
    if optimizer_offload(ds_config) != "none":
        return sums
    return sums + value * max(whole, others if accumulated != value else 0)


def _numels(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for name, shape in shapes.items() if is_for_matrices(name, shape)]
