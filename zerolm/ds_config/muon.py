"""DeepSpeed's Muon optimizer for matrices, with AdamW for embeddings, the head, norms and biases.

Muon orthogonalizes each matrix's momentum by Newton-Schulz iteration before each step (Jordan et
al. 2024, kellerjordan.github.io/posts/muon). ZeRO gathers full matrices for this, and passes the
orthogonalized update to the optimizer. This module selects the parameters that Muon updates, and
refuses options that DeepSpeed 0.19.8 handles incorrectly. Imports torch only inside functions.
"""

from typing import Any

from zerolm.common.errors import did_you_mean
from zerolm.common.values import shown
from zerolm.ds_config.profile import AUTO, Profile

AUTO_PARAMS = ("lr", "betas", "eps", "weight_decay")
PARAMS = ("lr", "muon_lr", "adam_lr", "momentum", "ns_method", "betas", "eps", "weight_decay")
SWITCHES = ("adam_w_mode", "torch_adam", "per_head_muon")
NEWTON_SCHULZ = ("gram", "standard")
MOMENTUM, ADAM_EPSILON = 0.95, 1e-8
IN_MEMORY = "save_muon_momentum_buffer_in_memory"  # a key of zero_optimization
# Words in the names of embeddings and output heads of transformers' models.
EMBEDDING_NAMES = ("embed", "lm_head", "wte", "wpe")
# Modules with stacked matrices that lack transformers' attribute `is_transposed`, and its value:
# whether a matrix is (in, out) instead of (out, in).
STACKS = {
    "JetMoeParallelExperts": False,
    "Llama4TextExperts": True,
    "LongcatFlashExperts": False,
    "InklingSharedExperts": False,
    "RecurrentGemmaRglru": True,
    "ZambaMambaMixer": False,
}


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
    if params.get("per_head_muon") is True and (
        profile.uses_bf16_optimizer
        or (profile.zero_stage < 3 and profile.zero.get("parameter_alignment"))
    ):
        found.append(
            "optimizer.params.per_head_muon: true is ignored by DeepSpeed with "
            "parameter_alignment, and at stage 1 with bf16 and fp32 gradients. Remove the key, "
            "or use stage 3."
        )
    rates = [key for key in ("muon_lr", "adam_lr") if key in params]
    if rates and "scheduler" in profile.json:
        found.append(
            f"optimizer.params.{rates[0]}: {shown(params[rates[0]])}, but DeepSpeed's schedulers "
            f"set one learning rate for all parameters. Remove the scheduler block, and use "
            f"--schedule."
        )
    return found


def model_problems(profile: Profile, model: Any) -> list[str]:
    """Refuse matrices that DeepSpeed's Muon does not support, and those of an unknown layout.

    Args:
        model: on the meta device.
    """
    if not profile.uses_muon:
        return []
    where, found, known = f"{profile.name}: optimizer.type: Muon", [], layouts(model)

    def about(name: str) -> str:
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        return f"{name} {list(model.get_parameter(name).shape)} of {owner}"

    stacked = [name for name in known if model.get_parameter(name).ndim > 2]
    if stacked and profile.uses_bf16_optimizer:
        found.append(
            f"{where}, at stage 1 with bf16 and fp32 gradients supports only 2-D tensors, but not "
            f"{about(stacked[0])}. Use stage 2 or 3."
        )
    if unknown := [name for name, is_transposed in known.items() if is_transposed is None]:
        found.append(
            f"{where} orthogonalizes matrices of outputs and inputs, but it is unknown which "
            f"dimensions of {about(unknown[0])} these are. Use AdamW."
        )
    of_shape: dict[tuple[int, ...], dict[bool | None, str]] = {}
    for name, is_transposed in known.items():
        if (shape := tuple(model.get_parameter(name).shape))[-1] != shape[-2]:
            of_shape.setdefault(shape, {}).setdefault(is_transposed, name)
    for names in of_shape.values():
        if {True, False} <= names.keys():
            found.append(
                f"{where} scales matrices by their shapes, but {about(names[True])} is "
                f"(inputs, outputs) and {about(names[False])} is (outputs, inputs). Use AdamW."
            )
            break
    return found


def layouts(model: Any) -> dict[str, bool | None]:
    """Return {name of a matrix for Muon: whether its last two dimensions are (in, out)}.

    They are (out, in) in torch's linear layers. None: unknown.
    """
    from zerolm.engine.parameters import full_shape

    others = {id(each) for each in not_matrices(model)}
    return {
        name: _is_transposed(model.get_submodule(path), leaf, len(full_shape(parameter)))
        for name, parameter in model.named_parameters()
        for path, _, leaf in [name.rpartition(".")]
        if id(parameter) not in others and parameter.requires_grad
    }


def transposed_shapes(model: Any) -> set[tuple[int, ...]]:
    """Return the shapes, on this rank, of the tensors whose matrices are (in, out)."""
    from zerolm.engine.parameters import own_shape

    return {
        tuple(own_shape(model.get_parameter(name)))
        for name, is_transposed in layouts(model).items()
        if is_transposed
    }


def _is_transposed(module: Any, leaf: str, num_dimensions: int) -> bool | None:
    from torch import nn

    kind = type(module).__name__
    if num_dimensions == 3:
        transposed: bool | None = getattr(module, "is_transposed", STACKS.get(kind))
        return transposed
    if num_dimensions > 3 or leaf != "weight":
        return None
    if kind == "Conv1D":  # GPT-2's linear layer
        return True
    # A grouped layer has several matrices in one.
    is_linear = isinstance(module, nn.Linear) and "Grouped" not in kind
    return False if is_linear or kind.endswith("Router") else None


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
    if profile.zero.get(IN_MEMORY):
        found.append(
            f"zero_optimization.{IN_MEMORY}: using false, since with true DeepSpeed restores no "
            f"momentum from a checkpoint"
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
    is_convolution = len(shape) > 2 and "conv" in name.lower()
    is_table = any(word in name.lower() for word in EMBEDDING_NAMES)
    return len(shape) >= 2 and not is_table and not is_convolution


def not_matrices(model: Any) -> list[Any]:
    """Return the parameters that AdamW updates: embeddings, head, convolutions, and all others
    without decay.

    The convolutions of language models are depthwise: no channel has a matrix.
    """
    from torch import nn

    from zerolm.optim.parameter_groups import decays

    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d)
    tables = [module for module in model.modules() if isinstance(module, kinds)]
    tables += [model.get_input_embeddings(), model.get_output_embeddings()]
    return [
        *(table.weight for table in tables if hasattr(table, "weight")),  # or on another stage
        *(each for name, each in model.named_parameters() if not decays(model, name)),
    ]
