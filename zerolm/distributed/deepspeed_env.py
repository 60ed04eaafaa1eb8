"""`.deepspeed_env`: variables that DeepSpeed's launcher sets for the ranks on other hosts.

The launcher copies each line into the command for a host's shell; pdsh and that shell may change
characters of it. Nothing else reads the file. Standard library only.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from zerolm.common.errors import ConfigError
from zerolm.common.records import unreadable

NAME = re.compile(r"[A-Z_][A-Z_0-9]*", re.IGNORECASE | re.ASCII)
# deepspeed/launcher/multinode_runner.py 0.19.8, add_export: double quotes around all but simple
# values. pdsh replaces %h, %u, %n and %% (pipecmd.c).
CHANGED = re.compile(r"""["$`\0]|\\(\\|$)|%[hun%]|^'.*'$""", re.DOTALL)


def change_of(value: str) -> str | None:
    """Return why a value would not reach the ranks on other hosts as written, None if it would."""
    if not (found := CHANGED.search(value)):
        return None
    if "'" in found[0] or '"' in found[0]:
        return "has quotes, which need not be written around spaces. Remove them."
    return f"has {found[0]!r}, which the host's shell or pdsh would replace. Write the final value."


def deepspeed_env_files(environment: Mapping[str, str] = os.environ) -> dict[Path, dict[str, str]]:
    """Return {file: its variables} for each `.deepspeed_env` that DeepSpeed reads, in its order.

    Raises:
        ConfigError: every line that would not reach the ranks as written.
    """
    directories = (Path(environment.get("HOME") or Path.home()), Path.cwd())
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    files: dict[Path, dict[str, str]] = {}
    problems = []
    for path in dict.fromkeys(directory / name for directory in directories):
        if not path.is_file():
            continue
        files[path] = {}
        try:
            with path.open() as file:
                lines = list(file)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(unreadable(path, error, "Write it as UTF-8 text."))
            continue
        for number, line in enumerate(lines, start=1):
            key, equals, value = (part.strip() for part in line.partition("="))
            key = key.removeprefix("export ").lstrip()
            if not equals or not NAME.fullmatch(key):
                problems.append(
                    f"{path}: line {number}: not NAME=VALUE, without which DeepSpeed's launcher "
                    f"ends or starts nothing. Remove comments, blank lines and text around names."
                )
            elif change := change_of(value):
                problems.append(f"{path}: line {number}: {key}: {change}")
            files[path][key] = value
    if problems:
        raise ConfigError(problems)
    return files
