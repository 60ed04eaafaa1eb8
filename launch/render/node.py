"""`zerolm node`: start a run's ranks on this node under Slurm, Kubernetes or SkyPilot.

The scheduler starts this command once on each node and sets the node's rank. DeepSpeed's launcher
would kill the ranks on a signal. Instead, this process (or the supervisor, if any) forwards signals
to the ranks, which save and stop.
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
from functools import partial
from pathlib import Path

from launch.command.deepspeed_command import parse_pretrain_flags, pretrain_flags
from launch.command.train import add_launcher_flags, run_command
from launch.supervise.attempt import POLL_SECONDS, Attempt
from zerolm.common import processes
from zerolm.common.command_line import count, count_from_zero
from zerolm.common.errors import EXIT_BUG, EXIT_STOPPED, ConfigError
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import SCRIPT, module_command
from zerolm.engine.launcher_options import DEFAULT_PORT

# Variables with the node's rank, set by Slurm, an indexed Kubernetes Job, and SkyPilot.
RANK_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --nodes N --devices_per_node D --master_addr A -- pretrain.py ..."
    parser.description = (
        "Start a run's ranks on this node. Job files from `zerolm render` and docs/examples run "
        "this command once on each node. The node's rank is read from the "
        "variables that Slurm, an indexed Kubernetes Job or SkyPilot set."
    )
    add_size_flags(parser)
    add_launcher_flags(parser, ["master_port"], master_port=DEFAULT_PORT)
    parser.add_argument(
        "--node_rank", type=count_from_zero, metavar="R",
        help=f"rank of this node, from 0 (default: from {', '.join(RANK_VARIABLES)})",
    )  # fmt: skip
    parser.add_argument(
        "--master_addr", required=True, metavar="ADDRESS",
        help="address of node 0, as seen from all nodes",
    )  # fmt: skip


def add_size_flags(parser: argparse._ActionsContainer, default: int | None = None) -> None:
    """Add the flags for the number of nodes and devices; they are required if `default` is None."""
    add = partial(parser.add_argument, type=count, required=default is None, default=default)
    add("--nodes", metavar="N", help="number of nodes in the run")
    add("--devices_per_node", metavar="D", help="number of ranks on each node")


def run(arguments: argparse.Namespace) -> int:
    """Run this node's ranks until they exit; return the run's exit code."""
    flags = pretrain_flags(run_command(arguments))
    run_dir = Path(parse_pretrain_flags(flags).run_dir or "")
    rank = node_rank(arguments.node_rank, arguments.nodes, os.environ)
    with tempfile.TemporaryDirectory() as directory:
        hostfile = Path(directory) / "hostfile"
        slots = f"slots={arguments.devices_per_node}"
        hostfile.write_text("".join(f"node-{n} {slots}\n" for n in range(arguments.nodes)))
        command = module_command(
            RUNNER, "--no_ssh", "--hostfile", hostfile, "--num_nodes", arguments.nodes,
            "--node_rank", rank, "--master_addr", arguments.master_addr,
            "--master_port", arguments.master_port, SCRIPT, *flags,
        )  # fmt: skip
        if processes.SUPERVISOR in os.environ:
            return subprocess.run(command, check=False).returncode
        return _run_ranks(command, run_dir)


def node_rank(given: int | None, nodes: int, environment: Mapping[str, str]) -> int:
    """Return this node's rank, from the flag or else from the scheduler's variable.

    Raises:
        ConfigError: neither is set, or the rank is not a number below `nodes`.
    """
    candidates = {name: environment[name] for name in RANK_VARIABLES if name in environment}
    if given is not None:
        candidates = {"--node_rank": str(given)}
    if not candidates:
        raise ConfigError(
            f"command line: --node_rank is missing, and none of {', '.join(RANK_VARIABLES)} is "
            f"set. Give 0 on the first node, 1 on the next, and so on."
        )
    source, value = next(iter(candidates.items()))
    if not value.isdigit() or int(value) >= nodes:
        raise ConfigError(
            f"{source}: {value} must be a number below --nodes {nodes}. Correct one of them."
        )
    return int(value)


def _run_ranks(command: Sequence[str], run_dir: Path) -> int:
    signals: list[int] = []
    for number in processes.stop_signals():
        signal.signal(number, lambda number, frame: signals.append(number))
    attempt, num_forwarded = Attempt(command, secrets.token_hex(8), run_dir), 0
    while attempt.running():
        if len(signals) > num_forwarded:
            num_forwarded += 1
            _log(f"{signal.Signals(signals[0]).name}: asking the ranks to save and stop")
            if not attempt.request_stop(signals[0]):  # no rank can save yet
                attempt.kill()
                attempt.finish()
                return EXIT_STOPPED
        time.sleep(POLL_SECONDS)
    outcome = attempt.finish()
    for reason in outcome.reasons:
        _log(reason)
    if outcome.exit_code == EXIT_BUG and signals:
        _log("stop requested, but the run failed before it had saved")
    return outcome.exit_code


def _log(message: str) -> None:
    print(f"node: {message}", file=sys.stderr, flush=True)
