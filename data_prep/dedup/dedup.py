"""Deduplication as a stage: exact copies, and near-duplicates by MinHash. docs/deduplication.md.

Phases: signatures (a task a unit) -> copies and buckets (a task a range of hashes) -> members ->
verify -> decide (one task) -> write (a task a unit). Tasks share files only. The result depends on
the documents, their order and the options: not on units, tasks, memory or workers.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.bad_input import Tally
from data_prep.dedup_candidates import BucketTask, ExactTask, SignatureTask
from data_prep.dedup_clusters import DecideTask, MembersTask, VerifyTask, read_names
from data_prep.dedup_files import NUMBER_MASK, UNIT_BITS, array_path, find_range, load
from data_prep.minhash import MAX_PERMUTATIONS, Bands, choose_bands, load_rensa
from data_prep.phases import Executor, Phase, Record, fingerprint, run_phase
from data_prep.sieve import WORK, begin_stage, publish_judged, sieve_of
from data_prep.stage_documents import Documents
from data_prep.stage_options import options_from

DUPLICATES = "duplicates.jsonl.zst"
ALGORITHM = 1  # to be raised when the same input gives other results
# Of a range of hashes: read, sorted, and copied for that. 101 were measured with 2 million entries
# (growth of the resident set in BucketTask, 2026-11-21); copies add to it.
BYTES_PER_ENTRY = 120


@dataclass(frozen=True)
class DedupOptions:
    """What is a duplicate. The first document, in the order of the input, is kept."""

    threshold: float = 0.8  # Jaccard index of the sets of shingles
    shingle_words: int = 13
    exact: str = "text"  # what copies have in common: "text", or "words"
    near: bool = True
    permutations: int = MAX_PERMUTATIONS  # at most
    memory_bytes: int = 1 << 30  # of a task that sorts hashes

    @classmethod
    def from_recipe(cls, value: Any, where: str) -> "DedupOptions":
        """Return the options of a recipe. Raises ConfigError with all problems."""
        return options_from(cls, value, where)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it)."""
        if not 0 < self.threshold <= 1:
            yield "threshold", f"{self.threshold} is not above 0 and at most 1."
        if not 1 <= self.shingle_words <= 1000:
            yield "shingle_words", f"{self.shingle_words} is not from 1 to 1,000."
        if self.exact not in ("text", "words"):
            yield "exact", f"{self.exact!r} is not text or words."
        if not 16 <= self.permutations <= 4096:
            yield "permutations", f"{self.permutations} is not from 16 to 4,096."
        if self.memory_bytes < 1 << 20:
            yield "memory_bytes", f"{self.memory_bytes} is less than 1 MiB."

    def as_dict(self) -> dict[str, Any]:
        """Return all options, for files."""
        return asdict(self)

    @property
    def bands(self) -> Bands | None:
        """How signatures are cut; None without near-duplicates."""
        return choose_bands(self.threshold, self.permutations) if self.near else None


@dataclass(frozen=True)
class WriteTask:
    """Write a unit's documents that are kept, and what the others are duplicates of."""

    documents: Documents
    output: Path

    def __call__(self, unit: int) -> Record:
        work = self.output / WORK
        low, high = unit << UNIT_BITS, (unit + 1) << UNIT_BITS
        found = load(array_path(work, "decisions", 0))
        found = np.array(find_range(found, "dropped", low, high))
        names = self._names(work, found["kept"])
        dropped = (found["dropped"] & NUMBER_MASK).tolist()
        verdicts = dict(zip(dropped, zip(found.tolist(), names, strict=True), strict=True))
        tally = Tally()
        with sieve_of(self.output, unit) as sieve:
            for number, row in enumerate(self.documents.read(unit, tally)):
                size = len(row.text.encode())
                if number not in verdicts:
                    sieve.keep(row.line, size, size)
                    continue
                (_, _, similarity, exact), name = verdicts[number]
                kind = "exact" if exact else "near"
                note = {"id": row.id, "kept": name, "similarity": similarity, "kind": kind}
                sieve.leave_out(f"{kind}_duplicate", size, row.id, row.text, note)
            return {**sieve.close(), "tally": tally.record()}

    def _names(self, work: Path, kept: np.ndarray) -> list[Any]:
        """Return the ids, as in the input, of the documents that were kept."""
        names: list[Any] = [None] * len(kept)
        units = kept >> np.uint64(UNIT_BITS)
        for unit in np.unique(units).tolist():
            places = np.flatnonzero(units == unit)
            found = read_names(work, unit, kept[places])
            for place, name in zip(places.tolist(), found, strict=True):
                names[place] = name
        return names


