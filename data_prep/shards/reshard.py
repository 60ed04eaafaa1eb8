"""Writes finished shards again: merged, split, shuffled, in shards of another size, or a subset.

One pass over the ids, a few megabytes at a time; a shuffle needs a second pass over buckets on
disk. The same inputs and options give the same bytes. Independent of the command line.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.shards.documents import Documents, Inputs, Selection, choose, hash_documents
from data_prep.shards.output import Output, scratch_directory, space_problems, write_outputs
from data_prep.shards.shuffle import Shuffle
from data_prep.tasks.progress import Progress
from zerolm.common.errors import ConfigError
from zerolm.shards.manifest import MANIFEST
from zerolm.shards.reader import Source
from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

SPLIT_HASH = "xxh3-64 of the ids"
NOT_PROVENANCE = {"format", "version", "shards", "tokenizer", "input_files", "digest"}


@dataclass(frozen=True)
class Options:
    """What is written.

    Attributes:
        shuffle: the seed of their order; None keeps it.
        parts: share of the documents of each output, by name; None for one output. A document's
            part follows from its ids, so copies of a document are in the same part.
    """

    selection: Selection = field(default_factory=Selection)
    shuffle: int | None = None
    parts: dict[str, float] | None = None
    shard_tokens: int = DEFAULT_SHARD_TOKENS

    @property
    def keeps_all(self) -> bool:
        """Whether one output gets every document."""
        return self.selection == Selection() and self.parts is None

    def outputs(self, directory: Path) -> list[Path]:
        """Return the directories of the outputs."""
        return [directory] if self.parts is None else [directory / name for name in self.parts]


def differences(sources: Sequence[Source]) -> list[str]:
    """Return why the documents of sources cannot be in one source, a line for each difference."""
    problems = []
    first = sources[0]
    for other in sources[1:]:
        for key, fix in (
            ("fingerprint", "Tokenize one of them again."),
            ("vocab_size", "Tokenize one of them again."),
            ("eos_id", "Tokenize one of them again."),
            ("dtype", "Reshard each by itself first."),
        ):
            one, two = (
                each.head["tokenizer"][key] if key == "fingerprint" else each.head[key]
                for each in (first, other)
            )
            if one != two:
                name = "tokenizer.fingerprint" if key == "fingerprint" else key
                problems.append(
                    f"{other.directory}: {name} is {two}, but {one} in {first.directory}. {fix}"
                )
        one, two = (each.head.get("split", {}).get("part") for each in (first, other))
        if {one, two} == {"training", "validation"}:
            problems.append(
                f"{other.directory}: holds {two} documents, and {first.directory} {one} documents, "
                f"which would be mixed. Merge those of each part by themselves."
            )
    return problems


class Reshard:
    """A planned rewrite: what it reads and how much, before anything is written.

    Args:
        sources: the shards to read; their tokenizers are equal (`differences`).
        directory: the output, or the parent directory of the parts.
    """

    def __init__(self, sources: Sequence[Source], directory: Path, options: Options):
        self.sources, self.directory, self.options = sources, directory, options
        self.inputs = Inputs(sources)
        self.shuffle: Shuffle | None = None
        if options.shuffle is None:
            found = [(len(each.numbers), int(each.lengths.sum())) for each in self._choose()]
            documents, tokens = np.array(found, np.int64).reshape(-1, 2).sum(0).tolist()
        else:
            self.shuffle = Shuffle(
                self._choose, options.selection, options.shuffle, sources[0].dtype
            )
            documents, tokens = self.shuffle.num_documents, self.shuffle.num_tokens
        self.num_documents, self.num_tokens = documents, tokens  # at most, with a shuffle
        if not documents:
            total = sum(source.num_documents for source in sources)
            raise ConfigError(
                f"no document is chosen of {total:,} in SHARDS. Change the flags that choose."
            )

    def _choose(self) -> Iterator[Any]:
        with_limits = self.options.shuffle is None
        return choose(self.sources, self.inputs, self.options.selection, with_limits)

    def space_problems(self) -> list[str]:
        """Return a problem if the disk is too small."""
        size = self.num_tokens * self.sources[0].dtype.itemsize + 24 * self.num_documents
        return space_problems(self.directory, size * (1 if self.shuffle is None else 2))

    def run(self, provenance: dict[str, Any]) -> list[dict[str, Any]]:
        """Write the outputs; return their manifests."""
        source, options = self.sources[0], self.options
        common = self._common_keys() | provenance
        itemsize = source.dtype.itemsize
        progress = Progress("reshard", self.num_tokens * itemsize)

        def start(directory: Path) -> Output:
            return Output(
                directory,
                source.vocab_size,
                source.eos_id,
                self._copy_tokenizer,
                options.shard_tokens,
                counts_text=not options.keeps_all,
            )

        def write(outputs: Sequence[Output]) -> None:
            for documents in self._documents(outputs[0]):
                for number, part in _divide(documents, options.parts):
                    outputs[number].add(part)
                progress.add(len(documents.ids) * itemsize, len(documents.ends), len(documents.ids))

        def keys(number: int, output: Output) -> dict[str, Any]:
            found = {**common, **output.counted(), "reshard": self._record(number)}
            texts = [each.head.get("text_bytes") for each in self.sources]
            if options.keeps_all and None not in texts:
                found["text_bytes"] = sum(texts)
            return found

        try:
            starts = [lambda path=path: start(path) for path in options.outputs(self.directory)]
            return write_outputs(starts, write, self.inputs.entries, keys)
        finally:
            progress.close()

    def _documents(self, output: Output) -> Iterator[Documents]:
        """Yield the documents in their new order."""
        if self.shuffle is not None:
            yield from self.shuffle.documents(scratch_directory(output), lambda count: None)
            return
        for chosen in self._choose():
            yield from chosen.read()

    def _copy_tokenizer(self, target: Path) -> dict[str, Any]:
        source = self.sources[0]
        copy = source.tokenizer_directory()
        for path in sorted(copy.rglob("*")) if copy.is_dir() else ():
            if path.is_file():
                (target / path.relative_to(copy)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(copy))
        return source.head["tokenizer"]

    def _record(self, number: int) -> dict[str, Any]:
        """Return what was done, for the manifest of one output."""
        options = self.options
        record: dict[str, Any] = {"selection": options.selection.record()}
        record |= {"shuffle": options.shuffle, "shard_tokens": options.shard_tokens}
        if options.parts is not None:
            name = list(options.parts)[number]
            record |= {"part": name, "parts": options.parts, "hash": SPLIT_HASH}
        return record

    def _common_keys(self) -> dict[str, Any]:
        """Return the manifest keys that describe the sources."""
        manifests = [source.head for source in self.sources]
        keys: dict[str, Any] = {
            "inputs": [],
            "parents": [parent_entry(each) for each in self.sources],
        }
        for manifest in manifests:
            keys["inputs"] += [
                each for each in manifest.get("inputs", []) if each not in keys["inputs"]
            ]
        splits = [manifest.get("split") for manifest in manifests]
        if splits[0] is not None and splits.count(splits[0]) == len(splits):
            keys["split"] = splits[0]
        return keys


def parent_entry(source: Source) -> dict[str, Any]:
    """Return the manifest entry of a source that documents came from."""
    content = source.files.read_bytes(MANIFEST)
    own = {key: value for key, value in source.head.items() if key not in NOT_PROVENANCE}
    return {
        "directory": str(source.directory),
        "fingerprint": source.fingerprint,
        "manifest_sha256": hashlib.sha256(content).hexdigest(),
        **own,
    }


def _divide(
    documents: Documents, parts: dict[str, float] | None
) -> Iterator[tuple[int, Documents]]:
    """Yield (output, documents of it)."""
    if parts is None:
        yield 0, documents
        return
    shares = np.cumsum(list(parts.values()))[:-1]
    limits = (shares * 2.0**64).astype(np.uint64)
    numbers = np.searchsorted(limits, hash_documents(documents.ids, documents.ends), side="right")
    for number in np.unique(numbers).tolist():
        yield number, documents.take(np.flatnonzero(numbers == number))
