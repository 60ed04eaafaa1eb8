"""The runner: DeepSpeed's launcher without torch, which starts zerolm's node launchers.

By default, DeepSpeed's starts `python -m deepspeed.launcher.launch`, which imports from the working
directory first, and adds that directory to the PYTHONPATH on other hosts.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerolm.common import forked, interrupts
from zerolm.common.errors import ConfigError
from zerolm.common.process_tree import DEEPSPEED_NODE_LAUNCHER, NODE_LAUNCHER
from zerolm.common.shipped import RUN_MODULE
from zerolm.engine import deepspeed_launcher, replaced
from zerolm.engine.launcher_options import DEEPSPEED, RANK_START, rank_start


def node_command(command: Sequence[str], start: str) -> list[str]:
    """Return a DeepSpeed command that starts zerolm's node launcher, from its own file.

    Also changes the pattern by which pdsh finds the launchers to kill; it lacks the last letter.
    """
    theirs, ours = DEEPSPEED_NODE_LAUNCHER, DEEPSPEED_NODE_LAUNCHER
    flags: list[str] = []
    if start != DEEPSPEED:
        ours, flags = NODE_LAUNCHER, [f"--{RANK_START}={start}"]
    pattern = f"-m\\ {theirs[:-1]}"
    words: list[str] = []
    for word in command:
        if word == theirs and words[-1:] == ["-m"]:
            words[-1:] = [str(RUN_MODULE), ours, *flags]
        else:
            words.append(word.replace(pattern, f"{RUN_MODULE}\\ {ours[:-1]}"))
    return words


def main(argv: Sequence[str]) -> None:
    try:
        start, words = rank_start(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    runner = deepspeed_launcher.load("runner")
    own, multi_node = os.environ.get("PYTHONPATH", ""), runner.PDSHRunner.__mro__[1]
    export = multi_node.add_export

    def add_export(self: Any, name: str, value: str) -> None:
        with_directory = f"{Path.cwd()}:{own}"
        export(self, name, own if (name, value) == ("PYTHONPATH", with_directory) else value)

    def popen(command: Sequence[str], env: dict[str, str]) -> Any:
        command, held = node_command(command, start), env.pop(forked.IMPORTS, "")
        if NODE_LAUNCHER not in command or not (held or forked.imports):
            return subprocess.Popen(command, env=env)
        if forked.imports is not None:
            return forked.Forked(command, env)
        return subprocess.Popen(command, env={**env, forked.IMPORTS: held}, pass_fds=[int(held)])

    replaced.install(multi_node, "add_export", add_export)
    replaced.install(runner, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    arguments = runner.parse_args(words)
    # With this flag DeepSpeed starts as many ranks, however many devices there are.
    deepspeed_launcher.Accelerator.known_count = max(0, arguments.num_gpus)
    if arguments.autotuning:
        from deepspeed.autotuning import Autotuner

        runner.Autotuner = Autotuner
    runner.main(words)


if __name__ == "__main__":
    interrupts.end_on_interrupt()  # runner.main handles Ctrl-C only once the ranks have started
    main(sys.argv[1:])
