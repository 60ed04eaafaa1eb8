"""The lists of checks of a run's settings and model, and then of its plan.

Problems and notices are printed in the order of the lists. A check names by its parameters what it
needs, and is left out if that is unknown: a model that was refused has no `config`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from zerolm import evaluate, features
from zerolm.common import machine
from zerolm.common.errors import Findings
from zerolm.common.machine import compile_problem
from zerolm.common.remembered import recall
from zerolm.config.settings import Settings
from zerolm.distributed.device import ABSENT, CPU
from zerolm.ds_config import gathering, muon, parallel_rules
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import deepspeed_problems
from zerolm.ds_config.scheduler import course_problems
from zerolm.model.architecture import ConfigKey, meta_model
from zerolm.model.known_config import actual
from zerolm.model.model import Model
from zerolm.plan import expert_rules, stage_rules
from zerolm.plan.plan import Plan
from zerolm.preflight import (
    existing_run,
    expert_proof,
    initial_weights,
    key_effects,
    layer_kinds,
    model_proof,
    model_rules,
    plausibility,
    same_logits,
    stage_proof,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Check = Callable[..., Iterable[str]]
ANYWHERE = ("auto", "sdpa", "eager")  # attention kernels that are the same on every device
NO_FILES: dict[str, Any] = {"run_dir": None, "data": (), "val_data": ()}  # unknown to `OF_MODEL`


def run(checks: Iterable[tuple[str, Check]], found: Findings, **facts: object) -> None:
    """Run each check whose needs are known, and add what it returns to `found`.

    Args:
        facts: what is known of the run by name; None is unknown.
    """
    known = {name: fact for name, fact in facts.items() if fact is not None} | {"found": found}
    for kind, check in checks:
        needs = signature(check).parameters
        if all(name in known or need.default is not need.empty for name, need in needs.items()):
            lines = check(**{name: known[name] for name in needs if name in known})
            getattr(found, kind).extend(lines)


def of_model(case: features.Case, model: Model | None, found: Findings, **facts: object) -> None:
    """Run `OF_MODEL`, and add what it finds to `found`.

    `--check` recalls what it has found from the same inputs, if they are all that counts: not on a
    GPU, and not with other weights.

    Args:
        case: with None as the config of a model that was refused.
        facts: `precision` and `world_size`.
    """
    if model is None:
        run(OF_MODEL, found, **case._asdict(), **facts)
        return
    settings: Any = case.settings

    def find(new: Findings, settings: Settings) -> Findings:
        config = actual(case.config)
        known = case._replace(settings=settings, config=config)
        whole = replace(model, config=config)
        run(OF_MODEL, new, **known._asdict(), case=known, model=whole, **facts)
        return new

    others = found.problems or case.initial or case.device not in (CPU, ABSENT)
    others = others or settings.fp8 or settings.attn_implementation not in ANYWHERE
    if not settings.check or others:
        find(found, settings)
        return
    elsewhere = replace(settings, **NO_FILES)
    values = {each.name: getattr(elsewhere, each.name) for each in fields(elsewhere)}
    values |= {name: sorted(values[name]) for name in ("explicit", "inherited")}
    programs = compile_problem(CPU) if settings.compile and case.device == CPU else None
    inputs = ConfigKey.of(model.config).inputs(
        model.path, model.written, sorted(model.idle), values, repr(case.profile), case.layout,
        case.device, facts, programs,
    )  # fmt: skip
    found.add(
        recall(
            "model-checks",
            inputs,
            lambda: find(Findings(), elsewhere),
            asdict,
            lambda known: Findings(**known),
        )
    )


def _parameter_problems(profile: Profile, config: "PretrainedConfig") -> list[str]:
    """Check Muon's matrices, and the modules that ZeRO-3 gathers whole."""
    problems = muon.model_problems(profile, meta_model(config)) if profile.uses_muon else []
    if profile.zero.get(gathering.LEAF_KEY):
        problems += gathering.leaf_problems(profile, meta_model(config))
    return problems


def _proof_problems(model: Model, settings: Settings, found: Findings) -> list[str]:
    """Prove the model on small copies, unless the run's record says that this was done."""
    if not settings.check and model_proof.was_proven(model, settings):
        return []
    names = ("attn_implementation", "document_mask")
    where = settings.where(names[0])
    refused = [line for line in found.problems if line.startswith(where)]

    def prove() -> Findings:
        new = Findings(list(refused), layer_kinds.notices(model))
        model_proof.check(model, settings.seq_len, new)
        if new.problems == refused:
            same_logits.check(model, settings, new)
        key_effects.check(model, settings.seq_len, new)
        return Findings(new.problems[len(refused) :], new.notices)

    if settings.attn_implementation not in ANYWHERE:
        found.add(prove())
        return []
    # Small copies run on the CPU from fixed seeds, so what is found follows from these inputs.
    asked = [settings.seq_len, refused, *((settings.where(n), getattr(settings, n)) for n in names)]
    inputs = ConfigKey.of(model.config).inputs(model.path, model.written, sorted(model.idle), asked)
    found.add(recall("proof", inputs, prove, asdict, lambda known: Findings(**known)))
    return []


def _expert_host_problems(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    return expert_rules.host_problems(plan.settings, machine.ranks_of_host(environment))


def _profiler_problems(plan: Plan) -> list[str]:
    settings = plan.settings
    if settings.profile is None or settings.profile[0] <= plan.total_steps:
        return []
    return [
        f"{settings.where('profile')}: step {settings.profile[0]}, but the run has "
        f"{plan.total_steps} steps. Choose earlier steps."
    ]


def _course_problems(plan: Plan, found: Findings) -> list[str]:
    if found.problems or not plan.ds.scheduler:
        return []
    return course_problems(plan.ds, plan.settings.learning_rate, plan.total_steps)


OF_MODEL: tuple[tuple[str, Check], ...] = (
    ("problems", model_rules.attention_problems),
    ("problems", model_rules.matmul_problems),
    ("problems", model_rules.precision_problems),
    ("problems", model_rules.model_problems),
    ("problems", parallel_rules.model_problems),
    ("problems", expert_rules.problems),
    ("problems", stage_rules.problems),
    ("problems", stage_rules.batch_problems),
    ("problems", model_rules.layerdrop_problems),
    ("problems", _parameter_problems),
    ("notices", model_rules.dropout_notices),
    ("problems", features.problems),
    ("notices", features.notices),
    ("problems", _proof_problems),
    ("problems", expert_proof.problems),
    ("problems", stage_proof.problems),
)
OF_FILES: tuple[tuple[str, Check], ...] = (
    ("notices", model_rules.padding_notices),
    ("problems", evaluate.problems),
    ("problems", existing_run.directory_problems),
)
OF_PLAN: tuple[tuple[str, Check], ...] = (
    ("problems", deepspeed_problems),
    ("problems", _profiler_problems),
    ("problems", _course_problems),
    ("problems", _expert_host_problems),
    ("problems", features.host_problems),
    ("notices", plausibility.notices),
    ("problems", initial_weights.optimizer_problems),
)
