"""Documents for the tasks of a stage, whether from the files of the stage before or from inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_prep.phases import fingerprint
from data_prep.stage_files import Stage, provenance_of, read_lines
from zerolm.errors import ConfigError


class Row(NamedTuple):
    """A document as a stage passes it on."""

    text: str
    id: Any
    line: bytes  # the JSON object as it was, without its newline


class Documents(Protocol):
    """Documents cut into tasks: all of them, in order, are those of the input in its order."""

    text_field: str

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        ...

    @property
    def labels(self) -> list[str]:
        """Name what each task reads."""
        ...

    def read(self, task: int) -> Iterator[Row]:
        """Yield the documents of a task, in order: the same at each call."""
        ...


@dataclass(frozen=True)
class StageDocuments:
    """The documents of a published stage; a task is one of its files."""

    directory: Path
    paths: tuple[Path, ...]
    text_field: str

    @property
    def num_tasks(self) -> int:
        """How many files there are."""
        return len(self.paths)

    @property
    def labels(self) -> list[str]:
        """Name what each task reads."""
        return [path.name for path in self.paths]

    def read(self, task: int) -> Iterator[Row]:
        """Yield the documents of a task, in order.

        Raises:
            ConfigError: the file is damaged, or has something that is not a document.
        """
        import orjson

        path = self.paths[task]
        for number, line in enumerate(read_lines(path), 1):
            try:
                record = orjson.loads(line)
                text, name = record[self.text_field], record["id"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}:{number}: is not a document of a stage ({error!r}). Run it again."
                ) from error
            yield Row(text, name, line)


def stage_documents(stage: Stage) -> tuple[StageDocuments, str, dict[str, Any]]:
    """Return the documents of a stage, a fingerprint of them, and where they are from."""
    documents = StageDocuments(stage.directory, tuple(stage.paths), stage.text_field)
    files = [(entry["file"], entry["sha256"]) for entry in stage.manifest["files"]]
    return documents, fingerprint([stage.text_field, files]), provenance_of(stage)
