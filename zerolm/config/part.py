"""`Part`: the interface through which other code uses an optional part of a run.

The base class of `Feature` and `Evaluation`. Standard library only, so that `--help` is instant.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from zerolm.run_dir.metrics import Metric


@dataclass(frozen=True)
class NoFlags:
    """The flags of a part that has none of its own, because other code also reads its flags."""


class Part:
    """An optional part of a run.

    Attributes:
        name: key of the part's state in checkpoints, or prefix of its scores.
        Flags: dataclass of the part's flags.
        METRICS, SECTION: the part's metrics, and their section in
            `zerolm.run_dir.metrics.SECTIONS`.
    """

    name: str
    Flags: ClassVar[type] = NoFlags
    SECTION: ClassVar[str] = ""
    METRICS: ClassVar[tuple[Metric, ...]] = ()

    @classmethod
    def state_bytes(cls, settings: Any) -> int:
        """Return the number of bytes per parameter that the optimizer stores for this part."""
        return 0
