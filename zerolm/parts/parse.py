"""Parse settings from flags and from the JSON file given by `--settings`.

Parsing runs first, and finds every problem in both before any other file is read. Converts the
values that users write; `RunSettings` defines which settings exist. Standard library only, so
`--help` is instant. argparse, which stops at the first problem, is used only for the help and for
commands that share flags with a run.
"""

import argparse
import contextlib
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.command_line import EXIT_OUTPUT_CLOSED, Parser, flush_output
from zerolm.common.errors import EXIT_DONE, ConfigError, RecordError, did_you_mean
from zerolm.common.provenance import version_text
from zerolm.common.records import read_json
from zerolm.common.values import (
    parse_bytes,
    parse_count,
    parse_duration,
    parse_path,
    parse_real,
    shown,
    shown_setting,
    within,
)
from zerolm.config.flag import with_default
from zerolm.config.settings import COMMAND_LINE, FIRST_FLAGS, GROUPS, RECOMPUTE_NAMES, Settings
from zerolm.parts.inheritance import OWN_SETTINGS, Layer, derived_names
from zerolm.parts.other_names import answer_for
from zerolm.parts.settings import FLAGS, RunSettings
from zerolm.run_dir.files import RunFiles, run_of
from zerolm.run_dir.records import find_run_json

USAGE = """\
deepspeed [--num_nodes N --hostfile FILE] pretrain.py --deepspeed_config FILE
           --model_config FILE --data PATH[=WEIGHT] --run_dir PATH [flags]"""
AddFlags = Callable[[argparse.ArgumentParser], None]
INTRODUCTION = (
    "Pretrain a Hugging Face causal language model with DeepSpeed ZeRO. Write flags with dashes or "
    "underscores; numbers as 3e9, 3B, 500M or 2k; bytes as 5GB or 32GiB; durations as 3h50m or "
    "90s; switches as --flag or --no-flag. Omitted flags have defaults derived from the "
    "model; --check prints them. --no-FLAG resets a value from --settings or --branch."
)
SWITCHES = ("switch", "recompute")  # may be written without a value
ONLY_CHECKED = ("world_size", "hardware")  # only for --check, which runs on any machine


def parse_settings(
    argv: Sequence[str], other_flags: Collection[str] = ()
) -> tuple[Settings, list[str]]:
    """Parse flags and the JSON file that `--settings` names.

    Args:
        argv: arguments without the program name. Only `--help` and `--version` exit, with code 0.
        other_flags: additional names to suggest for a mistyped flag.

    Returns:
        (settings, problems). Refused values, and values reset by `--no-NAME`, are treated as if
        they had not been given.
    """
    problems: list[str] = []
    flags = _read_flags(argv, problems, other_flags)
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = flags.get("settings")
    file, is_record = (Layer({}), False) if path is None else _read_file(path, problems)
    # A branch's run.json already contains every setting of the branch and its trunk.
    complete = is_record and "branch" not in flags
    base, base_path, is_trunk = _branch_settings({} if complete else file.values | flags, problems)
    run_dir = flags.get("run_dir") or file.values.get("run_dir")
    resumes = is_record and isinstance(run_dir, str) and _is_record_of(run_dir, str(path))
    file = file.without_derived(but_keep=resumes or (complete and "branch" in file.values))
    derived: frozenset[str] = frozenset()
    for layer, where in ((base, f"{base_path}: settings."), (file, f"{path}: settings.")):
        for name, value in layer.values.items():
            _accept(name, value, f"{where}{name}", given, origins, problems)
        derived = derived - layer.values.keys() | layer.derived
    for name, value in flags.items():
        if value is None:  # --no-NAME
            given.pop(name, None)
            origins.pop(name, None)
        else:
            _accept(name, value, f"{COMMAND_LINE}: --{name}", given, origins, problems)
    trunks = frozenset(base.values if is_trunk else ()) - file.values.keys() - flags.keys()
    inherited = trunks & given.keys()
    explicit = frozenset(given) - (derived - flags.keys()) - {"local_rank"}
    settings = RunSettings(**given, explicit=explicit, inherited=inherited, origins=origins)
    problems += [
        f"{settings.where(name)}: {given[name]} works only with --check. Add --check; a real run "
        f"gets its ranks from the deepspeed launcher."
        for name in ONLY_CHECKED
        if name in given and not settings.check
    ]
    return settings, problems


