"""The kinds of kill, and a random plan of kills for one chunk."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.soak.configurations import SAVE_INTERVAL, Configuration

# Points of a save, for a kill of the thread or process that writes; some are passed on rank 0 only.
WRITER_POINTS = ("begin", "snapshot", "write", "written")
PUBLISHER_POINTS = ("manifest", "rename", "pointer")
ROTATION_POINTS = ("rotate", "rotated")  # of rank 0, if there are checkpoints to remove


@dataclass(frozen=True)
class Kind:
    """One kind of kill.

    Attributes:
        about: its line in the table.
        restarted_by: who starts the run again; `nobody`: it goes on.
        sign: regular expression of what must be printed after it; {rank} names the rank that was
            hit. Nobody else can name the rank of a run that has only one.
        fault: injected by `zerolm.common.faults`, as `point:{rank}:{step}:action`.
    """

    about: str
    restarted_by: Literal["supervisor", "us", "nobody"]
    sign: str = ""
    fault: str = ""


FAILED = r"supervise:   "
NAMED = r"supervise:   {rank} "
KINDS = {
    "one rank": Kind("SIGKILL to a rank", "supervisor", NAMED),
    "all ranks": Kind("SIGKILL to all ranks at once", "supervisor", FAILED),
    "deepspeed": Kind("SIGKILL to `deepspeed`", "supervisor", r"launcher ended with SIGKILL"),
    "node launcher": Kind("SIGKILL to the node launcher", "supervisor", r"supervise:   .*launcher"),
    "stopped rank": Kind("SIGSTOP to a rank", "supervisor", NAMED + r".*SIGSTOP"),
    "loader": Kind("SIGKILL to a loader worker", "supervisor", r"DataLoader worker"),
    "writer": Kind(
        "SIGKILL of a rank at a random point of a save", "supervisor", NAMED,
        "checkpoint.{point}:{rank}:{step}:kill",
    ),
    "exception": Kind(
        "an exception before a backward pass", "supervisor", NAMED,
        "step.backward:{rank}:{step}:raise",
    ),
    "exit": Kind(
        "a rank exits after a step", "supervisor", NAMED, "step.end:{rank}:{step}:exit"
    ),
    "hang": Kind("a rank loops forever", "supervisor", NAMED, "step.begin:{rank}:{step}:hang"),
    "while starting": Kind(
        "SIGKILL to a process of the restart that follows a kill", "supervisor", FAILED
    ),
    "supervisor": Kind("SIGKILL to the supervisor, started again at once", "us"),
    "stop": Kind("SIGTERM to the supervisor", "us", r"supervise: stopped on request"),
    "machine": Kind("SIGKILL to all processes at once", "us"),
    "tracker": Kind("SIGKILL to a process of W&B or TensorBoard", "nobody"),
    "report": Kind("SIGKILL to the process that writes the report", "nobody"),
    "full disk": Kind("the disk of the run directory is full for a while", "nobody",
                      r"[Nn]o space|checkpoint_failed|needs .*, has "),
}  # fmt: skip


def named(rank: int, num_ranks: int) -> str:
    """Return a regular expression of how a failure names a rank."""
    return f"rank {rank} on" if num_ranks > 1 else "(rank 0 on|a rank ended|every rank is)"


@dataclass
class Kill:
    """One kill, and how the run responded. Times are in seconds after the kill.

    Attributes:
        step: planned step.
        at_step: newest step in the metrics when it happened; None: it has not happened.
        detail: the fault, or the process.
        lost_steps: between `at_step` and the checkpoint from which the run resumed.
        parts: seconds of the parts of the start that followed, from its `startup` event.
    """

    kind: str
    step: int
    rank: int
    detail: str = ""
    at_step: int | None = None
    reported_seconds: float | None = None
    recovered_seconds: float | None = None
    lost_steps: int | None = None
    parts: dict[str, float] | None = None
    report: str = ""

    @property
    def is_injected(self) -> bool:
        return bool(KINDS[self.kind].fault)


def applicable(configuration: Configuration, is_root: bool) -> list[str]:
    """Return the kinds that a configuration has processes for.

    Args:
        is_root: whether a file system can be mounted, to be filled.
    """
    left_out = set()
    if configuration.ranks == 1:
        left_out.add("all ranks")
    if not configuration.workers:
        left_out.add("loader")
    if not (configuration.small_disk and is_root):
        left_out.add("full disk")
    if "--report_interval" not in configuration.flags:
        left_out.add("report")
    return [kind for kind in KINDS if kind not in left_out]


def planned(
    rng: random.Random, kinds: Sequence[str], ranks: int, steps: int, count: int
) -> list[Kill]:
    """Return `count` kills at random steps, ascending: the times between them are exponential.

    Each kind comes up before any comes up again. Faults are injected once each, so no two of them
    are the same.
    """
    deck: list[str] = []
    while len(deck) < count:
        deck += rng.sample(list(kinds), len(kinds))
    kills, injected = [], set()
    for step, kind in zip(sorted(rng.choices(range(3, steps), k=count)), deck, strict=False):
        kill = Kill(kind, step, rng.randrange(ranks))
        while kill.is_injected and (not kill.detail or kill.detail in injected):
            inject(kill, rng, kill.step + (SAVE_INTERVAL if kill.detail else 0))
        injected.add(kill.detail)
        kills.append(kill)
    return sorted(kills, key=lambda kill: kill.step)


def inject(kill: Kill, rng: random.Random, step: int) -> None:
    """Choose the fault of a kill at a step, or at the next save."""
    point = ""
    if kill.kind == "writer":
        step = -(-step // SAVE_INTERVAL) * SAVE_INTERVAL
        removes = step > 3 * SAVE_INTERVAL  # the default keeps three
        point = rng.choice(WRITER_POINTS + PUBLISHER_POINTS + ROTATION_POINTS * removes)
        kill.rank = kill.rank if point in WRITER_POINTS else 0
    kill.step = step
    kill.detail = KINDS[kill.kind].fault.format(point=point, rank=kill.rank, step=step)
