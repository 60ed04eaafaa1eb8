"""`--parametrization completep`: the learning rate found at a small size holds at larger ones.

CompleteP with alpha = 1 (Dey et al. 2025, arXiv 2505.01618, table 1). Its multipliers of residual
branches and of logits are moved into initial values and optimizer options, which for Adam is the
same function of the data: docs/initialization.md says how. So no code of the model changes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerolm.config.flag import count, flag
from zerolm.features.feature import Case, Feature

STANDARD, COMPLETEP = "standard", "completep"
BASES = ("base_hidden_size", "base_layers")
# Llama-likes, and others whose blocks add the outputs of these projections to the residual stream.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("gpt2", "gpt_neox", "opt"),
)
# Names of their modules, or of parameters of fused experts, by kind.
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
    """Factors of a parameter on the values that it has at the base size."""

    initial: float
    learning_rate: float
    weight_decay: float
    epsilon: float

    def moved(self, multiplier: float) -> "Factors":
        """Return the factors of a parameter that is multiplied once, not in every forward pass."""
        initial, rate, decay, epsilon = self
        return Factors(
            initial * multiplier, rate * multiplier, decay / multiplier, epsilon / multiplier
        )


def group_of(name: str) -> str | None:
    """Return the kind of a parameter, and whether it is a bias; None if it is not known."""
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
    """Return the factors of each group, from hidden size and layers divided by the base's.

    The rows are those of the paper's table; `moved` takes the multiplier of a forward pass.
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
        # Like the head: from an input that grows with the width to a fixed number of experts.
        ROUTER: vector.moved(1 / width),
        NORM: vector,
        f"final {NORM}": Factors(1, 1, 1, outside),
        HEAD: Factors(1, 1, 1, outside).moved(1 / width),
    }


class Completep(Feature):
    """Scales initial values, learning rate, weight decay and epsilon of each parameter."""

    name = "completep"

    @dataclass(frozen=True)
    class Flags:
        parametrization: str = flag(
            "model",
            "text",
            "completep: scale initial weights, learning rate, weight decay and epsilon from those "
            "of a model of --base_hidden_size and --base_layers, where --learning_rate was found",
            default=STANDARD,
            choices=(STANDARD, COMPLETEP),
            changes_curve=True,
            unchangeable="the run began with the weights of the old one",
        )
        base_hidden_size: int | None = count(
            "model",
            "hidden size of the model where --learning_rate was found, for --parametrization",
            "N",
            changes_curve=True,
            unchangeable="the run began with the weights of the old one",
        )
        base_layers: int | None = count(
            "model",
            "number of its layers; that of the model itself: muP",
            "N",
            changes_curve=True,
            unchangeable="the run began with the weights of the old one",
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
                yield f"{where} needs --{name}: that of the model where the rate was found."
        rate = profile.optimizer.params.get("lr", AUTO)
        if "learning_rate" not in settings.origins and rate == AUTO:
            yield (
                f"{where} needs --learning_rate: the one that was found at the base size, not the "
                f"default for this model."
            )
        if case.initial is not None:
            yield from _source_problems(settings, case.initial, where)
        optimizer = profile.optimizer
        if optimizer.kind not in ADAM:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: "
                f"optimizer.type: {optimizer.name}: how its step scales was not derived. Use AdamW."
            )
        elif optimizer.kind == "adam" and optimizer.params.get("adam_w_mode") is False:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: "
                f"optimizer.params.adam_w_mode: false: decay that is part of the gradient scales "
                f"in another way. Use AdamW."
            )
        if profile.scheduler:
            yield (
                f"{where} is not supported together with {settings.deepspeed_config}: scheduler, "
                f"which sets one learning rate for all parameters. Use --schedule."
            )
        if config.get_text_config().tie_word_embeddings:
            yield (
                f"{where}, but {settings.model_config} ties the embeddings, and the head scales in "
                f'another way than the embedding. Set "tie_word_embeddings" to false.'
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
                f"width and depth, so gradient_clipping does not mean the same at each size"
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
    """Return the parametrization in the settings of a run.json; empty if it is standard."""
    settings = record.get("settings", {})
    if settings.get("parametrization", STANDARD) == STANDARD:
        return {}
    return {name: settings.get(name) for name in ("parametrization", *BASES)}


def _as_flags(parametrization: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in parametrization.items())


def _source_problems(settings: Any, initial: Any, where: str) -> Iterator[str]:
    """Check that the weights of `--init_from` have the scale of this parametrization."""
    theirs = initial.parametrization
    if not theirs:
        yield (
            f"{where}, but {initial.source} is no run with it, so its weights have another scale. "
            f"Remove --init_from, or the flag."
        )
    elif any(theirs[name] != getattr(settings, name) for name in BASES):
        yield (
            f"{where} with {_as_flags({name: getattr(settings, name) for name in BASES})}, but "
            f"{initial.source} has {_as_flags(theirs)}. Give the same."
        )


def _standard_rates(initial: Any, config: Any) -> str:
    """Return what a standard run does with the weights of a run with CompleteP."""
    theirs = initial.parametrization
    width = config.hidden_size / theirs["base_hidden_size"]
    depth = config.num_hidden_layers / theirs["base_layers"]
    return (
        f"--init_from {initial.source}: was trained with {_as_flags(theirs)}. This run is "
        f"{STANDARD}: all parameters have --learning_rate itself, hidden matrices {width:g} times "
        f"the rate that they have there, and output projections {width * depth:g} times. Add these "
        f"flags to continue with the rates of that run"
    )


def _model_problems(config: Any, where: str, path: str) -> Iterator[str]:
    from zerolm.model.architecture import parameter_shapes

    family = config.model_type
    if family not in FAMILIES:
        yield (
            f"{where} it is not known which projections of {family} end its residual branches "
            f"({path}). Use one of {', '.join(FAMILIES)}."
        )
    elif family == "opt" and not config.do_layer_norm_before:
        yield f"{where} {path} normalizes after each block, not before. Use another model."
    elif unknown := [name for name in parameter_shapes(config) if group_of(name) is None]:
        yield f"{where} {path} has parameters of an unknown kind: {', '.join(unknown[:3])}."


def _ratios(plan: Any) -> tuple[float, float]:
    """Return hidden size and layers divided by those of the base."""
    config, settings = plan.model.config, plan.settings
    width: float = config.hidden_size / settings.base_hidden_size
    return width, config.num_hidden_layers / settings.base_layers


def _of_parameters(plan: Any) -> dict[str, Factors]:
    """Return the factors of each parameter by name."""
    width, depth = _ratios(plan)
    of_group = factors(width, depth)
    if plan.model.config.model_type == "gpt2":
        # GPT-2 draws them with a deviation that has a factor of 1 / sqrt(layers): here the base's.
        own = of_group[OUTPUT]
        of_group[OUTPUT] = own._replace(initial=own.initial * depth**0.5)
    return {name: of_group[group_of(name) or ""] for name in plan.model.shapes}


def _group_lines(plan: Any) -> dict[str, str]:
    """Return a line for each group: its parameters, and what they start and train with."""
    import math

    from zerolm.model.architecture import meta_model
    from zerolm.model.init_check import closed_form
    from zerolm.optim.parameter_groups import decays

    model, config = meta_model(plan.model.config), plan.model.config
    params, of_parameters = plan.profile.optimizer.params, _of_parameters(plan)
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
