"""DeepSpeed's launcher, changed so that node launchers do not import from the working directory.

By default, DeepSpeed's launcher starts `python -m deepspeed.launcher.launch`, which imports from
the working directory first, and adds that directory to the PYTHONPATH on other hosts.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()  # runner.main handles Ctrl-C only once the ranks have started

from deepspeed.launcher import multinode_runner, runner

from zerolm.common.shipped import RUN_MODULE

NODE_LAUNCHER = "deepspeed.launcher.launch"


class ShieldedPopen(subprocess.Popen):
    def __init__(self, command: Any, *args: Any, **options: Any):
        super().__init__(shielded(command), *args, **options)


def shielded(command: Any) -> Any:
    """Return a DeepSpeed command with `run_module.py` in place of `-m`.

    Also replaces `-m` in the command-line pattern by which pdsh finds the launchers to kill.
    """
    if isinstance(command, str) or not any(NODE_LAUNCHER[:-1] in word for word in command):
        return command
    pattern = [word.replace("-m\\ deepspeed", f"{RUN_MODULE}\\ deepspeed") for word in command]
    return [str(RUN_MODULE) if word == "-m" else word for word in pattern]


def main() -> None:
    own, export = os.environ.get("PYTHONPATH", ""), multinode_runner.MultiNodeRunner.add_export

    def add_export(self: Any, name: str, value: str) -> None:
        with_directory = f"{Path.cwd()}:{own}"
        export(self, name, own if (name, value) == ("PYTHONPATH", with_directory) else value)

    multinode_runner.MultiNodeRunner.add_export = add_export
    runner.subprocess.Popen = ShieldedPopen
    runner.main()


if __name__ == "__main__":
    main()
