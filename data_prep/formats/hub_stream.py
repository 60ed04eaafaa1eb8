"""Reads a hub dataset through `datasets`, row by row; `read.hub` reads its files where it can."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import HubDataset, Input, InputRange
from data_prep.files.parse import parse_rows
from data_prep.formats.arrow_values import json_rows
from data_prep.formats.format import Format
from zerolm.common.errors import ConfigError, ZerolmError, reason

HUB_ROWS = 64  # rows per batch from the streaming iterator


@lru_cache(maxsize=16)
def open_hub(hub: HubDataset) -> Any:
    """Open a dataset for streaming."""
    import datasets

    return datasets.load_dataset(
        hub.name, hub.config, split=hub.split, revision=hub.revision, streaming=True
    )


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    assert source.hub is not None
    row = part.start
    batches = None
    while True:
        try:
            if batches is None:
                batches = iter(open_hub(source.hub).skip(part.start).iter(batch_size=HUB_ROWS))
            batch = next(batches, None)
        except Exception as error:  # from the network, or from a damaged file on the hub
            raise ZerolmError(
                f"{source.name}: reading stopped after row {row} ({reason(error)}). Check the "
                f"network and run the command again."
            ) from error
        if batch is None:
            return
        columns = zip(*batch.values(), strict=True)
        rows = [dict(zip(batch, values, strict=True)) for values in columns]
        head = rules.text_field.partition(".")[0]
        if rules.text_field not in batch and head not in batch:
            raise ConfigError(
                f"{source.name}:{row + 1}: no column {rules.text_field!r}; it has "
                f"{', '.join(batch)}. Choose a column with --text_field."
            )
        if rules.keep_records:
            rows = json_rows(rows, rules.text_field)
        elif rules.text_field in batch:
            rows = batch[rules.text_field]
        yield Chunk(source.name, "rows", row, rows, 0, part.input), row + len(rows)
        row += len(rows)


HUB = Format(("hub",), _read, parse_rows, places="row", packages=("datasets",))
