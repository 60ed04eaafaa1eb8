"""A small stage to give to another one, as `clean` would have left it."""

from pathlib import Path

from data_prep.read.stage_files import publish_stage, read_records, read_stage, stage_file
from data_prep.stages.counts import merge_counts
from tests.data_prep.dedup.near_copies import write_documents
from zerolm.common.files import sha256_file


def write_stage(directory: Path, texts: list[str], per_file: int, first: int = 0) -> Path:
    """Write documents d0, d1, ... as a published stage of several files.

    Args:
        first: the number of the first document.
    """
    directory.mkdir()
    entries = []
    for task, start in enumerate(range(0, len(texts), per_file)):
        path = directory / stage_file(task)
        write_documents(path, texts[start : start + per_file], first + start)
        size = path.stat().st_size
        entries.append({"file": path.name, "size_bytes": size, "sha256": sha256_file(path)})
    publish_stage(
        directory, "clean", entries, inputs="0", text_field="text", counts=merge_counts([]),
        options={}, provenance={},
    )  # fmt: skip
    return directory


def documents_of(directory: Path) -> list[dict]:
    """Return all documents of a published stage, in order."""
    return [record for path in read_stage(directory).paths for record in read_records(path)]
