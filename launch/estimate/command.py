"""The `launch plan` command: calls the module that handles each flag.

`plan_run` resolves the run, and `estimate` computes the figures of its plan. `--search` compares
profiles, and `--budget` compares model sizes. Heavy imports are inside functions to keep `--help`
fast.
"""

import argparse
import json
import logging
from typing import TYPE_CHECKING, Any

from launch.estimate.flags import DEFAULT_DS_CONFIG, add_flags, budget_of, hardware_of
from zerolm.common import remembered
from zerolm.common.errors import ConfigError
from zerolm.config.settings import NOT_GIVEN
from zerolm.parts.parse import settings_of

if TYPE_CHECKING:
    from launch.estimate.estimate import Assumptions
    from zerolm.model.model import Model

__all__ = ["add_flags", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    if arguments.write and not arguments.search:
        raise ConfigError("command line: --write needs --search. Add it, or remove --write.")
    if arguments.budget:
        return _budget(arguments)
    if not (arguments.model_config or arguments.init_from or arguments.branch):
        raise ConfigError("command line: --model_config: missing. Name a config.json.")
    logging.disable(logging.WARNING)  # hides DeepSpeed's warning that there is no accelerator
    try:
        with remembered.opened():
            return _search(arguments) if arguments.search else _plan(arguments)
    finally:
        logging.disable(logging.NOTSET)


# -------------------------------------------------------------------------------------------------
# One plan


def _plan(arguments: argparse.Namespace) -> int:
    from launch.estimate import search
    from launch.estimate.estimate import estimate, to_json

    run, profile, settings = _planned_run(arguments)
    assumed = assumptions(arguments, run.model)
    found = estimate(run, assumed, arguments.mfu)
    if arguments.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        from launch.estimate.text import as_text

        _print_notices(arguments)
        for notice in run.model.notices:
            print(f"note: {notice}")
        print(as_text(found, arguments.mfu))
        others = search.faster(profile, settings, found, assumed)
        if others and arguments.mfu is None:
            print(search.instead(found, others))
    return 0


def _print_notices(arguments: argparse.Namespace) -> None:
    """Print a notice for each config file that was read from the files shipped with zerolm."""
    from zerolm.common.shipped import shipped_notice

    for name in (arguments.model_config, arguments.deepspeed_config or DEFAULT_DS_CONFIG):
        if name and (notice := shipped_notice(name)):
            print(f"note: {notice}")


def _planned_run(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the resolved run, and the profile and settings from before they were resolved."""
    from launch.estimate.planned_run import plan_run
    from zerolm.ds_config.precision import with_precision
    from zerolm.ds_config.profile import Profile

    settings, model, begun = _settings_and_model(arguments)
    profile = Profile.read(settings.deepspeed_config or DEFAULT_DS_CONFIG)
    problems = list(profile.problems)
    hardware = hardware_of(arguments)
    profile, notices = with_precision(profile, settings, hardware.device, problems)
    for notice in [] if arguments.json else notices:
        print(f"note: {notice}")
    if problems:
        raise ConfigError(problems)
    run = plan_run(
        model,
        profile,
        settings,
        hardware,
        arguments.devices,
        per_node(arguments),
        begun_tokens=begun,
        rank_imbalance=assumptions(arguments, model).rank_imbalance,
    )
    return run, profile, settings


def _settings_and_model(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """Return the settings, the model, and the number of tokens trained before the branch point.

    This number is 0 without `--branch`. Reads the configs of other runs and of pretrained models,
    but no weights.
    """
    from dataclasses import replace

    from zerolm.common.errors import Findings
    from zerolm.model.model import Model
    from zerolm.preflight.exchanged import exchanged_problems

    settings = settings_of(arguments)
    found = Findings(exchanged_problems(settings))
    if found.problems:
        raise ConfigError(found.problems)
    if arguments.branch:
        from transformers import AutoConfig

        from zerolm.preflight import branch

        settings, start = branch.find(settings, found)
        if start is None or start.trunk is None or found.problems:
            raise ConfigError(found.problems)
        if "micro_batch_size" in settings.inherited:  # chosen for the trunk's devices
            settings = replace(settings, micro_batch_size=NOT_GIVEN)
        values = dict(start.trunk["model_config"])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        return settings, Model.from_config(config, start.trunk_record), start.record["tokens"]
    given = Model.recalled(arguments.model_config) if arguments.model_config else None
    if arguments.init_from:
        from zerolm.preflight import initial_weights

        opened = initial_weights.open_source(settings, found)
        given = initial_weights.model_of(opened, given, found) if opened is not None else None
    if found.problems or given is None:
        raise ConfigError(found.problems)
    return settings, given, 0


def per_node(arguments: argparse.Namespace) -> int:
    """Return the number of devices per node."""
    devices, local = arguments.devices, min(arguments.devices, arguments.devices_per_node)
    if devices % local:
        raise ConfigError(
            f"command line: --devices: {devices} must be a multiple of --devices_per_node "
            f"{local}. Use {devices // local * local} or {-(-devices // local) * local}."
        )
    return local


def assumptions(arguments: argparse.Namespace, model: "Model") -> "Assumptions":
    from launch.estimate.estimate import Assumptions
    from zerolm.model.architecture import num_experts
    from zerolm.plan import exchange, hardware

    defaults = hardware.assumed()

    def flag_or_default(flag: str, key: str) -> float:
        given = getattr(arguments, flag)
        return defaults[key] if given is None else given

    given = arguments.rank_imbalance
    if given is not None and given < 1:
        raise ConfigError(
            f"command line: --rank_imbalance: {given:g} must be at least 1, which is balanced. "
            f"Give the metric router/rank_imbalance of a run, or remove the flag."
        )
    if given is not None and not num_experts(model.config)[0]:
        raise ConfigError(
            f"command line: --rank_imbalance: {given:g}, but {model.path} is not a mixture of "
            f"experts. Remove the flag."
        )
    restart_seconds = flag_or_default("restart_seconds", "restart_seconds")
    if arguments.restarts_of is not None:
        restart_seconds = _measured_restart(arguments.restarts_of)
    return Assumptions(
        flag_or_default("failures_per_device_hour", "failures_per_device_hour"),
        restart_seconds,
        flag_or_default("storage_bandwidth", "storage_write_bytes_per_second"),
        exchange.IMBALANCE if given is None else given,
    )


def _measured_restart(run_dir: str) -> float:
    """Return the median duration of a run's recoveries in seconds, excluding repeated steps."""
    from statistics import median

    from zerolm.plan.lost_time import measured
    from zerolm.run_dir.files import RunFiles
    from zerolm.run_dir.jsonl import EventRow, read_rows

    path = RunFiles(run_dir).events
    seconds = measured(read_rows(path, EventRow)).restart_seconds
    if not seconds:
        raise ConfigError(
            f"command line: --restarts_of: {path} has no event `recovered`. Give a run that "
            f"zerolm supervise has restarted, or --restart_seconds."
        )
    return float(median(seconds))


# -------------------------------------------------------------------------------------------------
# --search


def _search(arguments: argparse.Namespace) -> int:
    from launch.estimate import search

    settings, model, _ = _settings_and_model(arguments)
    candidates = search.search(
        model,
        settings,
        hardware_of(arguments),
        arguments.devices,
        per_node(arguments),
        assumptions(arguments, model),
    )
    print(json.dumps(search.to_json(candidates), indent=2) if arguments.json
          else search.as_text(candidates))  # fmt: skip
    if not arguments.json and (
        note := search.break_even(candidates, assumptions(arguments, model))
    ):
        print(note)
    best = next((one for one in candidates if one.rejected is None), None)
    if best is None:
        return 2
    if arguments.write:
        from zerolm.common.files import write_json

        write_json(arguments.write, best.profile.json)
        if not arguments.json:
            print(search.usage(best, arguments.write))
    return 0


# -------------------------------------------------------------------------------------------------
# --budget


def _budget(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from launch.estimate import scaling

    flops, derivation = budget_of(arguments)
    found = scaling.choices(flops)
    if arguments.json:
        print(json.dumps({"flops": flops, "choices": [asdict(one) for one in found]}, indent=2))
    else:
        print(f"{derivation}{scaling.as_text(flops, found)}")
    return 0
