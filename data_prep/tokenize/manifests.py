"""The manifests of tokenized shards: what was read, encoded and left out, and publishing them.

docs/formats.md has the keys. Nothing here depends on workers, units or time, so that the same
documents give the same manifest.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.bad_input import Tally, bad_input_record
from data_prep.documents import InputRules
from data_prep.phases import Record
from data_prep.readers import Input
from data_prep.stage_files import is_stage, provenance_of, read_stage
from zerolm.errors import ConfigError, ZerolmError
from zerolm.files import sha256_file, sync_file, write_json
from zerolm.manifest import FORMAT, TOKENIZER_DIRECTORY, VERSION, token_dtype
from zerolm.origins import INPUTS
from zerolm.shard_directory import ShardDirectory

SYNCING_THREADS = 8  # files that are synced together share the cost
HELD_OUT_HASH = "blake2b-64 of the UTF-8 text"


def sums(records: Sequence[Record], key: str, num_splits: int) -> list[int]:
    """Return the sum over units of a count, for each split."""
    return [sum(record["splits"][split][key] for record in records) for split in range(num_splits)]


def refuse_empty(outputs: Sequence[Path], records: Sequence[Record]) -> None:
    """Raise a `ConfigError` if there are no documents for one of the outputs."""
    counts = sums(records, "num_documents", len(outputs))
    empty = [output for output, count in zip(outputs, counts, strict=True) if not count]
    if empty:
        skipped = sum(sum(record["dropped"].values()) for record in records)
        raise ConfigError(
            f"{output}: would have no documents, of {sum(counts)} read and {skipped} skipped. "
            + ("Check --input." if len(empty) == len(counts) else "Check --val_fraction.")
            for output in empty
        )


def source_keys(
    inputs: Sequence[Input], records: Sequence[Record], rules: InputRules
) -> dict[str, Any]:
    """Return the keys that say what was read, and what of it is in no shard."""
    tally = Tally.from_records([record["tally"] for record in records])
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record["skipped"])
    entries: dict[str, dict[str, Any]] = {}
    for each in inputs:
        empty = {"input": each.argument, "num_files": 0, "size_bytes": 0}
        entry = entries.setdefault(each.argument, empty)
        if each.size_bytes is None:  # a hub data set
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
        "inner_eos_ids": sum(record["inner_eos_ids"] for record in records),
        "inputs": list(entries.values()),
        "text_field": rules.text_field,
    }


def encoder_key(records: Sequence[Record], choice: dict[str, Any]) -> dict[str, Any]:
    """Return what encoded how much."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["encoded"])
    return {**choice, "counts": dict(sorted(counts.items()))}


def write_inputs(directory: Path, inputs: Sequence[Input]) -> dict[str, Any]:
    """Write the list that origins point into, and return the manifest's entry for it."""
    path = directory / INPUTS
    listed = [
        {
            "name": each.name,
            "size_bytes": each.size_bytes,
            "unit": "row" if each.suffix in (".parquet", "hub") else "byte",
        }
        for each in inputs
    ]
    write_json(path, {"inputs": listed})
    return {"file": INPUTS, "size_bytes": path.stat().st_size, "sha256": sha256_file(path)}


def manifest(
    vocab_size: int,
    eos_id: int,
    tokenizer: dict[str, Any],
    shards: Sequence[dict[str, Any]],
    text_bytes: int,
    **more: Any,
) -> dict[str, Any]:
    """Return the manifest of one output."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(vocab_size).name,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "num_tokens": sum(shard["num_tokens"] for shard in shards),
        "num_documents": sum(shard["num_documents"] for shard in shards),
        "tokenizer": tokenizer,
        "shards": list(shards),
        "text_bytes": text_bytes,
        **more,
    }


def publish_all(directories: Sequence[ShardDirectory], manifests: Sequence[dict[str, Any]]) -> None:
    """Write the manifests, when everything that they name is on disk.

    Raises:
        OSError: something cannot be synced; nothing is published then.
        ZerolmError: only a part of the outputs could be published.
    """
    paths = [
        path
        for each in directories
        for pattern in ("*", f"{TOKENIZER_DIRECTORY}/**/*")
        for path in each.directory.glob(pattern)
        if path.is_file()
    ]
    with ThreadPoolExecutor(SYNCING_THREADS) as threads:
        list(threads.map(sync_file, paths))
    for claim, content in zip(directories, manifests, strict=True):
        try:
            claim.publish(content)
        except OSError as error:
            done = [str(each.directory) for each in directories if each.published]
            left = [str(each.directory) for each in directories if not each.published]
            raise ZerolmError(
                f"{claim.directory}: the manifest cannot be written ({error}). Published: "
                f"{', '.join(done) or 'nothing'}; not published: {', '.join(left)}. Remove what "
                f"was published before you start again."
            ) from error
