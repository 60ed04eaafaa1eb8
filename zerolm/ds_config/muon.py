"""DeepSpeed's Muon optimizer for matrices, with AdamW for embeddings, the head, norms and biases.

Muon orthogonalizes each matrix's momentum by Newton-Schulz iteration before each step (Jordan et
al. 2024, kellerjordan.github.io/posts/muon). ZeRO gathers full matrices for this, and passes the
orthogonalized update to the optimizer. This module selects the parameters that Muon updates, and
refuses options that DeepSpeed 0.19.8 handles incorrectly. Imports torch only inside functions.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.common.errors import did_you_mean
from zerolm.common.values import shown
from zerolm.ds_config.profile import AUTO, Profile

AUTO_PARAMS = ("lr", "betas", "eps", "weight_decay")
PARAMS = ("lr", "muon_lr", "adam_lr", "momentum", "ns_method", "betas", "eps", "weight_decay")
SWITCHES = ("adam_w_mode", "torch_adam", "per_head_muon")
NEWTON_SCHULZ = ("gram", "standard")
MOMENTUM, ADAM_EPSILON = 0.95, 1e-8
# Words in the names of embeddings and output heads of transformers' models.
EMBEDDING_NAMES = ("embed", "lm_head", "wte", "wpe")


def problems(profile: Profile) -> list[str]:
    """Find options that DeepSpeed's Muon does not support or would silently ignore."""
    found = _param_problems(profile)
    clipping = profile.json.get("gradient_clipping", AUTO)
    if clipping != AUTO and clipping != 0:
        found.append(
            f"gradient_clipping: {shown(clipping)} would shrink Muon's orthogonalized update "
            f"(DeepSpeed#8439). Set it to 0."
        )
    if profile.zero_stage == 3 and profile.zero.get("reduce_scatter") not in (None, False):
        found.append(
            "zero_optimization.reduce_scatter: true does not work with Muon at stage 3. Set it "
            "to false."
        )
    return found


def _param_problems(profile: Profile) -> list[str]:
    """Find invalid optimizer parameters, and those that DeepSpeed's Muon would silently ignore."""
    params = profile.optimizer.params
    known = (*PARAMS, *SWITCHES)
    found = [
        f"optimizer.params.{key}: not a parameter of Muon, so DeepSpeed would ignore "
        f"it.{did_you_mean(key, known) or ' Remove it.'}"
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
                f"optimizer.params.{key}: {shown(value)} must be a number of at least 0{below}. "
                f"Correct it."
            )
    method = params.get("ns_method", NEWTON_SCHULZ[0])
    if method not in NEWTON_SCHULZ:
        found.append(
            f"optimizer.params.ns_method: {shown(method)} must be one of "
            f"{', '.join(NEWTON_SCHULZ)}. Correct it."
        )
    rates = [key for key in ("muon_lr", "adam_lr") if key in params]
    if rates and "scheduler" in profile.json:
        found.append(
            f"optimizer.params.{rates[0]}: {shown(params[rates[0]])}, but DeepSpeed's schedulers "
            f"set one learning rate for all parameters. Remove the scheduler block, and use "
            f"--schedule."
        )
    return found


def shape_problems(profile: Profile, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Refuse experts stacked in one tensor where DeepSpeed's Muon supports only 2-D tensors.

    Args:
        shapes: {parameter name: shape}.
    """
    if not (profile.uses_muon and profile.uses_bf16_optimizer):
        return []
    return [
        f"{profile.name}: optimizer.type: Muon, at stage 1 with bf16 and fp32 gradients supports "
        f"only 2-D tensors, but {tensor} is {list(shape)}. Use stage 2 or 3."
        for tensor, shape in shapes.items()
        if len(shape) > 2 and is_matrix(tensor, shape)
    ][:1]


def notices(profile: Profile) -> list[str]:
    """List JSON options that DeepSpeed's Muon ignores, and defaults that differ with Muon."""
    if not profile.uses_muon:
        return []
    found = []
    if profile.json.get("gradient_clipping") is None:
        found.append(
            "gradient_clipping is missing: using 0 with Muon, since DeepSpeed's default of 1.0 "
            "would shrink its orthogonalized update (DeepSpeed#8439)"
        )
    if profile.zero_stage == 3 and profile.zero.get("reduce_scatter") is None:
        found.append(
            "zero_optimization.reduce_scatter is missing: using false, which Muon needs at stage 3"
        )
    stage_2 = profile.zero_stage == 2 and profile.optimizer_offload == "none"
    fp32_sums = profile.precision == "bf16" and profile.grad_accum_dtype == "fp32"
    if not (stage_2 and fp32_sums):
        return found
    return [
        *found,
        "Muon at stage 2 accumulates the gradients of its matrices over micro-batches in bf16, and "
        "keeps its momentum in bf16, regardless of data_types.grad_accum_dtype; stages 1 and 3 use "
        "fp32",
    ]


def fill_defaults(params: dict[str, Any]) -> None:
    """Fill in DeepSpeed's defaults for values missing in the JSON.

    Args:
        params: `optimizer.params` of the JSON; changed in place.
    """
    for key, value in (
        ("momentum", MOMENTUM),
        ("ns_method", NEWTON_SCHULZ[0]),
        ("eps", ADAM_EPSILON),
    ):
        params[key] = value if params.get(key, AUTO) == AUTO else params[key]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether Muon updates a parameter, judging only by its name and shape.

    `not_matrices` inspects the model itself; a test checks that both functions agree.
    """
    return len(shape) >= 2 and not any(word in name.lower() for word in EMBEDDING_NAMES)


def not_matrices(model: Any) -> list[Any]:
    """Return the parameters that AdamW updates: embeddings, head, and all others without decay."""
    from torch import nn

    from zerolm.optim.parameter_groups import decays

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables += [model.get_input_embeddings(), model.get_output_embeddings()]
    return [
        *(table.weight for table in tables if table is not None),
        *(each for name, each in model.named_parameters() if not decays(model, name)),
    ]
