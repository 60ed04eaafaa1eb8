"""Settings as a user gives them: flags, and the JSON file that `--settings` names.

The first thing that happens. Every problem of both is found, before anything is read. Knows how a
setting is written; what settings there are is settings.py's. Standard library only: `--help` is
instant.
"""

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from zerolm.errors import ConfigError, did_you_mean
from zerolm.recomputation import WRITTEN
from zerolm.settings import COMMAND_LINE, FLAGS, GROUPS, Settings
from zerolm.values import CONVERTERS, read_json, shown

SWITCHES = ("switch", "recompute")  # may stand without a value


def parse_settings(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """Read flags, and the JSON file that `--settings` names.

    Args:
        argv: without the program's name. `--help` prints and exits 0; nothing else exits.

    Returns:
        The settings, in which whatever was refused is as if not given; and every problem found.
    """
    problems: list[str] = []
    flags = _read_flags(argv, problems)
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = flags.get("settings")
    if path is not None:
        for name, value in _read_file(path, problems).items():
            _accept(name, value, f"{path}: settings.{name}", given, origins, problems)
    for name, value in flags.items():
        _accept(name, value, f"{COMMAND_LINE}: --{name}", given, origins, problems)
    settings = Settings(**given, explicit=frozenset(given) - {"local_rank"}, origins=origins)
    if settings.world_size is not None and not settings.check:
        problems.append(
            f"{settings.where('world_size')}: {settings.world_size}, only for --check. Add --check;"
            f" a real run has as many ranks as the deepspeed launcher starts."
        )
    return settings, problems


def _accept(
    name: str,
    value: Any,
    where: str,
    given: dict[str, Any],
    origins: dict[str, str],
    problems: list[str],
) -> None:
    """Convert one value and put it among those given, or say why not."""
    try:
        given[name] = convert(name, value)
    except ValueError as error:
        problems.append(f"{where}: {shown(value)}, {error}")
        return
    origins[name] = where
    if given[name] is None:  # "auto": as if not given
        del given[name], origins[name]


def convert(name: str, value: Any) -> Any:
    """Convert what a user wrote, a string or a JSON value, to what the field holds.

    Raises:
        ValueError: a sentence with the rule and the fix.
    """
    about = FLAGS[name]
    kind = about["kind"]
    if name == "micro_batch_size" and value == "auto":
        return None
    converted = CONVERTERS[kind](value)
    if about["choices"] and converted not in about["choices"]:
        choices = about["choices"]
        raise ValueError(f"not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}")
    minimum, below = about["minimum"], about["below"]
    if minimum is not None and converted < minimum:
        raise ValueError(f"must be at least {minimum}. Give a larger number.")
    if below is not None and converted >= below:
        raise ValueError(f"must be below {below}. Give a smaller number.")
    return converted


def _read_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Split the command line into names and what was written for them.

    Not argparse: that stops at the first problem, and takes an abbreviation for the flag.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    flags: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(f"{COMMAND_LINE}: {word}, not a flag. Remove it, or quote values.")
            continue
        written, equals, value = word[2:].partition("=")
        name = written.replace("-", "_")
        negated = name.startswith("no_") and FLAGS.get(name[3:], {}).get("kind") in SWITCHES
        kind = FLAGS.get(name, {}).get("kind")
        if kind == "recompute" and not equals and words and words[0] in WRITTEN:
            equals, value = "=", words.pop(0)
        if negated or kind in SWITCHES:
            truth = value if equals else "true"
            if negated:
                truth = "false" if truth == "true" else "true"
            flags[name[3:] if negated else name] = truth
            continue
        has_value = bool(equals) or bool(words and not words[0].startswith("--"))
        if has_value and not equals:
            value = words.pop(0)
        if name not in FLAGS:
            choices = [f"--{known}" for known in FLAGS if known != "local_rank"]
            problems.append(
                f"{COMMAND_LINE}: --{written}, no such flag.{did_you_mean(f'--{name}', choices)} "
                f"See --help."
            )
        elif not has_value:
            problems.append(
                f"{COMMAND_LINE}: --{name}, lacks its value. Write --{name} "
                f"{FLAGS[name]['shows'] or '|'.join(FLAGS[name]['choices'])}."
            )
        elif FLAGS[name]["kind"] == "list":
            flags[name] = (*flags.get(name, ()), value)
        else:
            flags[name] = value
    return flags


def _read_file(path: str, problems: list[str]) -> dict[str, Any]:
    """Read a settings file or a run.json; null is "not given"."""
    try:
        values = read_json(path, "a JSON file with settings, or the run.json of a run")
    except ConfigError as error:
        problems.extend(error.problems)
        return {}
    if isinstance(values.get("settings"), dict):
        values = values["settings"]
    known = {}
    choices = [name for name, about in FLAGS.items() if about["saved"]]
    for written, value in values.items():
        name = written.replace("-", "_")
        if name not in choices:
            hint = did_you_mean(name, choices) or " Remove it; --help lists the settings."
            problems.append(f"{path}: settings.{written}: {shown(value)}, no such setting.{hint}")
        elif value is not None:
            known[name] = value
    return known


def help_text() -> str:
    """Return what `--help` prints: every flag with its unit, by group."""
    lines = [
        "usage: deepspeed [--num_nodes N --hostfile FILE] pretrain.py --deepspeed_config FILE",
        "           --model_config FILE --data PATH[=WEIGHT] --run_dir PATH [flags]",
        "",
        "Pretrain a Hugging Face causal language model with DeepSpeed ZeRO. Flags may be written",
        "with dashes or underscores; numbers as 3e9, 3B, 500M or 2k; switches as --flag or",
        "--no-flag. What was not given gets a default that suits the model; --check shows it.",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, about in FLAGS.items():
            if about["group"] == group:
                shows = about["shows"] or "|".join(about["choices"])
                head = f"  --{name} {shows}".rstrip()
                text = about["help"].replace("%%", "%")
                wrapped = textwrap.wrap(text, 100 - 40) or [""]
                first = f"{head:<40}{wrapped[0]}" if len(head) < 39 else head
                rest = wrapped[1:] if len(head) < 39 else wrapped
                lines += [first, *(" " * 40 + part for part in rest)]
    return "\n".join(lines)
