"""The commands that plan, check, start and supervise runs: `python -m launch COMMAND`."""

import os
import sys
from collections.abc import Sequence

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()

from zerolm.common.command_line import Command, Group, run_program
from zerolm.common.shipped import shield

PLAN, TRAIN = "plan and check", "train"
COMMANDS = Group(
    description="Plan, check, start and supervise runs of pretrain.py.",
    commands={
        "plan": Command(
            "estimate a run's memory, time and price before it starts",
            "launch.estimate.command", PLAN,
        ),
        "predict": Command(
            "predict the loss of a larger run from finished smaller ones",
            "launch.experiments.predict", PLAN,
        ),
        "doctor": Command(
            "check the hosts of a run before it starts", "launch.doctor.doctor", PLAN,
            takes_run=True,
        ),
        "render": Command(
            "write a job file for Slurm", "launch.render.render", PLAN,
            takes_run=True,
        ),
        "train": Command(
            "start or resume a run (runs deepspeed ... pretrain.py ...)", "launch.command.train",
            TRAIN, own_parser=True,
        ),
        "sweep": Command(
            "run a grid of settings, and find the best values", "launch.experiments.sweep", TRAIN,
            passes_on=True,
        ),
        "supervise": Command(
            "start a run, and restart it after failures until it is done",
            "launch.supervise.command", TRAIN, takes_run=True,
        ),
        "node": Command(
            "start a run's ranks on this node; the scheduler runs it on each node",
            "launch.render.node", TRAIN, takes_run=True,
        ),
    },
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    return run_program(COMMANDS, argv, "python -m launch")


if __name__ == "__main__":
    shield(os.environ)
    sys.exit(main(sys.argv[1:]))
