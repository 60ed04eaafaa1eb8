"""Finds validation documents that are also in training shards, as far as the manifests show it.

Shards record their input files, and which part of the documents they contain: a range of hashes of
the texts (`tokenize --val_fraction`) and of the ids (`split`). Two directories with an input in
common share documents if these ranges overlap. Reads no ids.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, product
from os.path import normpath
from pathlib import PurePath
from typing import Any

from zerolm.common.errors import ShardError
from zerolm.common.url import is_url
from zerolm.shards.origins import list_inputs
from zerolm.shards.reader import Source

Range = tuple[float, float]  # start and end, as a share of all hashes
DIGEST = "\0"  # between a kind of input and the digest that identifies it
Entry = tuple[str, int | None]  # name and size of an input


class Contents:
    """Which documents a source contains.

    Attributes:
        ranges: {name of a hash: range of its values}; all values of hashes that are not named.
        is_known: whether all records of a split could be interpreted.
    """

    def __init__(self, source: Source):
        self.source, self.head = source, source.head
        self.ranges: dict[str, Range] = {}
        self.is_known = True
        try:
            for name, values in _splits(self.head):
                start, end = self.ranges.get(name, (0.0, 1.0))
                self.ranges[name] = max(start, values[0]), min(end, values[1])
        except (KeyError, TypeError, ValueError):  # of a release with another kind of split
            self.is_known = False

    @cached_property
    def inputs(self) -> set[Entry]:
        """The files, stages and shards from which the source was made directly."""
        entries: set[Entry] = {(f"shards{DIGEST}{self.source.fingerprint}", None)}
        for head in _with_parents(self.head):
            if "fingerprint" in head:
                entries.add((f"shards{DIGEST}{head['fingerprint']}", None))
            inputs = [each for each in head.get("inputs", []) if isinstance(each, dict)]
            stages = [each["stage"] for each in inputs if "stage" in each]
            entries |= {(f"stage{DIGEST}{each['inputs']}", None) for each in stages}
        try:
            listed = list_inputs(self.source) or []
        except ShardError:  # reported where origins are read
            listed = []
        return entries | {(each["name"], each["size_bytes"]) for each in listed}

    @cached_property
    def roots(self) -> set[Entry]:
        """The files that the stages before the source read."""
        return {
            (each["file"], each["size_bytes"])
            for key in ("inputs", "pipeline")
            for each in _files(self.head.get(key))
        }

    def shared_input(self, other: "Contents") -> str | None:
        """Return an input of documents that both sources contain; None if there is none.

        Two pipelines that read the same files may keep different documents, so these do not count.
        """
        fields = {each.head["text_field"] for each in (self, other) if "text_field" in each.head}
        if len(fields) > 1:  # other texts of the same records
            return None
        if not (self.is_known and other.is_known) or any(
            max(one[0], two[0]) >= min(one[1], two[1])
            for name, one in self.ranges.items()
            for two in [other.ranges.get(name, (0.0, 1.0))]
        ):
            return None
        for ours, theirs in (
            (self.inputs, other.inputs),
            (self.inputs, other.roots),
            (self.roots, other.inputs),
        ):
            if found := _shared(ours, theirs):
                kind, is_digest, digest = found.partition(DIGEST)
                return f"{kind} {digest[:16]}" if is_digest else found
        return None


def _splits(head: dict[str, Any]) -> Iterator[tuple[str, Range]]:
    """Yield the hash and the range of each split that led to a source."""
    if split := head.get("split"):
        share = float(split["val_fraction"])
        ranges = {"training": (share, 1.0), "validation": (0.0, share)}
        yield split["hash"], ranges[split["part"]]
    for each in _with_parents(head):
        if record := each.get("reshard"):
            ends = [*accumulate(record["parts"].values())]
            number = list(record["parts"]).index(record["part"])
            is_last = number == len(ends) - 1
            yield record["hash"], (ends[number - 1] if number else 0.0,
                                   1.0 if is_last else ends[number])  # fmt: skip


def _with_parents(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield head
    for parent in head.get("parents", []):
        yield from _with_parents(parent)


def _files(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries of files in the record of stages."""
    if isinstance(value, list):
        for each in value:
            yield from _files(each)
    elif isinstance(value, dict):
        if "file" in value and "modified_ns" in value:
            yield value
        for key in ("stage", "before", "inputs"):
            yield from _files(value.get(key))


def _by_name(entries: set[Entry]) -> dict[Entry, list[str]]:
    """Group the paths of local files by their last part and size."""
    groups: dict[Entry, list[str]] = {}
    for name, size in entries:
        if size is not None and not is_url(name):
            groups.setdefault((PurePath(name).name, size), []).append(normpath(name))
    return groups


def _shared(ours: set[Entry], theirs: set[Entry]) -> str | None:
    """Return the name of an entry in both sets; of two paths, one may be relative to elsewhere."""
    if both := ours & theirs:
        return min(both, key=str)[0]
    others = _by_name(theirs)
    for key, names in _by_name(ours).items():
        for one, two in product(names, others.get(key, ())):
            short, long = sorted((one, two), key=len)
            if short == long or (not short.startswith("/") and long.endswith(f"/{short}")):
                return long
    return None
