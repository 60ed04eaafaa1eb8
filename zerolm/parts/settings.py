"""`RunSettings`: a run's settings with the flags of all its parts.

Imports no hooks of the parts, so `--help` is instant.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from zerolm.config.part import Part
from zerolm.config.settings import Settings, flags_of
from zerolm.evaluate import EVALUATIONS
from zerolm.features import FEATURES

PARTS: tuple[type[Part], ...] = (*FEATURES, *EVALUATIONS)
_FLAGS = dict.fromkeys(part.Flags for part in reversed(PARTS))


@dataclass(frozen=True)
class RunSettings(*_FLAGS, Settings):  # type: ignore[misc]
    """A run's settings: the core settings, and those of each part."""

    parts: ClassVar[tuple[type[Part], ...]] = PARTS


FLAGS: dict[str, Any] = flags_of(RunSettings)
CURVE_SETTINGS = tuple(name for name, about in FLAGS.items() if about["changes_curve"])
STATIC_DEFAULTS: dict[str, Any] = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(RunSettings)
    if field.name in FLAGS
}
