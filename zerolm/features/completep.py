"""`--parametrization completep`: a learning rate tuned on a small model transfers to larger ones.

CompleteP with alpha = 1 (Dey et al. 2025, arXiv 2505.01618, table 1). Its multipliers on residual
branches and logits are moved into initial values and optimizer options, which is equivalent for
Adam (docs/initialization.md shows how). The model's code therefore does not change.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerolm.config.flag import count, flag
from zerolm.features.feature import Case, Feature

STANDARD, COMPLETEP = "standard", "completep"
BASES = ("base_hidden_size", "base_layers")
# Llama-like models, and others whose blocks add the outputs of these projections to the residual
# stream.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("gpt2", "gpt_neox", "opt"),
)
# Names of modules (for fused experts, of parameters) by kind.
EMBEDDING, HIDDEN, OUTPUT = "embedding", "hidden matrix", "output projection"
ROUTER, HEAD, NORM = "router", "head", "norm"
KIND_OF = {
    name: kind
    for kind, names in {
        EMBEDDING: "embed_tokens embed_positions embed_in wte wpe",
        HIDDEN: "q_proj k_proj v_proj gate_proj up_proj gate_up_proj fc1 c_attn c_fc "
        "query_key_value dense_h_to_4h",
        OUTPUT: "o_proj down_proj out_proj fc2 c_proj dense dense_4h_to_h",
        ROUTER: "gate shared_expert_gate",
        HEAD: "lm_head embed_out",
    }.items()
    for name in names.split()
}
IS_NORM = re.compile(r"norm$|^ln_")
IN_BLOCK = re.compile(r"\.\d+\.")


class Factors(NamedTuple):
    """Factors by which a parameter's settings differ from those in a model of the base size."""

    initial: float
    learning_rate: float
    weight_decay: float
    epsilon: float

    def moved(self, multiplier: float) -> "Factors":
        """Return the factors after moving a multiplier from the forward pass into the parameter."""
        initial, rate, decay, epsilon = self
        return Factors(
            initial * multiplier, rate * multiplier, decay / multiplier, epsilon / multiplier
        )


def group_of(name: str) -> str | None:
    """Return a parameter's group: its kind, and whether it is a bias. Return None if unknown."""
    path = name.removesuffix(".weight").removesuffix(".bias")
    module = path.rpartition(".")[2]
    kind = NORM if IS_NORM.search(module) else KIND_OF.get(module)
    inside = IN_BLOCK.search(name) is not None
    if kind == NORM:
        return NORM if inside else f"final {NORM}"
    if kind is None or inside != (kind in (HIDDEN, OUTPUT, ROUTER)):
        return None
    if not name.endswith(".bias"):
        return kind
    return f"bias of {kind}" if kind in (HIDDEN, OUTPUT) else None


def factors(width: float, depth: float) -> dict[str, Factors]:
    """Return each group's factors; `width` and `depth` are the hidden size and number of layers
    divided by the base model's.

    The rows match the paper's table; `moved` absorbs a multiplier of the forward pass.
    """
    inside, outside = 1 / (width * depth), 1 / width  # epsilon
    matrix = Factors(width**-0.5, 1 / width, width, inside)
    vector = Factors(1, 1, 1, inside)
    return {
        EMBEDDING: Factors(1, 1, 1, outside),
        HIDDEN: matrix,
        f"bias of {HIDDEN}": vector,
        OUTPUT: matrix.moved(1 / depth),
        f"bias of {OUTPUT}": vector.moved(1 / depth),
        # Like the head, a router maps an input that grows with the width to a fixed number of
        # outputs.
        ROUTER: vector.moved(1 / width),
        NORM: vector,
        f"final {NORM}": Factors(1, 1, 1, outside),
        HEAD: Factors(1, 1, 1, outside).moved(1 / width),
    }


