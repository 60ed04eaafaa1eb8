"""Plans token shards: the slices of parts that make up each shard.

Shard boundaries depend only on document lengths, not on how documents are divided into parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from data_prep.encode.parts import DOCUMENT_DTYPE
from data_prep.tasks.phases import Record


@dataclass(frozen=True)
class Slice:
    """Consecutive documents of a part; the ends `last_document` and `last_token` are exclusive."""

    part: str  # path of the file
    rows_start: int  # byte offset of the document rows in the file
    first_document: int
    last_document: int
    first_token: int
    last_token: int


@dataclass(frozen=True)
class Shard:
    """A shard to assemble."""

    directory: Path
    number: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """The name of the shard's files, without the suffix."""
        return f"shard-{self.number:05d}"

    @property
    def num_tokens(self) -> int:
        """The number of ids in the shard."""
        return sum(each.last_token - each.first_token for each in self.slices)


def plan_output(
    directory: Path,
    parts: Path,
    records: Sequence[Record],
    split: int,
    shard_tokens: int,
    token_bytes: int,
) -> list[Shard]:
    """Return the shards of an output, which contains one split of the documents in all units.

    Args:
        records: records of all units, as returned by `EncodeUnits`.
    """
    unit_parts = (each for record in records for each in parts_of_unit(record, parts, split))
    slices = plan_shards(unit_parts, shard_tokens, token_bytes)
    return [
        Shard(directory, number, tuple(each for _, each in group))
        for number, group in groupby(slices, itemgetter(0))
    ]


def parts_of_unit(record: Record, parts: Path, split: int) -> list[tuple[str, int, int]]:
    """Return (path, number of documents, number of tokens) for a unit's parts of one split."""
    return [
        (str((parts / name).absolute()), num_documents, num_tokens)
        for name, num_documents, num_tokens in record["parts"][split]
    ]


def plan_shards(
    parts: Iterable[tuple[str, int, int]], shard_tokens: int, token_bytes: int
) -> Iterator[tuple[int, Slice]]:
    """Plan shards: yield each slice with the number of the shard that contains it.

    A shard ends before the document that would make it exceed `shard_tokens`; a document longer
    than that forms a shard of its own. Each slice is yielded before the next part is requested.

    Args:
        parts: path, number of documents and number of tokens of each part.
    """
    number, is_empty, room = 0, True, shard_tokens
    for path, num_documents, num_tokens in parts:
        first = start = 0
        ends = None
        while first < num_documents:
            if num_tokens - start <= room:
                last, stop = num_documents, num_tokens
            else:
                if ends is None:
                    rows = np.fromfile(path, DOCUMENT_DTYPE, offset=num_tokens * token_bytes)
                    ends = np.cumsum(rows["tokens"]).astype(int)
                last = int(np.searchsorted(ends, start + room, side="right"))
                if last <= first and not is_empty:  # the next document does not fit
                    number, is_empty, room = number + 1, True, shard_tokens
                    continue
                last = max(last, first + 1)
                stop = int(ends[last - 1])
            yield number, Slice(path, num_tokens * token_bytes, first, last, start, stop)
            is_empty = False
            room -= stop - start
            first, start = last, stop
