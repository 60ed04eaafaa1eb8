"""Parquet with a list of ids in each row, and optionally their text, as nanochat reads it.

nanochat's reader takes the column `text` of all files of a directory, in the order of their names,
the last of them for validation, and encodes it itself.
Source: https://github.com/karpathy/nanochat/blob/master/nanochat/dataset.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.convert.items import Content, InputFile, Items, ReadOptions, damaged, files_of
from data_prep.shards.documents import Documents
from zerolm.common.errors import ConfigError

COLUMNS = ("ids", "input_ids", "tokens")
BATCH_ROWS = 1024  # of a row group too: ranks of nanochat read one row group each
FILE_TOKENS = 1 << 26


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a Parquet file, or all of a directory in the order of their names."""
    return [_open(file, options) for file in files_of(path, ".parquet")]


def _open(path: Path, options: ReadOptions) -> InputFile:
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: is not Parquet, or damaged ({str(error).rstrip('.')}). Check --from, or "
            f"restore the file."
        ) from None
    candidates = [options.column] if options.column else COLUMNS
    found = [name for name in candidates if name in schema.names]
    if not found:
        raise ConfigError(
            f"{path}: has no column {' or '.join(candidates)}, but {', '.join(schema.names)}. Name "
            f"the column of ids with --column; a column of text needs zerolm data tokenize."
        )
    kind = schema.field(found[0]).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_list or pa.types.is_fixed_size_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        raise ConfigError(f"{path}: column {found[0]} is {kind}, not lists of integers.")

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


def write(directory: Path, content: Content) -> None:
    """Write shard_00000.parquet and so on, a document per row."""
    fields = [("ids", pa.list_(pa.from_numpy_dtype(content.dtype)))]
    if content.decode is not None:
        fields.append(("text", pa.string()))
    schema = pa.schema(fields)
    writer, number, room = None, 0, 0
    try:
        for documents in content.documents():
            for first in range(0, len(documents.ends), BATCH_ROWS):
                if writer is None or room <= 0:
                    if writer is not None:
                        writer.close()
                    path = directory / f"shard_{number:05d}.parquet"
                    writer = pq.ParquetWriter(
                        path, schema, compression="zstd", use_dictionary=False
                    )
                    number, room = number + 1, FILE_TOKENS
                part = documents.take(
                    np.arange(first, min(first + BATCH_ROWS, len(documents.ends)))
                )
                writer.write_table(_table(part, schema, content))
                room -= len(part.ids)
    finally:
        if writer is not None:
            writer.close()


def _table(part: Documents, schema: pa.Schema, content: Content) -> pa.Table:
    starts = np.concatenate([[0], part.ends]).astype(np.int32)
    columns = [pa.ListArray.from_arrays(starts, pa.array(part.ids))]
    if content.decode is not None:
        pairs = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        columns.append(
            pa.array(content.decode(part.ids[one : two - 1].tolist()) for one, two in pairs)
        )
    return pa.table(columns, schema=schema)
