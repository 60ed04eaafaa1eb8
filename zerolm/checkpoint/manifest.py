"""Parses a checkpoint's `MANIFEST.json`, and checks its digest and the types of its values.

Must not know the other files of a checkpoint, or where checkpoints are stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from zerolm.checkpoint.checksums import DIGEST_CHARACTERS, RANGE_BYTES, SHA256, XXH3
from zerolm.common.errors import CheckpointError, RecordError
from zerolm.common.records import (
    Count,
    Range,
    RelativePath,
    manifest_digest,
    mismatch,
    parse_record,
)

FORMAT = "zerolm-checkpoint"
VERSION, LISTS_VERSION = 3, 4
# 2: files have `sha256` instead of `xxh3_128`; 4: some files are in lists, see file_lists.py
READABLE = (2, VERSION, LISTS_VERSION)
FILES = "FILES.jsonl"


@dataclass
class Progress:
    """The progress of a run. Counts are totals over all starts of the run.

    Attributes:
        step: optimizer steps attempted.
        position: number of sequences consumed, not counting `skipped_windows`.
        tokens: number of tokens in the applied steps; the learning rate depends on it.
        skipped_steps: number of steps that the spike guard or DeepSpeed did not apply.
        spikes: number of steps with an anomaly, see zerolm/optim/spikes.py.
        rollbacks: how often the run has rolled back to a checkpoint.
        skipped_windows: ranges [start, end) of sequence numbers that the run skips after rollbacks.
        history: state of the spike guard, a `zerolm.optim.spikes.History` as JSON.
        features: state of each stateful `zerolm.features.feature.Feature`, by name.

    Lists and dicts are replaced, never mutated, because a writer thread may hold a shallow copy.
    """

    step: Count = 0
    position: Count = 0
    tokens: Count = 0
    skipped_steps: Count = 0
    spikes: Count = 0
    rollbacks: Count = 0
    skipped_windows: list[Range] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)
    features: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class SavedProgress(Progress):
    """`Progress` as stored in a manifest.

    Earlier releases stored the states of some features in separate keys.
    """

    clipping: dict[str, Any] = field(default_factory=dict)
    ema_counted: float = 0.0
    health: dict[str, Any] = field(default_factory=dict)
    routing: dict[str, Any] = field(default_factory=dict)

    def read(self) -> Progress:
        """Return the progress with the states of all features."""
        values = dict(vars(self))
        del values["clipping"]  # left by a feature that was removed
        earlier = {
            "ema": {"counted": counted} if (counted := values.pop("ema_counted")) else {},
            "expert_balance": values.pop("routing"),
            "health": values.pop("health"),
        }
        found = {name: state for name, state in earlier.items() if state}
        return Progress(**{**values, "features": found | self.features})


class _ListedFile(TypedDict):
    file: RelativePath
    size_bytes: Count


class ListedFile(_ListedFile, total=False):
    """A checkpoint file, with one of the checksums in zerolm/checkpoint/checksums.py.

    `rank` is the only rank that reads the file in the topology that wrote it; it is absent if
    several ranks read the file.
    """

    xxh3_128: str
    sha256: str
    rank: Count


class FileList(TypedDict):
    """A list in `FILES.jsonl`: the files of `first_rank` and the ranks after it.

    Attributes:
        files_bytes: total size of the files in the list.
        start_byte, size_bytes: the list's range in `FILES.jsonl`.
    """

    first_rank: Count
    num_files: Count
    files_bytes: Count
    start_byte: Count
    size_bytes: Count
    xxh3_128: str


class _Probe(TypedDict):
    data: dict[str, Any]
    made_by: dict[str, Any]
    loss_hex: str


class _Required(TypedDict):
    format: str
    version: int
    digest: str
    progress: SavedProgress
    files: list[ListedFile]
    world_size: Count
    zero_stage: Count
    optimizer: str
    data_fingerprint: str
    precision: str
    model_config: dict[str, Any]


class Manifest(_Required, total=False):
    """The content of a manifest. Early releases did not write the optional keys declared here."""

    lists: list[FileList]
    shards: Count  # see `zerolm.ds_files.pieces.num_shards`
    versions: dict[str, str]
    cut: dict[str, Any]
    order: dict[str, Any]
    probe: _Probe | None
    plan: str  # only for copies in memory: `Plan.fingerprint` of the run that wrote the copy


class _Header(TypedDict):
    format: str
    version: int


def parse_manifest(content: bytes, path: object) -> dict[str, Any]:
    """Parse and check the content of a manifest.

    Args:
        path: path of the manifest, for messages.

    Raises:
        CheckpointError: the manifest is damaged, or has an unsupported version. The message is one
            line.
    """
    try:
        manifest: dict[str, Any] = dict(parse_record(content, path, _Header, "It is damaged."))
    except RecordError as error:
        raise CheckpointError(error.problems) from None
    if manifest["format"] != FORMAT or manifest["version"] not in READABLE:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} version {manifest['version']!r}, but this "
            f"release reads {FORMAT!r} version {VERSION}. Use the release that wrote it."
        )
    if manifest.get("digest") != (actual := manifest_digest(manifest)):
        raise CheckpointError(
            f"{path}: digest: {str(manifest.get('digest'))[:64]!r}, but its content has SHA-256 "
            f"{actual}. It is damaged."
        )
    problem = mismatch(manifest, Manifest) or files_problem(manifest["files"])
    if problem:
        raise CheckpointError(f"{path}: {problem}. It is damaged.")
    return manifest


def files_problem(files: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with the first file entry that lacks a valid checksum, or None."""
    for entry in files:
        ranges = -(-entry["size_bytes"] // RANGE_BYTES) or 1
        if XXH3 in entry and len(entry[XXH3]) != ranges * DIGEST_CHARACTERS:
            return f"files: {entry['file']}: {XXH3}: must have {ranges} checksums"
        if XXH3 not in entry and SHA256 not in entry:
            return f"files: {entry['file']}: has no {XXH3}"
    return None
