"""The formats that are read, by the name that users give, and those that are written too."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from data_prep.finished_shards import litdata, mds, megatron, nanogpt, parquet
from data_prep.finished_shards.items import Content, InputFile, ReadOptions


class Format(NamedTuple):
    """How a format is read and written.

    Attributes:
        find: opens what a user gives, checks headers and sizes, and returns the files.
        options: fields of `ReadOptions` that the format takes.
        write: writes shards in the format; None where its own project's writer serves.
    """

    find: Callable[[Path, ReadOptions], list[InputFile]]
    options: tuple[str, ...] = ()
    write: Callable[[Path, Content], None] | None = None


FORMATS = {
    "megatron": Format(megatron.find, write=megatron.write),
    "mds": Format(mds.find, ("column", "dtype")),
    "litdata": Format(litdata.find),
    "parquet": Format(parquet.find, ("column",)),
    "nanogpt": Format(nanogpt.find, ("dtype",), nanogpt.write),
}
