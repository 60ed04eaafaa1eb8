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
        "its rank, host, signal, step and stacks; then the same command starts again and the run "
        "resumes from its newest checkpoint. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C are "
        "forwarded to the ranks, which save and stop. Exit codes are those of pretrain.py: 0 done, "
        "1 keeps failing, 2 refused, 75 stopped on request, 76 gave up."
    )
    add = parser.add_argument
    add(
        "--max_restarts", type=count, default=default.max_restarts, metavar="N",
        help="maximum restarts in a row without a newer checkpoint or copy in memory "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--same_step_limit", type=count, default=default.same_step_limit, metavar="N",
        help="stop and print a diagnosis after this many failures in the same step "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--backoff", type=duration, default=default.backoff, metavar="DURATION",
        help="wait before a restart; doubled after each one without a newer checkpoint; none if "
        "there is one (default: 5s)",
    )  # fmt: skip
    add(
        "--max_backoff", type=duration, default=default.max_backoff, metavar="DURATION",
        help="longest wait before a restart (default: 5m)",
    )  # fmt: skip
    add(
        "--deadline", type=duration, metavar="DURATION",
        help="save and stop after this time, counted over all restarts, e.g. 3h50m",
    )  # fmt: skip
    add(
        "--min_hosts", type=count, metavar="N",
        help="if the command has a --hostfile: minimum number of hosts to start on (default: as "
        "many as the command requests)",
    )  # fmt: skip
    add(
        "--leave_out_slow_hosts", action="store_true",
        help="start without the hosts that were slower than the others when the run last ended, if "
        "there are spares",
    )  # fmt: skip
    add(
        "--host_check", metavar="COMMAND",
        help="shell command to run on each host before each start; a host where it fails is not "
        "used (default: import torch and deepspeed with this Python)",
    )  # fmt: skip
    add(
        "--host_check_timeout", type=duration, default=default.host_check_timeout,
        metavar="DURATION",
        help="time for that command, which is tried twice (default: 60s)",
    )  # fmt: skip
    add(
        "--requeue", action="store_true",
        help="in a Slurm job: requeue the job if the run stopped before it was done, or too few "
        "hosts are left",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if arguments.run_command is None:
        raise ConfigError(
            "command line: the command to run is missing. Add it after --, as in: "
            "launch supervise -- deepspeed ... pretrain.py ..."
        )
    policy = {key: value for key, value in vars(arguments).items() if key != "run_command"}
    return Supervisor(run_command(arguments), Policy(**policy)).run()
