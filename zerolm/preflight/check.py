"""`check`: check a command line, and return its `Plan` or report all problems at once.

Each rank of pretrain.py calls `check` first, before the process group exists; `--check` does
nothing else. `check` reads the settings, the configs, the data manifests and the state of the
machine, and writes nothing. All ranks read the same files and get the same plan. If a check refuses
a value, later checks that need it are skipped.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zerolm import evaluate, features
from zerolm.common.errors import ConfigError, Findings
from zerolm.config.resolved import Resolved
from zerolm.config.settings import Settings
from zerolm.data import epochs
from zerolm.data.mixture import Mixture, group_size, resolve_mixture
from zerolm.data.packing import data_fingerprint, num_rows
from zerolm.data.sources import Sources, find_source, source_names, source_problems
from zerolm.ds_config import muon, parallel_rules
from zerolm.ds_config.resolve import deepspeed_problems
from zerolm.model.architecture import causal_lm_class
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model
from zerolm.optim.schedule import SCHEDULES
from zerolm.parts.inheritance import with_origins
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import FLAGS
from zerolm.plan import budget
from zerolm.plan.plan import Plan
from zerolm.plan.resolve import resolve_ds_config, resolve_settings
from zerolm.preflight import (
    branch,
    existing_run,
    initial_weights,
    inputs,
    model_proof,
    model_rules,
    plausibility,
)
from zerolm.preflight import host as hosts
from zerolm.preflight.host import Host
from zerolm.preflight.inputs import Inputs
from zerolm.preflight.summary import figures
from zerolm.shards import cache_budget
from zerolm.shards.token_bytes import TokenBytes, read_token_bytes

REQUIRED = {
    "data": "token shards: --data PATH[=WEIGHT]",
    "model_config": "a model: --model_config config.json",
    "deepspeed_config": "a ZeRO profile: --deepspeed_config ds_configs/zero2.json",
    "run_dir": "its own directory: --run_dir runs/first",
}
SIZES = frozenset({"seq_len", "batch_tokens", "micro_batch_size", "total_tokens"})


def check(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Plan:
    """Check a command line on this machine, and return the run's plan.

    Args:
        environment: the launcher's variables: `WORLD_SIZE`, `LOCAL_RANK`, ...

    Raises:
        ConfigError: every problem found, one line each.
    """
    settings, problems = parse_settings(argv)
    found, refused = Findings(problems), _refused(problems)
    settings, start = branch.find(settings, found)
    _require(settings, refused, found)
    host = hosts.detect(settings, argv, environment, found)
    given = inputs.read(settings, host, refused, found, existing_run.begun(settings, start))
    given_config = settings.model_config
    if given.model is not None:
        settings = replace(settings, model_config=given.model.path)  # for messages
    settings = _resolve(settings, given, host, refused, found)
    hosts.check_trackers(settings, environment, found)
    mixture = _check_sources(settings, given, host, found)
    settings = _check_model(settings, given, host, found)
    found.problems += evaluate.problems(settings)
    run_dir = existing_run.check_directory(settings, found)
    if not found.problems and given.model is not None and mixture is not None:
        resolved = Resolved.of(
            replace(
                settings,
                model_config=given_config,
                init_from=given.initial.exact(settings.init_from) if given.initial else None,
                downstream_interval=evaluate.downstream_interval(
                    settings, budget.default_interval(settings, "eval")
                ),
            )
        )
        plan = _plan(resolved, run_dir, given.model, given, host, mixture)
        plan = replace(plan, token_bytes=_token_bytes(plan, found))
        found.problems += deepspeed_problems(plan.profile)
        found.problems += _profile_problems(plan)
        found.problems += features.host_problems(plan, environment)
        found.notices += plausibility.notices(plan)
        found.problems += initial_weights.optimizer_problems(plan)
        existing = existing_run.compare(plan, environment, found, start)
    else:
        existing, plan = existing_run.NO_RUN, None
    config = given.model.config if given.model is not None else None
    schedule = SCHEDULES.get(settings.schedule or "")
    ignores_minimum = schedule is not None and not schedule.uses_minimum
    if ignores_minimum and "min_learning_rate" in settings.explicit:
        where = settings.where("min_learning_rate")
        found.notices.append(f"{where}: has no effect with --schedule {settings.schedule}")
    missing = evaluate.input_problems(settings, given.sources.training, config, environment)
    if existing.resumes:  # a missing evaluation package or account must not prevent a resume
        found.notices += [f"the run resumes without: {line}" for line in missing]
    else:
        found.problems += missing
    if found.problems:
        raise ConfigError(with_origins(dict.fromkeys(found.problems), settings))
    assert plan is not None, "without problems there is a plan"
    if (start := existing.start) is not None:
        source = start.checkpoint.directory if start.checkpoint is not None else None
        plan = replace(plan, branch=start.record, branch_from=source)
    derived = figures(plan) | cache_budget.figures([*plan.sources, *plan.val_sources])
    return replace(plan, changed=existing.changed, notices=found.notices, derived=derived)


def _refused(problems: Sequence[str]) -> set[str]:
    """Return the names of settings that appear in `problems`, so they are not also reported
    missing.

    A problem mentions a setting if it refuses its value or suggests it for a mistyped flag.
    """
    return {
        name
        for name in FLAGS
        for problem in problems
        if f"--{name}" in problem or f"settings.{name}:" in problem
    }


def _require(settings: Settings, refused: set[str], found: Findings) -> None:
    """Report a problem for each required setting that is missing."""
    if "branch" in refused:  # the trunk's settings cannot be read
        return
    for name, what in REQUIRED.items():
        if name == "model_config" and settings.init_from:
            continue  # the source provides a model config
        if not getattr(settings, name) and name not in refused:
            found.problems.append(f"command line: --{name}: missing; a run needs {what}.")


def _resolve(
    settings: Settings, given: Inputs, host: Host, refused: set[str], found: Findings
) -> Settings:
    """Fill in the defaults, unless a size that they depend on was refused; return the settings."""
    if refused & SIZES:
        found.problems += budget.schedule_problems(settings)
        return settings
    return resolve_settings(
        settings,
        given.model,
        given.profile,
        found,
        world_size=host.world_size,
        memory_bytes=host.device.memory_bytes,
    )


def _check_sources(
    settings: Settings, given: Inputs, host: Host, found: Findings
) -> Mixture | None:
    """Check the token shards against the model and each other.

    Returns the mixture, or None if it cannot be determined.
    """
    vocab_size = given.model.vocab_size if given.model is not None else None
    problems = source_problems(given.sources, settings, vocab_size, settings.seq_len)
    found.problems += problems
    sources = given.sources.training
    if problems or settings.seq_len is None or not given.all_sources or not sources:
        return None
    group = group_size(settings)
    sizes = [
        num_rows(each, settings.seq_len, settings.packing) // group * group for each in sources
    ]
    if not all(sizes):
        return None
    known = len(found.problems)
    mixture = resolve_mixture(
        settings,
        given.sources.weights,
        lambda name: find_source(name, sources),
        sizes,
        found.problems,
    )
    if len(found.problems) > known or not (settings.total_tokens and settings.batch_tokens):
        return mixture
    if not budget.batch_problems(settings, given.profile.layout(host.world_size).replicas):
        problems, notices = epochs.cap_problems(
            mixture,
            mixture.order(sizes, settings.seed),
            source_names(sources),
            budget.total_sequences(settings),
            settings,
        )
        found.problems += problems
        found.notices += notices
    return mixture


def _check_model(settings: Settings, given: Inputs, host: Host, found: Findings) -> Settings:
    """Check the settings against the model; return the settings with the attention kernel
    resolved.
    """
    profile, device = given.profile, host.device.kind
    precision = profile.compute_precision if profile.json else None
    found.problems += model_rules.attention_problems(settings, device, precision)
    if profile.json:
        found.problems += model_rules.matmul_problems(settings, profile.compute_precision, device)
    if given.model is None:
        return settings
    config = given.model.config
    if profile.json:
        precision = profile.compute_precision
        found.problems += model_rules.precision_problems(settings, config, precision)
    found.problems += model_rules.model_problems(settings, config, device)
    found.problems += parallel_rules.model_problems(settings, config, profile, host.world_size)
    found.problems += muon.shape_problems(profile, given.model.shapes)
    found.notices += model_rules.dropout_notices(settings, config)
    case = features.Case(settings, config, profile, host.world_size, device, given.initial)
    found.problems += features.problems(case)
    found.notices += features.notices(case)
    found.notices += model_rules.padding_notices(settings, config, given.sources.training)
    if settings.check or not model_proof.was_proven(given.model, settings.run_dir):
        model_proof.check(given.model, settings.seq_len, found)
    if not settings.document_mask or settings.attn_implementation != "auto":
        return settings
    if device != "cpu" and precision != "fp32":
        return settings  # resolved later by the ranks, which can inspect the GPU
    sdpa = causal_lm_class(config)._supports_sdpa
    return replace(settings, attn_implementation="sdpa" if sdpa else "eager")


def _plan(
    settings: Resolved,
    run_dir: Path,
    model: Model,
    given: Inputs,
    host: Host,
    mixture: Mixture,
) -> Plan:
    """Build the plan; no check may have found a problem."""
    sources, seq_len, packing = given.sources, settings.seq_len, settings.packing
    schedule = budget.batch_schedule(settings)
    profile = resolve_ds_config(given.profile, settings, model, world_size=host.world_size)
    return Plan(
        settings=settings,
        run_dir=run_dir,
        model=model,
        profile=profile,
        flops_per_token=flops_per_token(model.config, model.shapes, seq_len),
        sources=sources.training,
        source_names=source_names(sources.training),
        weights=sources.weights,
        mixture=mixture,
        val_sources=sources.validation,
        val_source_names=source_names(sources.validation),
        val_sequences=_validation_sequences(settings, sources),
        world_size=host.world_size,
        layout=given.profile.layout(host.world_size),
        device=host.device.kind,
        device_name=host.device.name,
        batch_schedule=schedule,
        initial=given.initial,
        learning_rate=None if profile.scheduler else budget.learning_rate(settings),
        total_sequences=budget.total_sequences(settings),
        total_steps=budget.num_steps(schedule, seq_len, settings.total_tokens),
        data_fingerprint=data_fingerprint(sources.training, seq_len, packing),
        derived={},
        notices=[],
        changed={},
    )


def _token_bytes(plan: Plan, found: Findings) -> TokenBytes | None:
    """Return the byte length of each token, or None with a notice that bits per byte are not
    reported.
    """
    vocab_size = max(source.vocab_size for source in [*plan.sources, *plan.val_sources])
    try:
        table = read_token_bytes(plan.sources[0].tokenizer_directory(), vocab_size)
    except ConfigError as error:
        found.notices += [f"no bits per byte: {problem}" for problem in error.problems]
        return None
    if table.notice:
        found.notices.append(f"bits per byte: {table.notice}")
    return table


def _profile_problems(plan: Plan) -> list[str]:
    settings = plan.settings
    if settings.profile is None or settings.profile[0] <= plan.total_steps:
        return []
    return [
        f"{settings.where('profile')}: step {settings.profile[0]}, but the run has "
        f"{plan.total_steps} steps. Choose earlier steps."
    ]


def _validation_sequences(settings: Resolved, sources: Sources) -> int:
    rows = (num_rows(one, settings.seq_len, settings.packing) for one in sources.validation)
    return min((settings.eval_tokens or 0) // settings.seq_len, sum(rows))
