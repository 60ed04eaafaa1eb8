"""Every command of the project: `zerolm COMMAND`, or `python -m zerolm COMMAND`."""

import os
import sys
from collections.abc import Sequence

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()

import data_prep.__main__
import launch.__main__
from zerolm.common.command_line import Group, commands_in, run_program
from zerolm.common.shipped import shield

COMMANDS = Group(
    description="Pretrain Hugging Face causal language models with DeepSpeed ZeRO, from raw text "
    "to a model on disk.",
    commands={
        "data": data_prep.__main__.COMMANDS,
        **launch.__main__.COMMANDS.commands,
        **commands_in(
            "zerolm.cli",
            {
                "during and after a run": {
                    "status": "print the state of runs",
                    "report": "write an HTML report on a run, or a comparison of several runs",
                    "plot": "draw the loss curves of runs as a PNG",
                    "decode-batch": "print the text of a batch, with its sources and documents",
                    "verify-checkpoint": "compare every file of a checkpoint with its manifest",
                    "export": "write a checkpoint as a Hugging Face model directory",
                    "generate": "continue a prompt with the model of a run",
                    "merge": "write a weighted mean of checkpoints as a model directory",
                    "evaluate": "compute the loss and downstream scores of an exported model",
                    "upload": "copy the checkpoints of a run to an object store",
                    "restore": "restore a run from an object store",
                    "wandb-sync": "send a run directory to W&B as a new W&B run",
                    "mirror": "",  # started by a run only
                },
            },
        ),
    },
)


def main(argv: Sequence[str], program: str = "python -m zerolm") -> int:
    return run_program(COMMANDS, argv, program)


def console_script() -> int:
    shield(os.environ)
    return main(sys.argv[1:], "zerolm")


if __name__ == "__main__":
    shield(os.environ)
    sys.exit(main(sys.argv[1:]))
