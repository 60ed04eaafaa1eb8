"""Splits the documents of finished shards by a hash of their ids, for example for validation.

Reads the ids in one pass, a few megabytes at a time. The same input and the same parts produce the
same bytes. Independent of the command line.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.finished_shards.documents import (
    Documents,
    hash_documents,
    listed_inputs,
    read_documents,
)
from data_prep.finished_shards.output import Output, parent_entry, write_outputs
from data_prep.tasks.progress import Progress
from zerolm.shards.reader import Source

SPLIT_HASH = "xxh3-64 of the ids"


def split(
    source: Source,
    directories: Mapping[Path, float],
    shard_tokens: int,
    provenance: dict[str, Any],
) -> list[dict[str, Any]]:
    """Write a shard directory for each part; return their manifests.

    A document's part depends only on its ids, so copies of a document are in the same part.

    Args:
        directories: maps each new directory to its fraction of the documents; the fractions sum to
            1.
    """
    progress = Progress("split", source.num_tokens * source.dtype.itemsize)
    parts = {directory.name: share for directory, share in directories.items()}
    common: dict[str, Any] = {
        "inputs": source.head.get("inputs", []),
        "parents": [parent_entry(source)],
        **({"split": source.head["split"]} if "split" in source.head else {}),
        **provenance,
    }

    def copy_tokenizer(target: Path) -> dict[str, Any]:
        copy = source.tokenizer_directory()
        if copy.is_dir():
            shutil.copytree(copy, target, copy_function=shutil.copyfile)
        return source.head["tokenizer"]

    def start(directory: Path) -> Output:
        return Output(
            directory,
            source.vocab_size,
            source.eos_id,
            copy_tokenizer,
            shard_tokens,
            source.bos_id,
        )

    def write(outputs: Sequence[Output]) -> None:
        for documents in read_documents(source):
            for number, part in _divide(documents, list(parts.values())):
                outputs[number].add(part)
            progress.add(documents.ids.nbytes, len(documents.ends), len(documents.ids))

    def keys(number: int, output: Output) -> dict[str, Any]:
        record = {"part": list(parts)[number], "parts": parts, "hash": SPLIT_HASH}
        return {**common, **output.counted(), "reshard": {**record, "shard_tokens": shard_tokens}}

    try:
        starts = [lambda path=path: start(path) for path in directories]
        return write_outputs(starts, write, listed_inputs(source), keys)
    finally:
        progress.close()


def _divide(documents: Documents, shares: Sequence[float]) -> Iterator[tuple[int, Documents]]:
    """Assign the documents to parts; yield (index of a part, documents to add to this part)."""
    limits = (np.cumsum(shares)[:-1] * 2.0**64).astype(np.uint64)
    numbers = np.searchsorted(limits, hash_documents(documents.ids, documents.ends), side="right")
    for number in np.unique(numbers).tolist():
        yield number, documents.take(np.flatnonzero(numbers == number))