class Completep(Feature):
    """Scales each parameter's initial values, learning rate, weight decay and epsilon."""

    name = "completep"

    @dataclass(frozen=True)
    class Flags:
        parametrization: str = flag(
            "model",
            "text",
            "completep: scale initial weights, learning rate, weight decay and epsilon from a base "
            "model with --base_hidden_size and --base_layers, for which --learning_rate was tuned",
            default=STANDARD,
            choices=(STANDARD, COMPLETEP),
            changes_curve=True,
            unchangeable="the run was initialized with the old value",
        )
        base_hidden_size: int | None = count(
            "model",
            "hidden size of the base model for which --learning_rate was tuned, for "
            "--parametrization",
            "N",
            changes_curve=True,
            unchangeable="the run was initialized with the old value",
        )
        base_layers: int | None = count(
            "model",
            "number of layers in the base model; the model's own number: muP",
            "N",
            changes_curve=True,
            unchangeable="the run was initialized with the old value",
        )

    @classmethod
    def problems(cls, case: Case) -> Iterator[str]:
        from zerolm.ds_config.optimizers import ADAM
        from zerolm.ds_config.profile import AUTO

        settings, config, profile = case.settings, case.config, case.profile
        if settings.parametrization == STANDARD:
            for name in BASES:
                if getattr(settings, name):
                    yield (
                        f"{settings.where(name)}: {getattr(settings, name)} has no effect without "
                        f"--parametrization {COMPLETEP}. Add it, or remove the flag."
                    )
            return
        where = f"{settings.where('parametrization')}: {COMPLETEP}"
        for name in BASES:
            if not getattr(settings, name):
                yield f"{where} needs --{name}: the value of the base model."
        rate = profile.optimizer.params.get("lr", AUTO)
        if "learning_rate" not in settings.origins and rate == AUTO:
            yield (
                f"{where} needs --learning_rate: the rate tuned at the base size, not the "
                f"default for this model."
            )
        if case.initial is not None:
            yield from _source_problems(settings, case.initial, where)
        optimizer = profile.optimizer
        if optimizer.kind not in ADAM:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: "
                f"optimizer.type: {optimizer.name}: the scaling of its step has not been derived. "
                "Use AdamW."
            )
        elif optimizer.kind == "adam" and optimizer.params.get("adam_w_mode") is False:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: "
                f"optimizer.params.adam_w_mode: false: weight decay in the gradient scales "
                f"differently. Use AdamW."
            )
        if profile.scheduler:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: scheduler, "
                f"which sets one learning rate for all parameters. Use --schedule."
            )
        if config.get_text_config().tie_word_embeddings:
            yield (
                f"{where}, but {settings.model_config} ties the embeddings, and the head scales "
                f'differently from the embedding. Set "tie_word_embeddings" to false.'
            )
        yield from _model_problems(config, f"{where}, but", settings.model_config)

    @classmethod
    def notices(cls, case: Case) -> Iterator[str]:
        settings, config = case.settings, case.config
        if settings.parametrization == STANDARD and case.initial and case.initial.parametrization:
            yield _standard_rates(case.initial, config)
        if settings.parametrization == STANDARD or config.model_type not in FAMILIES:
            return
        base, heads = settings.base_hidden_size, config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        if base and base % size:
            yield (
                f"{settings.where('parametrization')}: {COMPLETEP}: no model of hidden size {base} "
                f"has heads of {size}, but the learning rate holds only for heads of the same size"
            )
        clipping = case.profile.gradient_clipping
        if clipping is None or clipping > 0:
            yield (
                f"{settings.where('parametrization')}: {COMPLETEP}: the gradient norm grows with "
                f"width and depth, so the effect of gradient_clipping depends on the size"
            )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not cls.wanted(plan):
            return {}
        width, depth = _ratios(plan)
        lines = {
            "parametrization": f"{COMPLETEP}, {width:g} times the hidden size and {depth:g} times "
            f"the layers of the base"
        }
        return lines | _group_lines(plan)

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.parametrization == COMPLETEP)

    def __init__(self, plan: Any):
        super().__init__(plan)
        self.factors = _of_parameters(plan)

    def initial_factors(self) -> Mapping[str, float]:
        return {name: each.initial for name, each in self.factors.items()}

    def option_factors(self) -> Mapping[str, Mapping[str, float]]:
        return {
            name: {"lr": each.learning_rate, "weight_decay": each.weight_decay, "eps": each.epsilon}
            for name, each in self.factors.items()
        }


