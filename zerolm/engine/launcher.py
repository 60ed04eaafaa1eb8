"""DeepSpeed's launcher, which starts the launcher of each node without the directory's files.

It would start `python -m deepspeed.launcher.launch`, which imports from the working directory
first, and put that directory on the PYTHONPATH of other hosts.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()  # runner.main handles Ctrl-C from when the ranks are started

from deepspeed.launcher import multinode_runner, runner

from zerolm.common.shipped import RUN_MODULE

NODE_LAUNCHER = "deepspeed.launcher.launch"


class ShieldedPopen(subprocess.Popen):
    def __init__(self, command: Any, *args: Any, **options: Any):
        super().__init__(shielded(command), *args, **options)


def shielded(command: Any) -> Any:
    """Return a command of DeepSpeed with `run_module.py` in place of `-m`.

    That by which pdsh ends the launchers is a pattern for their command line.
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
