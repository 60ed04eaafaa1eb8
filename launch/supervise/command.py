"""`zerolm supervise`: the flags of the supervisor."""

import argparse

from launch.command.train import run_command
from launch.supervise.supervisor import Policy, Supervisor
from zerolm.common.command_line import count, duration
from zerolm.common.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    default = Policy()
    parser.usage = "%(prog)s [flags] -- deepspeed ... pretrain.py ..."
    parser.description = (
        "Start a run and restart it after failures until it is done. A failure is reported with "
        "its rank, host, signal, step and stacks; then the same command runs again, and the run "
        "resumes from its newest checkpoint. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C are "
        "forwarded to the ranks, which save and stop. Exit codes match pretrain.py's: 0 done, "
        "1 kept failing, 2 refused, 75 stopped on request, 76 gave up."
    )
    add = parser.add_argument
    add(
        "--max_restarts", type=count, default=default.max_restarts, metavar="N",
        help="maximum consecutive restarts without a newer checkpoint or in-memory copy "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--same_step_limit", type=count, default=default.same_step_limit, metavar="N",
        help="stop and print a diagnosis after this many failures in the same step "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--backoff", type=duration, default=default.backoff, metavar="DURATION",
        help="wait before a restart, doubled each time; no wait if there is a newer checkpoint "
        "(default: 5s)",
    )  # fmt: skip
    add(
        "--max_backoff", type=duration, default=default.max_backoff, metavar="DURATION",
        help="longest wait before a restart (default: 5m)",
    )  # fmt: skip
    add(
        "--deadline", type=duration, metavar="DURATION",
        help="save and stop after this total time over all restarts, e.g. 3h50m",
    )  # fmt: skip
    add(
        "--min_hosts", type=count, metavar="N",
        help="with a --hostfile: minimum number of hosts to start on (default: the number that "
        "the command requests)",
    )  # fmt: skip
    add(
        "--leave_out_slow_hosts", action="store_true",
        help="if there are spares, start without hosts that were slower than the others when the "
        "run last ended",
    )  # fmt: skip
    add(
        "--host_check", metavar="COMMAND",
        help="shell command to run on each host before each start; a host where it fails is not "
        "used (default: import torch and deepspeed with this Python)",
    )  # fmt: skip
    add(
        "--host_check_timeout", type=duration, default=default.host_check_timeout,
        metavar="DURATION",
        help="time limit for --host_check, which is tried twice (default: 60s)",
    )  # fmt: skip
    add(
        "--requeue", action="store_true",
        help="in a Slurm job: requeue it if the run stopped before it was done, or too few hosts "
        "are left",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if arguments.run_command is None:
        raise ConfigError(
            "command line: the command to run is missing. Add it after --, as in: "
            "launch supervise -- deepspeed ... pretrain.py ..."
        )
    policy = {key: value for key, value in vars(arguments).items() if key != "run_command"}
    return Supervisor(run_command(arguments), Policy(**policy)).run()
