"""`Part`: what a part of a run that may be off tells those that do not know it.

The base of `Feature` and of `Evaluation`. Standard library only, so that `--help` is instant.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from zerolm.run_dir.metrics import Metric


@dataclass(frozen=True)
class NoFlags:
    """A part that is on or off by flags which other code reads too."""


class Part:
    """A part of a run that may be off.

    Attributes:
        name: its key in checkpoints, or the name of its scores.
        Flags: dataclass with its flags.
        METRICS, SECTION: its metrics, and their section in `zerolm.run_dir.metrics.SECTIONS`.
    """

    name: str
    Flags: ClassVar[type] = NoFlags
    SECTION: ClassVar[str] = ""
    METRICS: ClassVar[tuple[Metric, ...]] = ()

    @classmethod
    def state_bytes(cls, settings: Any) -> int:
        """Return the bytes that the optimizer keeps for it, per parameter."""
        return 0