def add_settings(
    parser: argparse._ActionsContainer,
    names: Iterable[str],
    defaults: Mapping[str, Any] | None = None,
    own_help: Mapping[str, str] | None = None,
    own_flags: Mapping[str, str] | None = None,
) -> None:
    """Add settings to the flags of another command; `settings_of` parses them.

    Args:
        defaults: {name: default in this command}; other flags have the same defaults as for a run.
        own_help: {name: help text in this command}; other flags have the same help texts as for a
            run.
        own_flags: {name: flag in this command}; other flags have the same names as for a run.
    """
    for name in names:
        about, default = FLAGS[name], (defaults or {}).get(name)
        text = about["help"]
        if default is not None:
            text = with_default(about["purpose"], about["kind"], default)
        options: dict[str, Any] = {"help": (own_help or {}).get(name, text), "default": default}
        written, options["dest"] = (own_flags or {}).get(name, f"--{name}"), name
        if about["kind"] == "switch":
            parser.add_argument(written, action=argparse.BooleanOptionalAction, **options)
            continue
        options["metavar"] = _placeholder(name)
        if about["kind"] == "recompute":
            options |= {"nargs": "?", "const": "full"}
        elif about["kind"] == "list":
            options["action"] = "append"
        parser.add_argument(written, **options)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command that uses `add_settings`, parsed by the same rules as for a
    run.

    Raises:
        ConfigError: lists every problem.
    """
    given = {name: getattr(arguments, name, None) for name in FLAGS if name not in ONLY_CHECKED}
    argv = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        argv += [f"--{name}={each}" for each in values if each is not None]
    settings, problems = parse_settings(argv)
    if problems:
        raise ConfigError(problems)
    return settings


def _placeholder(name: str) -> str:
    """Return the placeholder for a flag's value in the help; empty for a boolean flag."""
    return FLAGS[name]["shows"] or "|".join(FLAGS[name]["choices"])


