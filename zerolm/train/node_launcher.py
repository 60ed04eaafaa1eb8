"""The node launcher: DeepSpeed's own, with ranks forked from a process that has imported for them.

DeepSpeed's code parses the flags, sets each rank's variables, and waits for the ranks. Its
`subprocess` is replaced by one that imports everything which a rank imports, once, and forks each
rank. Where that is not safe, ranks are started afresh, and a line says why.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import platform
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerolm.common import forked, interrupts, remembered
from zerolm.common.process_tree import NODE_LAUNCHER, end_with_parent
from zerolm.common.shipped import RUN_MODULE, SCRIPT, find_config, shield
from zerolm.engine import deepspeed_launcher, launcher, replaced
from zerolm.engine.launcher_options import AUTO, FORK, FRESH, RANK_START, rank_start
from zerolm.parts.parse import parse_settings
from zerolm.train import held_imports

MODULES = ("pretrain", "zerolm.train.engine_building", "zerolm.train.process_state")
OF_RANK = ("RANK", "LOCAL_RANK")
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"  # on x86 torch has another library for its products
LATE = ("MASTER_", "ZEROLM_")  # beginnings of variables that no import reads
POLL_SECONDS = 0.05


class Ranks:
    """Starts the ranks of a host, in the place of `subprocess.Popen`.

    Attributes:
        forks: whether ranks are forked; None before the first.
    """

    def __init__(self, start: str):
        self.start = start
        self.forks: bool | None = None
        self.set_by_imports: dict[str, str] = {}
        self.pids: list[int] = []

    def __call__(self, command: Sequence[str], env: Mapping[str, str], **outputs: Any) -> Any:
        if self.forks is None:
            problem = self._prepare(command, env)
            self.forks = problem is None
            if problem:
                print(f"node launcher: starting each rank afresh: {problem}", file=sys.stderr)
        env = {name: value for name, value in env.items() if name != forked.IMPORTS}
        process: Any
        if self.forks:
            env |= self.set_by_imports
            process = forked.Forked(command, env, **outputs, ends_with_parent=True)
        else:
            process = subprocess.Popen(command, env=env, preexec_fn=end_with_parent, **outputs)
        self.pids.append(process.pid)
        return process

    def sleep(self, seconds: float) -> None:
        """Sleep between two looks for ranks that have ended, but not once all have.

        Until then a dead rank stays visible to the watchdogs of the others, which say how it ended.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(_has_ended, self.pids)):
            time.sleep(POLL_SECONDS)

    def _prepare(self, command: Sequence[str], env: Mapping[str, str]) -> str | None:
        """Import for the ranks; return why they cannot be forked, "" if a flag says so, or None."""
        environment = {name: value for name, value in env.items() if name not in OF_RANK}
        if (problem := fork_problem(command, self.start)) is not None:
            return problem
        if forked.imports is None:
            added = import_for_ranks(command[3:], environment)
            if problem := forked.touched():
                return problem
            forked.imports = forked.Imports(environment, added)
            held_imports.fork_holder(environment)
        elif changed := differences(forked.imports.environment, environment):
            return f"the environment has changed since the imports: {', '.join(changed)}"
        self.set_by_imports = forked.imports.added
        return None


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, whose exit code stays to be asked for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it was asked for
        return True


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the variables that differ, except those that no import reads."""
    names = sorted({*one, *other})
    return [
        name for name in names if one.get(name) != other.get(name) and not name.startswith(LATE)
    ]


def fork_problem(command: Sequence[str], start: str) -> str | None:
    """Return why ranks are not to be forked, "" if the flag says so, or None if they are."""
    if start == FRESH:
        return ""
    if command[0] == "numactl":
        return "numactl must bind its cores before it imports torch"
    if list(command[:2]) != [sys.executable, "-u"] or command[2] == "-m":
        return "it runs no Python script"
    if start == AUTO:
        if not Path(command[2]).exists() or not SCRIPT.samefile(command[2]):
            return f"{command[2]} is not zerolm's pretrain.py"
        if deepspeed_launcher.accelerator_kind() != deepspeed_launcher.CPU:
            return f"this host may have an accelerator (--{RANK_START} {FORK} would fork)"
    return None


def import_for_ranks(argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Import what each rank imports, with its environment; return the variables that this sets.

    Args:
        argv: arguments of pretrain.py.
        environment: without the variables that number the ranks of this host.
    """
    from zerolm.train.before_imports import prepare_host

    os.environ.clear()
    os.environ.update(environment)
    prepare_host(os.environ)
    if own_blas := NUMPY_THREADS not in environment and platform.machine() == "x86_64":
        os.environ[NUMPY_THREADS] = "1"  # numpy's and scipy's OpenBLAS start threads when imported
    for name in MODULES:
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # the ranks report it
        importlib.import_module(_modeling_module(argv))
    with contextlib.suppress(Exception):
        _load_operators(argv)
    remembered.code_digest()
    if own_blas:
        del os.environ[NUMPY_THREADS]
    del sys.modules["pretrain"]
    gc.collect()
    gc.freeze()  # so that ranks share the memory of these modules
    return {name: value for name, value in os.environ.items() if environment.get(name) != value}


