"""The formats that are converted, by the name that users give."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from data_prep.convert import litdata, mds, megatron, nanogpt, parquet
from data_prep.convert.items import Content, InputFile, ReadOptions


class Format(NamedTuple):
    """How a format is read and written.

    Attributes:
        find: opens what a user gives, checks headers and sizes, and returns the files.
        options: fields of `ReadOptions` that the format takes.
    """

    find: Callable[[Path, ReadOptions], list[InputFile]]
    write: Callable[[Path, Content], None]
    options: tuple[str, ...] = ()


FORMATS = {
    "megatron": Format(megatron.find, megatron.write),
    "mds": Format(mds.find, mds.write, ("column", "dtype")),
    "litdata": Format(litdata.find, litdata.write),
    "parquet": Format(parquet.find, parquet.write, ("column",)),
    "nanogpt": Format(nanogpt.find, nanogpt.write, ("dtype",)),
}