def identity(options: DedupOptions) -> dict[str, Any]:
    """Return, for a fingerprint, all that decides the result beside the documents.

    Raises:
        ConfigError: rensa is missing.
    """
    what = {"algorithm": ALGORITHM, "unicode": unicodedata.unidata_version, **options.as_dict()}
    del what["memory_bytes"]
    if options.bands is not None:
        what["minhash"] = load_rensa().RMinHash.ALGORITHM_VERSION
    return what


def run_dedup(
    options: DedupOptions,
    documents: Documents,
    inputs: str,
    before: dict[str, Any],
    output: Path,
    executor: Executor,
) -> dict[str, Any]:
    """Deduplicate documents into a stage, or go on where a run of the same was stopped.

    Args:
        inputs: fingerprint of the documents.
        before: where they are from, for `stage.json`.

    Returns:
        `stage.json`, published.

    Raises:
        ConfigError: the input cannot be read, or rensa is missing.
        ZerolmError: a task was lost.
    """
    bands, settings = options.bands, options.as_dict()
    whole = fingerprint([inputs, identity(options)])
    if (published := begin_stage(output, "dedup", whole)) is not None:
        return published
    work = output / WORK
    documents = documents.prepared(work / "read", executor)
    count = documents.num_tasks

    def run(name: str, num_tasks: int, task: Any, directory: Path = work) -> list[Record]:
        labels = documents.labels if num_tasks == count else ()
        inputs = fingerprint([whole, num_tasks, getattr(task, "num_partitions", 0)])
        return run_phase(Phase(name, directory, num_tasks, task, inputs, labels), executor)

    signatures = SignatureTask(documents, work, options.exact, options.shingle_words, bands)
    read = run("dedup.signatures", count, signatures)
    num_short = sum(record["short"] for record in read)
    num_entries = sum(record["documents_in"] for record in read)
    num_entries += (num_entries - num_short) * (bands.bands if bands else 0)
    partitions = -(-num_entries * BYTES_PER_ENTRY // options.memory_bytes)
    partitions = max(1, partitions, min(count, 16))
    copies = run("dedup.copies", partitions, ExactTask(work, count, partitions))
    pairs: list[Record] = []
    if bands is not None:
        run("dedup.buckets", partitions, BucketTask(work, count, partitions))
    members = MembersTask(documents, work, partitions, options.shingle_words, bands is not None)
    run("dedup.members", count, members)
    if bands is not None:
        pairs = run("dedup.verify", count, VerifyTask(work, partitions, options.threshold))
    decide = DecideTask(work, count, partitions, bands is not None)
    run("dedup.decide", 1, decide)
    written = run("dedup.write", count, WriteTask(documents, output), output)
    return publish_judged(
        output,
        "dedup",
        documents,
        written,
        left_out=DUPLICATES,
        inputs=whole,
        options=settings,
        before=before,
        bands=bands._asdict() if bands else None,
        copies=sum(record["copies"] for record in copies),
        candidate_pairs=sum(record["pairs"] for record in pairs),
        similar_pairs=sum(record["links"] for record in pairs),
        documents_without_shingles=num_short,
    )
