"""`Part`: the interface of an optional part of a run, for code that does not know the part.

The base class of `Feature` and `Evaluation`. Standard library only, so that `--help` is instant.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from zerolm.run_dir.metrics import Metric


@dataclass(frozen=True)
class NoFlags:
    """For a part without flags of its own: other code also reads the flags that enable it."""


class Part:
    """An optional part of a run.

    Attributes:
        name: key of its state in checkpoints, or prefix of its scores.
        Flags: dataclass of its flags.
        METRICS, SECTION: its metrics, and the section of `zerolm.run_dir.metrics.SECTIONS` for
            them.
    """

    name: str
    Flags: ClassVar[type] = NoFlags
    SECTION: ClassVar[str] = ""
    METRICS: ClassVar[tuple[Metric, ...]] = ()

    @classmethod
    def state_bytes(cls, settings: Any) -> int:
        """Return the bytes per parameter that the optimizer keeps for this part."""
        return 0
