"""Parquet files with a list of ids in each row."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.finished_shards.items import InputFile, Items, ReadOptions, damaged, files_of
from data_prep.read.directory_formats import describe, find_tables_of
from zerolm.common.errors import ConfigError

COLUMNS = ("ids", "input_ids", "tokens")
BATCH_ROWS = 1024


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a Parquet file, or all Parquet files in a directory, sorted by name."""
    files = files_of(path, ".parquet")
    if tables := describe(find_tables_of({str(file.parent) for file in files})):
        raise ConfigError(tables)
    return [_open(file, options) for file in files]


def _open(path: Path, options: ReadOptions) -> InputFile:
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: is not Parquet, or is damaged ({str(error).rstrip('.')}). Check --from, or "
            "restore the file."
        ) from None
    candidates = [options.column] if options.column else COLUMNS
    found = [name for name in candidates if name in schema.names]
    if not found:
        raise ConfigError(
            f"{path}: has no column {' or '.join(candidates)}, but {', '.join(schema.names)}. "
            "Name the column that contains the ids with --column; for a text column, use zerolm "
            "data tokenize."
        )
    kind = schema.field(found[0]).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_list or pa.types.is_fixed_size_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        raise ConfigError(f"{path}: column {found[0]} has type {kind}, not lists of integers.")

    def read() -> Iterator[Items]:
        row = 0
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH_ROWS, columns=found[:1]):
                    lists = batch.column(0)
                    values = lists.flatten()
                    if lists.null_count or values.null_count:
                        raise ConfigError(
                            f"{path}: a list or an id in rows {row} to {row + len(lists)} is null. "
                            f"Remove or fill it."
                        )
                    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
                    row += len(lists)
                    yield Items(values.to_numpy(zero_copy_only=False), np.cumsum(lengths))
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, f"cannot be read after row {row} ({error})") from None

    return InputFile(path, "row", path.stat().st_size, None, read)
