"""Start this node's part of a run, where a scheduler starts one task on each: Slurm, Kubernetes,
SkyPilot.

The node's number comes from the scheduler. DeepSpeed's launcher answers a signal by killing ranks,
so signals are passed on to the ranks here, which save and stop; under a supervisor it does that.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.attempt import POLL_SECONDS, VARIABLE, Attempt
from launch.command_words import flags_of, settings_of
from launch.flag_types import count, count_from_zero
from zerolm.errors import EXIT_BUG, EXIT_STOPPED, ConfigError

ROOT = Path(__file__).parent.parent
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# Where Slurm, an indexed Job of Kubernetes, and SkyPilot say which node this is.
RANK_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    words = commands.add_parser(
        "node",
        usage="python -m launch node --nodes N --devices_per_node D --master_addr A -- pretrain.py "
        "...",
        help="start this node's part of a run, where a scheduler starts one task on each node",
        description="What the files of `python -m launch render` start on each node. The number of "
        "this node is that of Slurm, of an indexed Kubernetes Job, or of SkyPilot.",
    )
    words.add_argument("--nodes", type=count, required=True, metavar="N", help="of the run")
    words.add_argument(
        "--node_rank", type=count_from_zero, metavar="R",
        help=f"number of this node (default: {', '.join(RANK_VARIABLES)})",
    )  # fmt: skip
    words.add_argument(
        "--devices_per_node", type=count, required=True, metavar="D", help="ranks on each node"
    )
    words.add_argument(
        "--master_addr", required=True, metavar="ADDRESS", help="of node 0, as all nodes know it"
    )
    words.add_argument(
        "--master_port", type=count, default=29500, metavar="PORT", help="(default: %(default)s)"
    )


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run this node's ranks to their end; return the exit code of the run."""
    flags = flags_of(command)
    run_dir = Path(settings_of(flags).run_dir or "")
    node_rank = rank_of_node(arguments.node_rank, arguments.nodes, os.environ)
    with tempfile.TemporaryDirectory() as directory:
        hostfile = Path(directory) / "hosts"
        slots = f"slots={arguments.devices_per_node}"
        hostfile.write_text("".join(f"node-{n} {slots}\n" for n in range(arguments.nodes)))
        words = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh"]
        words += ["--hostfile", str(hostfile), "--num_nodes", str(arguments.nodes)]
        words += ["--node_rank", str(node_rank), "--master_addr", arguments.master_addr]
        words += ["--master_port", str(arguments.master_port), str(ROOT / "pretrain.py"), *flags]
        if VARIABLE in os.environ:
            return subprocess.run(words, check=False).returncode
        return _attempt(words, run_dir)


def rank_of_node(given: int | None, nodes: int, environment: Mapping[str, str]) -> int:
    """Return the number of this node.

    Raises:
        ConfigError: nobody says it, or there are not so many nodes.
    """
    found = {name: environment[name] for name in RANK_VARIABLES if name in environment}
    where, value = ("--node_rank", str(given)) if given is not None else ("", "")
    if given is None:
        if not found:
            raise ConfigError(
                f"command line: --node_rank is missing, and none of {', '.join(RANK_VARIABLES)} is "
                f"set. Give it: 0 on the first node, 1 on the next."
            )
        where, value = next(iter(found.items()))
    if not value.isdigit() or int(value) >= nodes:
        raise ConfigError(
            f"{where}: {value}, must be a number below --nodes {nodes}. Correct one of them."
        )
    return int(value)


def _attempt(words: Sequence[str], run_dir: Path) -> int:
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: signals.append(number))
    attempt, passed_on = Attempt(words, secrets.token_hex(8), run_dir), 0
    while attempt.running():
        if len(signals) > passed_on:
            passed_on += 1
            name = signal.Signals(signals[0]).name
            print(f"node: {name}: asking the ranks to save and stop", file=sys.stderr, flush=True)
            if not attempt.ask_to_stop(signals[0]):  # no rank that could save anything
                attempt.kill()
                attempt.finish()
                return EXIT_STOPPED
        time.sleep(POLL_SECONDS)
    ending = attempt.finish()
    for reason in ending.reasons:
        print(f"node: {reason}", file=sys.stderr, flush=True)
    if ending.code == EXIT_BUG and signals:
        print("node: asked to stop, but failed before it had saved", file=sys.stderr, flush=True)
    return ending.code
