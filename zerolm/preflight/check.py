"""Everything that can be known before a process group exists: every problem at once, or the plan.

The first thing that each rank of pretrain.py does, and all that `--check` does. It reads the three
files, the data's manifests and the machine; it writes nothing. All ranks see the same files and
come to the same plan. Each step goes on as far as it can with what the ones before it found out.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerolm import (
    budget,
    data_cache,
    ds_config,
    evaluation_rules,
    host_rules,
    inputs,
    muon,
    parallel_rules,
    run_rules,
)
from zerolm.architecture import causal_lm_class
from zerolm.errors import ConfigError, Findings
from zerolm.flags import parse_settings
from zerolm.flops import flops_per_token
from zerolm.host_rules import Host
from zerolm.inputs import Inputs
from zerolm.mixture import Mixture
from zerolm.model_rules import (
    attention_problems,
    dropout_notices,
    matmul_problems,
    model_problems,
    router_notices,
)
from zerolm.packing import data_fingerprint, num_rows
from zerolm.plan import Plan, figures
from zerolm.resolution import resolved_ds_config, resolved_mixture, resolved_settings
from zerolm.run_rules import Changed
from zerolm.settings import FLAGS, Settings
from zerolm.sources import source_names, source_problems

REQUIRED = {
    "data": "token shards: --data PATH[=WEIGHT]",
    "model_config": "a model: --model_config config.json",
    "deepspeed_config": "a ZeRO profile: --deepspeed_config ds_configs/zero2.json",
    "run_dir": "a directory of its own: --run_dir runs/first",
}


def check(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Plan:
    """Check a command line on this machine.

    Args:
        argv: flags, without the program's name.
        environment: of the launcher: `WORLD_SIZE`, `LOCAL_RANK`, ...

    Raises:
        ConfigError: every problem that was found, a line each.
    """
    settings, problems = parse_settings(argv)
    found, refused = Findings(problems), _refused(problems)
    _require(settings, refused, found)
    host = host_rules.look(settings, argv, environment, found)
    given = inputs.read(settings, host, refused, found)
    settings = resolved_settings(settings, given, host, refused, found)
    mixture = _check_sources(settings, given, found)
    settings = _check_model(settings, given, host, found)
    found.problems += evaluation_rules.problems(settings)
    earlier = run_rules.look(settings, given, host, mixture, environment, found)
    config = given.model.config if given.model is not None else None
    missing = evaluation_rules.missing(settings, given.sources.training, config, environment)
    if earlier.resumes:  # what only observes a run does not keep it from going on
        found.notices += [f"the run goes on without: {line}" for line in missing]
    else:
        found.problems += missing
    if found.problems:
        raise ConfigError(list(dict.fromkeys(found.problems)))
    assert mixture is not None
    return _plan(settings, given, host, mixture, earlier.changed, found.notices)


def _refused(problems: Sequence[str]) -> set[str]:
    """Return the settings that were refused, or may have been meant by a typo.

    Nothing is concluded from their absence.
    """
    return {
        name
        for name in FLAGS
        for problem in problems
        if f"--{name}" in problem or f"settings.{name}:" in problem
    }


def _require(settings: Settings, refused: set[str], found: Findings) -> None:
    """Ask for what every run needs."""
    for name, what in REQUIRED.items():
        if not getattr(settings, name) and name not in refused:
            found.problems.append(f"command line: --{name}: missing, a run needs {what}.")


def _check_sources(settings: Settings, given: Inputs, found: Findings) -> Mixture | None:
    """Check the token shards against the model and each other; return what is taken of them."""
    vocab_size = given.model.vocab_size if given.model is not None else None
    problems = source_problems(given.sources, settings, vocab_size, settings.seq_len)
    found.problems += problems
    return None if problems else resolved_mixture(settings, given, found)


def _check_model(settings: Settings, given: Inputs, host: Host, found: Findings) -> Settings:
    """Check what is asked of the model; return the settings with its attention chosen."""
    raw, device = given.profile.ds_config, host.device.kind
    found.problems += attention_problems(settings, device)
    if raw:
        found.problems += matmul_problems(settings, ds_config.compute_precision(raw), device)
    if given.model is None:
        return settings
    config = given.model.config
    found.problems += model_problems(settings, config, device)
    found.problems += parallel_rules.model_problems(settings, config, raw, host.world_size)
    found.problems += muon.shape_problems(raw, given.model.shapes, given.profile.name)
    found.notices += dropout_notices(settings, config)
    found.notices += router_notices(settings, config)
    if not settings.document_mask or settings.attn_implementation != "auto":
        return settings
    # Flash attention would take the mask for one of padding.
    sdpa = causal_lm_class(config)._supports_sdpa
    return replace(settings, attn_implementation="sdpa" if sdpa else "eager")


def _plan(
    settings: Settings,
    given: Inputs,
    host: Host,
    mixture: Mixture,
    changed: Changed,
    notices: list[str],
) -> Plan:
    """Put together what was found out of a run without problems."""
    model, sources = given.model, given.sources
    assert model is not None and settings.seq_len and settings.batch_tokens
    assert settings.micro_batch_size and settings.total_tokens
    assert settings.weight_decay is not None
    schedule, resolved = budget.batch_schedule(settings), resolved_ds_config(settings, given, host)
    windows = sum(
        num_rows(source, settings.seq_len, settings.packing) for source in sources.validation
    )
    plan = Plan(
        settings=settings,
        model_config=model.config,
        shapes=model.shapes,
        num_parameters=model.num_parameters,
        flops_per_token=flops_per_token(model.config, model.shapes, settings.seq_len),
        ds_config=resolved,
        zero_stage=ds_config.zero_stage(resolved),
        precision=ds_config.precision(resolved),
        compute_precision=ds_config.compute_precision(resolved),
        sources=sources.training,
        source_names=source_names(sources.training),
        weights=sources.weights,
        mixture=mixture,
        val_sources=sources.validation,
        val_source_names=source_names(sources.validation),
        val_sequences=min((settings.eval_tokens or 0) // settings.seq_len, windows),
        world_size=host.world_size,
        layout=given.profile.layout,
        device=host.device.kind,
        micro_batch_size=settings.micro_batch_size,
        accumulation=resolved["gradient_accumulation_steps"],
        batch_sequences=schedule.batch_sequences,
        batch_schedule=schedule,
        learning_rate=None if "scheduler" in resolved else budget.learning_rate(settings),
        weight_decay=settings.weight_decay,
        total_sequences=budget.total_sequences(settings),
        total_steps=budget.num_steps(settings, settings.total_tokens),
        data_fingerprint=data_fingerprint(sources.training, settings.seq_len, settings.packing),
        derived={},
        notices=notices,
        changed=changed,
    )
    every = [*plan.sources, *plan.val_sources]
    return replace(plan, derived=figures(plan) | data_cache.figures(every))