def _modeling_module(argv: Sequence[str]) -> str:
    """Return the name of the module of transformers with the model that arguments ask for."""
    path = find_config(parse_settings(list(argv))[0].model_config or "")
    file = path / "config.json" if path.is_dir() else path
    family = json.loads(file.read_text())["model_type"]
    return f"transformers.models.{family}.modeling_{family}"


def _load_operators(argv: Sequence[str]) -> None:
    """Load what is built of the operators that a run on CPUs uses."""
    from zerolm.engine.operators import COMMUNICATION, OPTIMIZER, guard_builds, load_built

    path = find_config(parse_settings(list(argv))[0].deepspeed_config or "")
    offloads = "offload" in path.read_text()  # only then ranks load the optimizer's
    guard_builds(partial(print, file=sys.stderr, flush=True))  # of what has become stale
    load_built((COMMUNICATION, OPTIMIZER) if offloads else (COMMUNICATION,), os.environ)


# ---- Processes


def run_rank(argv: Sequence[str]) -> None:
    """Run the script of a rank as a new Python process would."""
    from zerolm.train import process_state

    process_state.reset()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    atexit.register(gc.unfreeze)  # else triton 3.9 prints what was frozen as leaked at exit
    sys.argv, sys.orig_argv = list(argv[2:]), list(argv)
    runpy.run_path(argv[2], run_name="__main__")


def run_as(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be, in a forked process, the runner, the node launcher or the rank of these arguments."""
    forked.adopt(argv, environment)
    module, place = str(RUN_MODULE), list(argv).index
    if module not in argv[:3]:
        return run_rank(argv)
    interrupts.end_on_interrupt()
    shield(os.environ)
    program = launch_ranks if argv[place(module) + 1] == NODE_LAUNCHER else launcher.main
    return program(argv[place(module) + 2 :])


def launch_ranks(argv: Sequence[str]) -> None:
    """Start the ranks of this host and wait for them, as DeepSpeed's node launcher does."""
    launch = deepspeed_launcher.load("launch")
    start, words = rank_start(argv)
    ranks = Ranks(start)
    replaced.install(launch, "subprocess", SimpleNamespace(Popen=ranks))
    replaced.install(launch, "time", SimpleNamespace(**vars(time) | {"sleep": ranks.sleep}))
    sys.argv = [NODE_LAUNCHER, *words]
    launch.main()


def main(argv: Sequence[str]) -> None:
    """Run the node launcher, and in processes forked from it what they are to become."""
    task: Callable[[], object] | None = partial(launch_ranks, argv)
    while task is not None:
        try:
            task()
            task = None
        except forked.Become as process:
            task = partial(run_as, process.argv, process.environment)
        except held_imports.Held as holder:
            task = partial(held_imports.hold, holder.descriptor)


if __name__ == "__main__":
    interrupts.end_on_interrupt()
    main(sys.argv[1:])