def recorded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parametrization settings in a run.json; empty for the standard parametrization."""
    settings = record.get("settings", {})
    if settings.get("parametrization", STANDARD) == STANDARD:
        return {}
    return {name: settings.get(name) for name in ("parametrization", *BASES)}


def _as_flags(parametrization: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in parametrization.items())


def _source_problems(settings: Any, initial: Any, where: str) -> Iterator[str]:
    """Check that the weights in `--init_from` have this parametrization's scale."""
    theirs = initial.parametrization
    if not theirs:
        yield (
            f"{where}, but {initial.source} was not trained with it, so its weights have a "
            f"different scale. Remove --init_from, or the flag."
        )
    elif any(theirs[name] != getattr(settings, name) for name in BASES):
        yield (
            f"{where} with {_as_flags({name: getattr(settings, name) for name in BASES})}, but "
            f"{initial.source} has {_as_flags(theirs)}. Use the same values."
        )


def _standard_rates(initial: Any, config: Any) -> str:
    """Describe how a run with the standard parametrization trains weights from a CompleteP run."""
    theirs = initial.parametrization
    width = config.hidden_size / theirs["base_hidden_size"]
    depth = config.num_hidden_layers / theirs["base_layers"]
    return (
        f"--init_from {initial.source}: was trained with {_as_flags(theirs)}. This run is "
        f"{STANDARD}: --learning_rate applies to all parameters, which is {width:g} times the "
        f"other run's rate for hidden matrices, and {width * depth:g} times for output "
        f"projections. Add these flags to continue with that run's rates"
    )


def _model_problems(config: Any, where: str, path: str) -> Iterator[str]:
    from zerolm.model.architecture import parameter_shapes

    family = config.model_type
    if family not in FAMILIES:
        yield (
            f"{where} it is unknown which projections of {family} end its residual branches "
            f"({path}). Use one of {', '.join(FAMILIES)}."
        )
    elif family == "opt" and not config.do_layer_norm_before:
        yield f"{where} {path} normalizes after each block, not before. Use another model."
    elif unknown := [name for name in parameter_shapes(config) if group_of(name) is None]:
        yield f"{where} {path} has parameters of an unknown kind: {', '.join(unknown[:3])}."


def _ratios(plan: Any) -> tuple[float, float]:
    """Return the hidden size and number of layers divided by the base model's."""
    config, settings = plan.model.config, plan.settings
    width: float = config.hidden_size / settings.base_hidden_size
    return width, config.num_hidden_layers / settings.base_layers


def _of_parameters(plan: Any) -> dict[str, Factors]:
    """Return the factors of each parameter, by parameter name."""
    width, depth = _ratios(plan)
    of_group = factors(width, depth)
    if plan.model.config.model_type == "gpt2":
        # GPT-2's initial standard deviation includes a factor 1 / sqrt(layers): use the base
        # model's layers.
        own = of_group[OUTPUT]
        of_group[OUTPUT] = own._replace(initial=own.initial * depth**0.5)
    return {name: of_group[group_of(name) or ""] for name in plan.model.shapes}


def _group_lines(plan: Any) -> dict[str, str]:
    """Return a line for each group with its parameters, initial standard deviation and optimizer
    options.
    """
    import math

    from zerolm.model.architecture import meta_model
    from zerolm.model.init_check import closed_form
    from zerolm.optim.parameter_groups import decays

    model, config = meta_model(plan.model.config), plan.model.config
    params, of_parameters = plan.ds.optimizer.params, _of_parameters(plan)
    members: dict[str, list[str]] = {}
    for name in plan.model.shapes:
        members.setdefault(group_of(name) or "", []).append(name)
    lines = {}
    for group, names in members.items():
        first, own = names[0], of_parameters[names[0]]
        path, _, leaf = first.rpartition(".")
        values = sum(math.prod(plan.model.shapes[name]) for name in names)
        statistics = closed_form(config, model.get_submodule(path), path, leaf, values)
        start = ""
        if statistics is not None and statistics.std:
            start = f"initial deviation {statistics.std * own.initial:.4g}, "
        decay = params["weight_decay"] * own.weight_decay if decays(model, first) else 0.0
        lines[f"{COMPLETEP}: {group}"] = (
            f"{len(names)} tensors with {values:,} values, {start}"
            f"learning rate {plan.settings.learning_rate * own.learning_rate:.4g}, "
            f"decay {decay:.4g}, epsilon {params['eps'] * own.epsilon:.4g}"
        )
    return lines
