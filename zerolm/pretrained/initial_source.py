"""`InitialSource`: the plan's description of the existing weights that a run starts from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolm.pretrained.loaded_weights import LoadedWeights


@dataclass(frozen=True)
class InitialSource:
    """The source that `--init_from` names.

    Attributes:
        given: the name as given by the user.
        source: the exact name: RUN@STEP, hub id with commit, or directory.
        hub_id: the model's hub id; "" if the source is not from the hub.
        digest: hex SHA-256 that identifies the weights (see docs/initialization.md).
        about: text for the user on the weights' training tokens, files and dtype.
        weights: the initial values; None if the run resumes and does not read them.
        checkpoint: checkpoint directory; None for a model directory.
        generation: special token ids from the config, and the content of generation_config.json.
        parametrization: the source's parametrization settings; empty if standard.
        verify: function of the rank and the number of ranks that checks this rank's share of the
            files, and returns a problem for each damaged file.
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
        """Return the source's exact name if `name` refers to this source, else `name` itself."""
        return self.source if name in (self.given, self.source) else name

    def record(self) -> dict[str, Any]:
        """Return the `initial_weights` entry for run.json."""
        return {key: getattr(self, key) for key in RECORDED}

    @classmethod
    def recorded(cls, entry: Mapping[str, Any]) -> "InitialSource":
        """Return the source of a run that resumes, given its entry in run.json."""
        return cls(**{key: entry[key] for key in RECORDED if key in entry})

    def describe(self, vocab_size: int) -> str:
        """Return the source's line in the run summary, given the run's vocabulary size."""
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
