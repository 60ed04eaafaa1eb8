"""Plan runs, check hosts, start runs and keep them going: `python -m launch COMMAND`."""

import argparse
import sys

from launch import doctor, node, plan, render, supervise
from launch.flag_types import count, duration
from zerolm.errors import ConfigError

PARTS = {"plan": plan, "doctor": doctor, "node": node, "render": render}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for part in PARTS.values():
        part.add_parser(commands)
    policy = supervise.Policy()
    words = commands.add_parser(
        "supervise",
        usage="python -m launch supervise [flags] -- deepspeed ... pretrain.py ...",
        help="start a run, and start it again after failures, until it is done",
        description="Start a run and keep it going. A failure is reported (which rank, on which "
        "host, of which signal, in which step, with its stacks) and the same command started "
        "again, which resumes. SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C are passed on to the ranks, "
        "which save and stop. Exit codes are those of pretrain.py: 0 done, 2 refused, 75 stopped "
        "on request, 76 gave up, 1 it keeps failing.",
    )
    words.add_argument(
        "--max_restarts", type=count, default=policy.max_restarts, metavar="N",
        help="in a row without a newer checkpoint (default: %(default)s)",
    )  # fmt: skip
    words.add_argument(
        "--same_step_limit", type=count, default=policy.same_step_limit, metavar="N",
        help="failures of one step, after which the supervisor stops with a diagnosis "
        "(default: %(default)s)",
    )  # fmt: skip
    words.add_argument(
        "--backoff", type=duration, default=policy.backoff, metavar="DURATION",
        help="before the first restart, doubled for each one without progress (default: 5s)",
    )  # fmt: skip
    words.add_argument(
        "--max_backoff", type=duration, default=policy.max_backoff, metavar="DURATION",
        help="at most that long (default: 5m)",
    )  # fmt: skip
    words.add_argument(
        "--deadline", type=duration, metavar="DURATION",
        help="ask the run to save and stop after this time over all its starts, e.g. 3h50m",
    )  # fmt: skip
    words.add_argument(
        "--min_hosts", type=count, metavar="N",
        help="with --hostfile in the command: start with as few as this (default: as many as the "
        "command asks for)",
    )  # fmt: skip
    words.add_argument(
        "--host_check", metavar="COMMAND",
        help="for the shell of each host before each start; a host where it fails is left out "
        "(default: can this Python import torch and deepspeed there?)",
    )  # fmt: skip
    words.add_argument(
        "--requeue", action="store_true",
        help="in a Slurm job: give it back to the queue when the run stopped before it was done, "
        "or has lost too many hosts",
    )  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    flags, separator, command = argv, "", []
    if "--" in argv:
        place = argv.index("--")
        flags, separator, command = argv[:place], "--", argv[place + 1 :]
    arguments = parser().parse_args(flags)
    part = PARTS.get(arguments.command)
    try:
        if part is not None:
            return part.run(arguments, command)
        if not separator:
            raise ConfigError("command line: no --, which the command to run stands behind.")
        policy = {key: value for key, value in vars(arguments).items() if key != "command"}
        return supervise.Supervisor(command, supervise.Policy(**policy)).run()
    except ConfigError as error:
        print(f"{arguments.command}: refused, nothing was started.\n{error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
