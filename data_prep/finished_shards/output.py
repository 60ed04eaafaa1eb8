"""Writes one or more shard directories together, with counts and provenance in their manifests.

All files of all outputs are durable before the first manifest is published. Independent of where
the documents come from.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.finished_shards.documents import Documents
from data_prep.tokenizer.vocabulary import unknown_id
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.files import file_entry, write_json
from zerolm.shards.manifest import MANIFEST, TOKENIZER_DIRECTORY
from zerolm.shards.origins import INPUTS
from zerolm.shards.reader import Source
from zerolm.shards.token_bytes import TokenBytes, read_token_bytes
from zerolm.shards.writer import ShardWriter

SPARE_BYTES = 16 << 20  # left free for the file system and small files
NOT_PROVENANCE = {"format", "version", "shards", "tokenizer", "input_files", "digest"}


class Output:
    """One shard directory that is being written.

    Args:
        copy_tokenizer: writes a copy of the tokenizer to a new directory, and returns the
            tokenizer's manifest entry.
        bos_id: id that is recorded as the manifest's `bos_id` if every document begins with it.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_id: int,
        copy_tokenizer: Callable[[Path], dict[str, Any]],
        shard_tokens: int,
        bos_id: int | None = None,
    ):
        self.writer = ShardWriter(
            directory, vocab_size=vocab_size, eos_id=eos_id, tokenizer={}, shard_tokens=shard_tokens
        )
        try:
            copy = directory / TOKENIZER_DIRECTORY
            self.writer.tokenizer = copy_tokenizer(copy)
            self.unknown = unknown_id(copy)
            self.table = _token_bytes(copy, vocab_size)
        except BaseException:
            self.writer.abort()
            raise
        self.bos_id = bos_id
        self.unknown_ids = self.eos_ids = self.text_bytes = self.bos_documents = 0

    def add(self, documents: Documents) -> None:
        """Append documents."""
        ids, ends, origins = documents
        self.writer.add(ids, ends, origins)
        self.eos_ids += int((ids == self.writer.eos_id).sum())
        if self.unknown is not None:
            self.unknown_ids += int((ids == self.unknown).sum())
        begins = np.concatenate([[0], ends[:-1]])
        if self.bos_id is not None:
            has_bos = ids[begins] == self.bos_id
            self.bos_documents += int(has_bos.sum())
            begins += has_bos
        if self.table is not None:
            firsts = ids[begins]
            self.text_bytes += int(self.table.counts[ids].sum())
            self.text_bytes += int((self.table.first - self.table.counts)[firsts].sum())

    def counted(self) -> dict[str, Any]:
        """Return the manifest keys that contain counts; `text_bytes` is included only if it is
        exact.
        """
        keys: dict[str, Any] = {"text_bytes": self.text_bytes} if self.table is not None else {}
        keys["inner_eos_ids"] = self.eos_ids - self.writer.num_documents
        if self.bos_documents == self.writer.num_documents:
            keys["bos_id"] = self.bos_id
        return {**keys, "unknown_ids": self.unknown_ids}


def write_outputs(
    outputs: Sequence[Callable[[], Output]],
    write: Callable[[Sequence[Output]], None],
    input_entries: Sequence[dict[str, Any]],
    keys: Callable[[int, Output], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Write shard directories, publish their manifests, and return the manifests.

    Args:
        input_entries: the inputs that origins refer to.
        keys: returns additional manifest keys, given the index of an output and the output.
    """
    directory: Any = ""
    with ExitStack() as stack:
        started: list[Output] = []
        try:
            for start in outputs:
                started.append(start())
                stack.callback(started[-1].writer.abort)
            directory = started[0].writer.directory
            write(started)
            empty = [each.writer.directory for each in started if not each.writer.num_documents]
            if empty:
                raise ConfigError(
                    f"{output}: would contain no documents. Choose more documents, or a larger "
                    "part."
                    for output in empty
                )
            manifests = [_finish(each, input_entries) for each in started]
            for number in reversed(range(len(started))):  # held-out documents first
                directory = started[number].writer.directory
                manifests[number] = started[number].writer.close(
                    **manifests[number], **keys(number, started[number])
                )
        except PermissionError:
            raise
        except OSError as error:
            done = [str(each.writer.directory) for each in started if each.writer.published]
            published = f"Published already: {', '.join(done)}" if done else "Nothing was published"
            raise ZerolmError(
                f"{error.filename or directory}: cannot be written ({error.strerror or error}). "
                f"{published}; correct the problem and start again."
            ) from error
    return manifests


def _finish(output: Output, input_entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Complete an output's files, and return the manifest entry for its list of inputs."""
    output.writer.finish_shard()
    directory = output.writer.directory
    path = directory / INPUTS
    write_json(path, {"inputs": list(input_entries)})
    return {"input_files": file_entry(path, directory)}


def parent_entry(source: Source) -> dict[str, Any]:
    """Return a manifest entry that describes a source from which the documents were read."""
    content = source.files.read_bytes(MANIFEST)
    own = {key: value for key, value in source.head.items() if key not in NOT_PROVENANCE}
    return {
        "directory": str(source.directory),
        "fingerprint": source.fingerprint,
        "manifest_sha256": hashlib.sha256(content).hexdigest(),
        **own,
    }


def space_problems(directory: Path, size_bytes: int) -> list[str]:
    """Return a problem if the disk has too little free space; the directory need not exist yet."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free >= size_bytes + SPARE_BYTES:
        return []
    return [
        f"{directory}: needs {size_bytes / 1e6:,.0f} MB of disk space and {SPARE_BYTES >> 20} MiB "
        f"of reserve, but {free / 1e6:,.0f} MB are free. Free space, or choose another disk."
    ]


def _token_bytes(copy: Path, vocab_size: int) -> TokenBytes | None:
    """Return the tokens' sizes in bytes, or None if they do not add up to the size of the text."""
    try:
        table = read_token_bytes(copy, vocab_size)
    except ConfigError:
        return None
    return None if table.notice else table
