"""Files that come with zerolm, and the commands that start them in other processes.

A checkout and an installed wheel store them in the same places. Every Python process is started
through `module_command` or `code_command`, so no file in the working directory can be imported by
accident.
"""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # the checkout, or the site-packages directory
SCRIPT = ROOT / "pretrain.py"
RUN_MODULE = ROOT / "zerolm" / "run_module.py"
WITHOUT_DIRECTORY = "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
DS_CONFIGS = ROOT / "ds_configs"
DIRECTORIES = ("ds_configs", "model_configs")


def find_config(path: str | Path) -> Path:
    """Find a config file; `ds_configs/zero2.json`, for example, is found from any directory.

    If a relative path does not exist, it is looked up among the files that come with zerolm.
    """
    path = Path(path)
    shipped = ROOT / path
    in_directory = path.parts[:1] in [(name,) for name in DIRECTORIES] and ".." not in path.parts
    return shipped if in_directory and not path.exists() and shipped.exists() else path


def shipped_notice(path: str | Path) -> str | None:
    """Return a line for the plan if `find_config` selects a file of zerolm's own, or None."""
    found = find_config(path)
    return None if found == Path(path) else f"{path}: not in this directory; using {found}"


# ---- Other processes


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the argv of `python -m MODULE ARGUMENTS` without the working directory on sys.path."""
    return [sys.executable, str(RUN_MODULE), module, *map(str, arguments)]


def code_command(code: str) -> list[str]:
    """Return the argv of `python -c CODE` without the working directory on sys.path."""
    return [sys.executable, "-c", WITHOUT_DIRECTORY + code]


def shield(environment: MutableMapping[str, str]) -> None:
    """Keep the working directory's files out of Python processes that other libraries start.

    Such processes are started by DeepSpeed's launcher and, with `python -c`, by multiprocessing.
    Empty entries in PYTHONPATH also mean the working directory. Called at the start of each
    program.
    """
    kept = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "-packages" not in ROOT.name and str(ROOT) not in kept:
        kept.insert(0, str(ROOT))  # PYTHONSAFEPATH also leaves out a script's directory
    environment.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(kept))
    if sys.version_info < (3, 11):
        _shield_multiprocessing()


def _shield_multiprocessing() -> None:
    """Make multiprocessing behave as with PYTHONSAFEPATH, which Python supports from 3.11 on."""
    import multiprocessing.util

    util: Any = multiprocessing.util
    start = util.spawnv_passfds

    def start_shielded(path: Any, arguments: Any, descriptors: Any) -> int:
        arguments = list(arguments)
        if "-c" in arguments:
            place = arguments.index("-c") + 1
            arguments[place] = WITHOUT_DIRECTORY + arguments[place]
        return start(path, arguments, descriptors)

    util.spawnv_passfds = start_shielded
