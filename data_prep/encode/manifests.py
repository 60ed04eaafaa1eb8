"""Builds and publishes the manifests of token shards: what was read, encoded and skipped.

docs/formats.md lists the keys. Manifests do not depend on workers, units or time, so the same
documents produce the same manifest.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.encode.encode_documents import IdCounts
from data_prep.files.documents import InputRules
from data_prep.files.inputs import Input
from data_prep.formats import format_of
from data_prep.read.bad_input import Tally, bad_input_record
from data_prep.read.stage_files import is_stage, provenance_of, read_stage
from data_prep.tasks.phases import Record
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.files import encode_json, file_entry, sync_file, write_atomically
from zerolm.shards.directory import ShardDirectory
from zerolm.shards.origins import INPUTS

SYNCING_THREADS = 8  # syncing concurrently is faster than one file at a time


def split_totals(records: Sequence[Record], key: str, num_splits: int) -> list[int]:
    """Sum a count over all units, and return the sum for each split."""
    return [sum(record["splits"][split][key] for record in records) for split in range(num_splits)]


def refuse_empty(outputs: Sequence[Path], records: Sequence[Record]) -> None:
    """Raise a `ConfigError` if an output would contain no documents."""
    counts = split_totals(records, "num_documents", len(outputs))
    empty = [output for output, count in zip(outputs, counts, strict=True) if not count]
    if empty:
        skipped = sum(sum(record["dropped"].values()) for record in records)
        flag = "--input" if len(empty) == len(counts) else "--val_fraction"
        raise ConfigError(
            f"{output}: would contain no documents ({sum(counts)} were read, {skipped} skipped). "
            f"Check {flag}."
            for output in empty
        )


def refuse_unknown(tokenizer: str, records: Sequence[Record], max_unknown: float) -> None:
    """Raise a `ConfigError` if too many of the tokens are the tokenizer's unknown token."""
    num_unknown = sum(record["unknown_ids"] for record in records)
    num_tokens = sum(split["num_tokens"] for record in records for split in record["splits"])
    if num_unknown > max_unknown * num_tokens:
        raise ConfigError(
            f"--tokenizer {tokenizer}: {num_unknown / num_tokens:.1%} of the tokens are its "
            f"unknown token, so their text would be lost; --max_unknown is {max_unknown:.1%}. "
            f"Choose a tokenizer for this text, or raise the limit."
        )


def input_keys(
    inputs: Sequence[Input], records: Sequence[Record], rules: InputRules
) -> dict[str, Any]:
    """Return the manifest keys that describe the inputs and the documents left out of shards."""
    tally = Tally.from_records([record["tally"] for record in records])
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record["skipped"])
    entries: dict[str, dict[str, Any]] = {}
    for each in inputs:
        empty = {"input": each.argument, "num_files": 0, "size_bytes": 0}
        entry = entries.setdefault(each.argument, empty)
        if each.size_bytes is None:  # a hub dataset
            entry["num_files"] = entry["size_bytes"] = None
            entry["revision"] = each.hub.revision if each.hub else None
        else:
            entry["num_files"] += 1
            entry["size_bytes"] += each.size_bytes
    for argument, entry in entries.items():
        if is_stage(argument):
            entry["stage"] = provenance_of(read_stage(argument))
    return {
        "skipped_documents": dict(sorted(skipped.items())),
        "bad_input": bad_input_record(inputs, tally, rules),
        **{name: sum(record[name] for record in records) for name in IdCounts._fields},
        "inputs": list(entries.values()),
        "text_field": rules.text_field,
    }


def encoder_entry(records: Sequence[Record], choice: dict[str, Any]) -> dict[str, Any]:
    """Return the value of the key `encoder`: the chosen backend, and each backend's documents and
    bytes.
    """
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["encoded"])
    return {**choice, "counts": dict(sorted(counts.items()))}


def write_input_list(directory: Path, inputs: Sequence[Input]) -> dict[str, Any]:
    """Write the list of inputs that origins refer to, and return the list's manifest entry.

    `publish_all` makes it durable.
    """
    entries = [
        {
            "name": each.name,
            "size_bytes": each.size_bytes,
            "unit": "row" if format_of(each).places == "row" else "byte",
        }
        for each in inputs
    ]
    write_atomically(directory / INPUTS, encode_json({"inputs": entries}), durable=False)
    return file_entry(directory / INPUTS, directory)


def publish_all(directories: Sequence[ShardDirectory], manifests: Sequence[dict[str, Any]]) -> None:
    """Sync all files of the outputs, then write the manifests.

    Raises:
        OSError: a file cannot be synced; nothing has been published.
        ZerolmError: some of the outputs could not be published, but others have been.
    """
    paths = [path for each in directories for path in each.directory.iterdir() if path.is_file()]
    with ThreadPoolExecutor(SYNCING_THREADS) as threads:
        list(threads.map(sync_file, paths))
    for each, content in zip(directories, manifests, strict=True):
        try:
            each.publish(content)
        except OSError as error:
            done = [str(other.directory) for other in directories if other.published]
            missing = [str(other.directory) for other in directories if not other.published]
            raise ZerolmError(
                f"{each.directory}: the manifest cannot be written ({error}). Published: "
                f"{', '.join(done) or 'nothing'}; not published: {', '.join(missing)}. Remove the "
                f"published directories, and start again."
            ) from error
