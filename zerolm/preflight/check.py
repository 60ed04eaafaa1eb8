"""`check`: check a command line, and return its `Plan` or report all problems at once.

Each rank of pretrain.py calls `check` first, before the process group exists; `--check` does
nothing else. `of_host` reads the settings, the configs and the data manifests, which needs no rank
and no device; `of_rank` does the rest. Nothing is written. All ranks read the same files and get
the same plan. If a check refuses a value, later checks that need it are skipped.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from zerolm import evaluate, features
from zerolm.common import remembered
from zerolm.common.errors import ConfigError, Findings
from zerolm.common.remembered import recall
from zerolm.config.settings import Settings
from zerolm.data import epochs
from zerolm.data.mixture import Mixture, group_size, resolve_mixture
from zerolm.data.packing import data_fingerprint, num_rows
from zerolm.data.sources import Sources, find_source, source_names, source_problems
from zerolm.distributed.layout import Layout
from zerolm.ds_config.precision import Begun
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.topology import layout_of
from zerolm.model.architecture import ConfigKey, causal_lm_class
from zerolm.model.flops import flops_per_token
from zerolm.optim.schedule import SCHEDULES
from zerolm.parts.inheritance import with_origins
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import FLAGS
from zerolm.plan import budget
from zerolm.plan.plan import Plan
from zerolm.plan.resolve import resolve_ds_config, resolve_settings
from zerolm.preflight import branch, checks, existing_run, inputs
from zerolm.preflight import host as hosts
from zerolm.preflight.host import Host
from zerolm.preflight.inputs import Inputs
from zerolm.preflight.summary import figures
from zerolm.shards import cache_budget
from zerolm.shards.token_bytes import TokenBytes, read_token_bytes
from zerolm.tracking.tracker import resolve_trackers

REQUIRED = {
    "data": "token shards: --data PATH[=WEIGHT]",
    "model_config": "a model: --model_config config.json",
    "deepspeed_config": "a ZeRO profile: --deepspeed_config ds_configs/zero2.json",
    "run_dir": "its own directory: --run_dir runs/first",
}
SIZES = frozenset({"seq_len", "batch_tokens", "micro_batch_size", "total_tokens"})


@dataclass(frozen=True)
class Given:
    """What a command line and the files that it names give, for every rank of a host.

    Attributes:
        settings: as given; defaults are not filled in.
        refused: names of the settings whose values were refused.
        start: where the run branches off; None if it is not a branch.
        begun: precision of the run that is resumed or branched from; None for a new run.
        found: what was found in the command line and settings file.
    """

    argv: Sequence[str]
    settings: Settings
    refused: set[str]
    start: branch.Start | None
    begun: Begun | None
    inputs: Inputs
    found: Findings


def check(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Plan:
    """Check a command line on this machine, and return the run's plan.

    Args:
        environment: the launcher's variables: `WORLD_SIZE`, `LOCAL_RANK`, ...

    Raises:
        ConfigError: every problem found, one line each.
    """
    # Keys of what is remembered need all source files, which not every rank of a run shall read.
    reads = "RANK" not in environment or remembered.knows_code()
    with remembered.opened() if reads else nullcontext():
        return of_rank(of_host(argv, environment), environment)


def of_host(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Given:
    """Read the command line and all files; must need no rank, device or process group.

    Ranks with another `LOCAL_RANK` than 0 leave out what one process per host checks in shards.
    """
    settings, problems = parse_settings(argv)
    refused, found = _refused(problems), Findings(problems)
    settings, start = branch.find(resolve_trackers(settings, environment), found)
    _require(settings, refused, found)
    given = inputs.read(settings, refused)
    return Given(argv, settings, refused, start, existing_run.begun(settings, start), given, found)


def of_rank(given: Given, environment: Mapping[str, str] = os.environ) -> Plan:
    """Check what was given on a rank with its device, and return the run's plan.

    Raises:
        ConfigError: every problem found, also by `of_host`, one line each.
    """
    found, model = Findings(), given.inputs.model
    found.add(given.found)
    host = hosts.detect(given.settings, given.argv, environment, found)
    found.add(given.inputs.in_configs)
    profile = inputs.on_device(given.inputs, given.settings, host, given.begun, found)
    found.add(given.inputs.in_data)
    layout = layout_of(given.settings, profile, host.world_size)
    settings = _resolve(given, profile, layout, host, found)
    hosts.check_trackers(settings, environment, found)
    mixture = _check_sources(settings, given.inputs, layout.replicas, found)
    config, sources = getattr(model, "config", None), given.inputs.sources.training
    case = features.Case(settings, config, profile, layout, host.device.kind, given.inputs.initial)
    precision = profile.compute_precision if profile.json else None
    checks.of_model(case, model, found, precision=precision, world_size=host.world_size)
    checks.run(checks.OF_FILES, found, settings=settings, config=config, sources=sources)
    plan, existing = None, existing_run.NO_RUN
    if not found.problems and mixture is not None:
        final = _final(settings, given, profile, host)
        plan = _plan(final, given.inputs, profile, layout, host, mixture)
        plan = replace(plan, token_bytes=_token_bytes(plan, found))
        checks.run(checks.OF_PLAN, found, plan=plan, profile=plan.ds, environment=environment)
        existing = existing_run.compare(plan, environment, found, given.start)
    found.notices += _minimum_notices(settings)
    missing = evaluate.input_problems(settings, sources, config, environment)
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
    given: Given, profile: Profile, layout: Layout, host: Host, found: Findings
) -> Settings:
    """Return the settings with defaults, unless a size that they depend on was refused."""
    settings, model = given.settings, given.inputs.model
    if model is not None:
        settings = replace(settings, model_config=model.path)  # for messages
    if given.refused & SIZES:
        found.problems += budget.schedule_problems(settings)
        return settings
    return resolve_settings(
        settings,
        model,
        profile,
        found,
        layout=layout,
        memory_bytes=host.device.memory_bytes,
    )


def _final(settings: Settings, given: Given, profile: Profile, host: Host) -> Settings:
    """Return the settings of the plan, with what only a run without problems can resolve."""
    model, initial = given.inputs.model, given.inputs.initial
    assert model is not None, "without problems there is a model"
    attention = settings.attn_implementation
    # With other devices and precisions the ranks choose later, when they can inspect the GPU.
    is_fp32 = profile.json and profile.compute_precision == "fp32"
    if settings.document_mask and attention == "auto" and (host.device.kind == "cpu" or is_fp32):
        attention = recall(
            "document-mask-kernel",
            ConfigKey.of(model.config).inputs(),
            lambda: "sdpa" if causal_lm_class(model.config)._supports_sdpa else "eager",
        )
    return replace(
        settings,
        attn_implementation=attention,
        model_config=given.settings.model_config,
        init_from=initial.exact(settings.init_from) if initial else None,
        downstream_interval=evaluate.downstream_interval(
            settings, budget.default_interval(settings, "eval")
        ),
    ).resolved()


def _check_sources(
    settings: Settings, given: Inputs, replicas: int, found: Findings
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
    if not budget.batch_problems(settings, replicas):
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


def _minimum_notices(settings: Settings) -> list[str]:
    schedule = SCHEDULES.get(settings.schedule or "")
    if schedule is None or schedule.uses_minimum or "min_learning_rate" not in settings.explicit:
        return []
    where = settings.where("min_learning_rate")
    return [f"{where}: has no effect with --schedule {settings.schedule}"]


def _plan(
    settings: Settings,
    given: Inputs,
    profile: Profile,
    layout: Layout,
    host: Host,
    mixture: Mixture,
) -> Plan:
    """Build the plan; no check may have found a problem."""
    model, sources, schedule = given.model, given.sources, budget.batch_schedule(settings)
    assert model is not None, "without problems there is a model"
    seq_len, packing = settings.seq_len, settings.packing
    profile = resolve_ds_config(profile, settings, model, layout)
    return Plan(
        settings=settings,
        run_dir=Path(settings.run_dir or ""),
        model=model,
        ds=profile,
        flops_per_token=flops_per_token(model.config, model.shapes, seq_len),
        sources=sources.training,
        source_names=source_names(sources.training),
        weights=sources.weights,
        mixture=mixture,
        val_sources=sources.validation,
        val_source_names=source_names(sources.validation),
        val_sequences=_validation_sequences(settings, sources),
        world_size=host.world_size,
        layout=layout,
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


def _validation_sequences(settings: Settings, sources: Sources) -> int:
    rows = (num_rows(one, settings.seq_len, settings.packing) for one in sources.validation)
    return min((settings.eval_tokens or 0) // settings.seq_len, sum(rows))