def _is_record_of(run_dir: str, path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return RunFiles(parse_path(run_dir)).record.samefile(path)
    return False


def _branch_settings(
    given: Mapping[str, Any], problems: list[str]
) -> tuple[Layer, Path | None, bool]:
    """Return the settings that `--branch` provides for a run.

    They come from the trunk's run.json, or from the branch's own run.json once it exists.

    Returns:
        The settings; the path of the run.json; whether that file is the trunk's.
    """
    branch, run_dir = given.get("branch"), given.get("run_dir")
    if not isinstance(branch, str):
        return Layer({}), None, False
    if isinstance(run_dir, str):
        own = RunFiles(parse_path(run_dir)).record
        with contextlib.suppress(RecordError):  # reported by the check of the run directory
            if "branch" in (find_run_json(own.parent) or {}):
                return _read_file(str(own), problems)[0].without_derived(but_keep=True), own, False
    trunk = RunFiles(run_of(branch)[0]).record
    if not trunk.is_file():
        problems.append(
            f"{COMMAND_LINE}: --branch: {branch}: there is no {trunk}. Give the directory of a run "
            f"that has started, with or without a step: runs/first@1000."
        )
        return Layer({}), None, False
    values, derived = _read_file(str(trunk), problems)[0].without_derived(but_keep=True)
    shared = {name: value for name, value in values.items() if name not in OWN_SETTINGS}
    return Layer(shared, derived - OWN_SETTINGS), trunk, True


def _accept(
    name: str,
    value: Any,
    where: str,
    given: dict[str, Any],
    origins: dict[str, str],
    problems: list[str],
) -> None:
    """Convert one value and add it to `given`, or add a problem."""
    try:
        given[name] = convert(name, value)
    except ValueError as error:
        problems.append(f"{where}: {shown_setting(where, value)} {error}")
        return
    origins[name] = where
    if given[name] is None:  # "auto": treated as not given
        del given[name], origins[name]


def convert(name: str, value: Any) -> Any:
    """Convert a string or JSON value to the type of a setting.

    Raises:
        ValueError: the message states the rule and the fix.
    """
    about = FLAGS[name]
    kind = about["kind"]
    if name == "micro_batch_size" and value == "auto":
        return None
    converted = CONVERTERS[kind](value)
    if about["shows"].startswith("PATH"):
        several = isinstance(converted, tuple)
        converted = tuple(map(parse_path, converted)) if several else parse_path(converted)
    if about["choices"] and converted not in about["choices"]:
        choices = about["choices"]
        raise ValueError(f"is not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}")
    return within(converted, **about["bounds"])


def _read_flags(
    argv: Sequence[str], problems: list[str], other_flags: Collection[str]
) -> dict[str, Any]:
    """Split the command line into {setting: value as written}."""
    answer(argv)
    flags: dict[str, Any] = {}
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            problems.append(
                f"{COMMAND_LINE}: {argument} is not a flag. Remove it, or quote values."
            )
            continue
        written, equals, value = argument[2:].partition("=")
        name = written.replace("-", "_")
        negated = name.startswith("no_") and FLAGS.get(name[3:], {}).get("kind") in SWITCHES
        kind = FLAGS.get(name, {}).get("kind")
        if name.startswith("no_") and name[3:] in FLAGS and not negated and not equals:
            flags[name[3:]] = None
            continue
        if kind == "recompute" and not equals and remaining and remaining[0] in RECOMPUTE_NAMES:
            equals, value = "=", remaining.pop(0)
        if negated or kind in SWITCHES:
            truth = value if equals else "true"
            if negated:
                truth = "false" if truth == "true" else "true"
            flags[name[3:] if negated else name] = truth
            continue
        has_value = bool(equals) or bool(remaining and not remaining[0].startswith("--"))
        if has_value and not equals:
            value = remaining.pop(0)
        if name not in FLAGS:
            choices = [f"--{known}" for known in (*FLAGS, *other_flags) if known != "local_rank"]
            near = answer_for(name) or did_you_mean(f"--{name}", choices)
            problems.append(f"{COMMAND_LINE}: --{written}: no such flag.{near or ' See --help.'}")
            while remaining and not remaining[0].startswith("--"):
                remaining.pop(0)  # further values of the flag
        elif not has_value:
            problems.append(
                f"{COMMAND_LINE}: --{name} has no value. Write --{name} {_placeholder(name)}."
            )
        elif FLAGS[name]["kind"] == "list":
            flags[name] = (*(flags.get(name) or ()), value)
        else:
            flags[name] = value
    return flags


def _read_file(path: str, problems: list[str]) -> tuple[Layer, bool]:
    """Read a settings file or run.json; a setting that is null counts as not given.

    Returns:
        The settings; whether they are a run's complete settings.
    """
    try:
        record = read_json(path, "a JSON file with settings, or a run's run.json")
    except ConfigError as error:
        problems.extend(error.problems)
        return Layer({}), False
    values = record
    if isinstance(record.get("settings"), dict):
        values = record["settings"]
    is_record = values is not record and (
        "ds_config" in record or Path(path).name == RunFiles("").record.name
    )
    known = {}
    choices = [name for name, about in FLAGS.items() if about["saved"]]
    for written, value in values.items():
        name = written.replace("-", "_")
        if name not in choices:
            if is_record and not value:  # a removed setting that was off
                continue
            hint = answer_for(name) or did_you_mean(name, choices)
            hint = hint or " Remove it; --help all lists the settings."
            problems.append(f"{path}: settings.{written}: {shown(value)}: no such setting.{hint}")
        elif value is not None:
            known[name] = value
    derived = derived_names(record) & known.keys() if is_record else frozenset()
    return Layer(known, derived), is_record


def answer(argv: Sequence[str], usage: str = USAGE, add_flags: AddFlags | None = None) -> None:
    """Print the output of `--help` or `--version` and exit with code 0; return if neither is given.

    Args:
        usage, add_flags: see `help_text`.
    """
    if "--version" in argv:
        print(version_text())
    elif {"-h", "--help", "--help=all"} & set(argv):
        is_complete = "--help=all" in argv or "all" in argv
        print(help_text(usage, add_flags) if is_complete else short_help_text(usage, add_flags))
    else:
        return
    sys.exit(EXIT_DONE if flush_output() else EXIT_OUTPUT_CLOSED)


def help_text(usage: str = USAGE, add_flags: AddFlags | None = None) -> str:
    """Return the text of `--help all`, which lists every flag with its unit and default, by group.

    Args:
        usage: usage line of the program.
        add_flags: adds all of the program's flags and their groups; None for pretrain.py's flags.
    """
    return _parser(usage, add_flags).format_help().rstrip()


def short_help_text(usage: str = USAGE, add_flags: AddFlags | None = None) -> str:
    """Return the text of `--help`, which lists the flags for a first run and states how to list the
    others.
    """
    complete = _parser(usage, add_flags)
    titles = [group.title for group in complete._action_groups if group._group_actions]
    closing = (
        f"--check reports every problem of a run, prints its plan and how long it will take, and "
        f"stops. --help all shows the other {len(complete._actions) - len(FIRST_FLAGS)} flags: "
        f"{', '.join(map(str, titles))}."
    )
    parser = Parser("", INTRODUCTION, usage=usage, add_help=False, epilog=closing)
    add_settings(parser.add_argument_group("a first run"), FIRST_FLAGS)
    return parser.format_help().rstrip()


def _parser(usage: str, add_flags: AddFlags | None) -> Parser:
    parser = Parser("", INTRODUCTION, usage=usage, add_help=False)
    (add_flags or add_all_settings)(parser)
    return parser


def add_all_settings(parser: argparse.ArgumentParser) -> None:
    """Add every setting as a flag to a parser that is used only for the help."""
    for group, title in GROUPS.items():
        names = [name for name, about in FLAGS.items() if about["group"] == group]
        add_settings(parser.add_argument_group(title), names)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text. Write it in quotes, not empty.")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in value):
        raise ValueError("has a control character or invalid UTF-8. Write printable text.")
    return value


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("must be true or false.")


def _recompute(value: Any) -> bool | str:
    """Convert full, selective or off; true means full, and false means off."""
    if (written := str(value).lower()) not in RECOMPUTE_NAMES:
        raise ValueError(f"must be full, selective or off.{did_you_mean(written, RECOMPUTE_NAMES)}")
    return RECOMPUTE_NAMES[written]


def _list(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise ValueError('must be a list of text. Write for example ["shards/web=0.7"].')
    return tuple(_text(value) for value in values)


def _steps(value: Any) -> tuple[int, int]:
    """Convert a range of steps such as `20:23`, or a single step such as `20`."""
    first, colon, last = str(value).partition(":")
    try:
        steps = parse_count(first), parse_count(last if colon else first)
    except ValueError:
        raise ValueError("must be two steps. Write for example 20:23.") from None
    if not 1 <= steps[0] <= steps[1]:
        raise ValueError("must be the first and the last step, from 1. Write for example 20:23.")
    return steps


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "count": parse_count,
    "bytes": parse_bytes,
    "real": parse_real,
    "duration": parse_duration,
    "text": _text,
    "switch": _truth,
    "recompute": _recompute,
    "list": _list,
    "steps": _steps,
}
