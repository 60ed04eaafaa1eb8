"""`InitialSource`: the existing weights that a run starts from, as the plan knows them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolm.pretrained.loaded_weights import LoadedWeights


@dataclass(frozen=True)
class InitialSource:
    """The source of `--init_from`.

    Attributes:
        given: the name that the user gave.
        source: the exact name: a run with its step, a hub id with its commit, or a directory.
        hub_id: "" unless the source is a model of the hub.
        digest: hex SHA-256 that identifies the weights, see docs/initialization.md.
        about: tokens, files and dtype of the weights, for the user.
        weights: initial values; None if the run resumes and reads none.
        checkpoint: directory of the checkpoint; None for a model directory.
        generation: special ids of its config, and the content of its generation_config.json.
        parametrization: settings of the source's own, if it was a run with another than standard.
        verify: rank, number of ranks -> a line for each damaged file in the rank's share.
    """

    given: str
    source: str
    hub_id: str
    digest: str
    about: str
    vocab_size: int
    weights: "LoadedWeights | None" = None
    checkpoint: Path | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    parametrization: Mapping[str, Any] = field(default_factory=dict)
    verify: Callable[[int, int], list[str]] = lambda rank, world_size: []

    def exact(self, name: str | None) -> str | None:
        """Return the exact name for any name of this source; other names are unchanged."""
        return self.source if name in (self.given, self.source) else name

    def record(self) -> dict[str, Any]:
        """Return the entry `initial_weights` of run.json."""
        return {key: getattr(self, key) for key in RECORDED}

    @classmethod
    def recorded(cls, entry: Mapping[str, Any]) -> "InitialSource":
        """Return the source of a run that resumes, from its run.json."""
        return cls(**{key: entry[key] for key in RECORDED if key in entry})

    def describe(self, vocab_size: int) -> str:
        """Return the source's line in the plan of a run with this vocabulary size."""
        line = f"from {self.source}: {self.about}"
        if self.weights is None:
            return f"{line}; not read: the run resumes from its checkpoint"
        if names := self.weights.extended:
            line += (
                f"; rows {self.vocab_size:,} to {vocab_size - 1:,} of {', '.join(names)} are new"
            )
        return line


RECORDED = (
    *("given", "source", "hub_id", "digest", "about", "vocab_size", "generation"),
    "parametrization",
)
