"""The dedup stage: drops exact copies, and near-duplicates found by MinHash.

Phases: signatures (a task per work unit) -> copies and buckets (one task per range of hashes) ->
members -> verify -> decide (one task) -> write (a task per unit). Tasks exchange data only through
files. The result depends on the documents, their order and the options, but not on units, tasks,
memory or workers. docs/deduplication.md has the definitions.
"""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.arrays import NUMBER_MASK, UNIT_BITS, array_path, find_range, load_array
from data_prep.dedup.find_candidates import BucketTask, ExactTask, SignatureTask
from data_prep.dedup.minhash import MAX_PERMUTATIONS, BandLayout, choose_bands, load_rensa
from data_prep.dedup.verify_candidates import DecideTask, MembersTask, VerifyTask, read_names
from data_prep.read.bad_input import Tally
from data_prep.stages.documents import Documents
from data_prep.stages.stage_output import WORK, publish_output, reuse_or_reset_stage, task_output
from data_prep.tasks.phases import Executor, Phase, Record, fingerprint, run_phase

DUPLICATES = "duplicates.jsonl.zst"
ALGORITHM = 1  # increment it when the same input gives different results
MIN_PARTITIONS = 16  # or the number of work units, if that is smaller
# Peak memory per entry of a hash range, with sorting: 101 bytes with 2 million entries (growth of
# the resident set in BucketTask, 2026-11-21), plus copies.
BYTES_PER_ENTRY = 120


@dataclass(frozen=True)
class DedupOptions:
    """Defines what a duplicate is. Of each group, the first document in input order is kept."""

    threshold: float = 0.8  # Jaccard index of the sets of shingles
    shingle_words: int = 13
    exact: str = "text"  # exact copies have the same "text", or the same "words"
    near: bool = True
    permutations: int = MAX_PERMUTATIONS  # at most
    memory_bytes: int = 1 << 30  # for a task that sorts hashes

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, problem)."""
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

    @property
    def band_layout(self) -> BandLayout | None:
        """How signatures are divided into bands; None if near-duplicates are not searched for."""
        return choose_bands(self.threshold, self.permutations) if self.near else None


@dataclass(frozen=True)
class WriteTask:
    """Writes the documents of a unit that are kept, and notes on the duplicates."""

    documents: Documents
    output: Path

    def __call__(self, unit: int) -> Record:
        work = self.output / WORK
        low, high = unit << UNIT_BITS, (unit + 1) << UNIT_BITS
        decisions = load_array(array_path(work, "decisions", 0))
        decisions = np.array(find_range(decisions, "dropped", low, high))
        names = self._names(work, decisions["kept"])
        numbers = (decisions["dropped"] & NUMBER_MASK).tolist()
        dropped = dict(zip(numbers, zip(decisions.tolist(), names, strict=True), strict=True))
        tally = Tally()
        with task_output(self.output, unit) as output:
            for number, row in enumerate(self.documents.read(unit, tally)):
                size = len(row.text.encode())
                if number not in dropped:
                    output.keep(row.line, size, size)
                    continue
                (_, _, similarity, exact), name = dropped[number]
                kind = "exact" if exact else "near"
                note = {"id": row.id, "kept": name, "similarity": similarity, "kind": kind}
                output.drop(f"{kind}_duplicate", size, row.id, row.text, note)
            return {**output.close(), "tally": tally.record()}

    def _names(self, work: Path, kept: np.ndarray) -> list[Any]:
        """Return the input ids of the kept documents."""
        names: list[Any] = [None] * len(kept)
        units = kept >> np.uint64(UNIT_BITS)
        for unit in np.unique(units).tolist():
            places = np.flatnonzero(units == unit)
            unit_names = read_names(work, unit, kept[places])
            for place, name in zip(places.tolist(), unit_names, strict=True):
                names[place] = name
        return names


def dedup_identity(options: DedupOptions) -> dict[str, Any]:
    """Return everything except the documents that determines the result, for a fingerprint.

    Raises:
        ConfigError: rensa is missing.
    """
    identity = {
        "algorithm": ALGORITHM,
        "unicode": unicodedata.unidata_version,
        **asdict(options),
    }
    del identity["memory_bytes"]
    if options.band_layout is not None:
        identity["minhash"] = load_rensa().RMinHash.ALGORITHM_VERSION
    return identity


def run_dedup(
    options: DedupOptions,
    documents: Documents,
    inputs: str,
    provenance: dict[str, Any],
    output: Path,
    executor: Executor,
) -> dict[str, Any]:
    """Deduplicate documents into a stage; resumes an interrupted run.

    Args:
        inputs: fingerprint of the documents.
        provenance: of the documents, for `stage.json`.

    Returns:
        `stage.json`, published.

    Raises:
        ConfigError: the input cannot be read, or rensa is missing.
        ZerolmError: a task was lost.
    """
    key = fingerprint([inputs, dedup_identity(options)])
    if (published := reuse_or_reset_stage(output, "dedup", key)) is not None:
        return published
    documents = documents.bounded(output / WORK / "read", executor)

    def run(name: str, num_tasks: int, task: Callable[[int], Record]) -> list[Record]:
        directory = output if name == "dedup.write" else output / WORK
        labels = documents.labels if num_tasks == documents.num_tasks else ()
        inputs = fingerprint([key, num_tasks, getattr(task, "num_partitions", 0)])
        return run_phase(Phase(name, directory, num_tasks, task, inputs, labels), executor)

    counts = _find_duplicates(options, documents, output / WORK, run)
    records = run("dedup.write", documents.num_tasks, WriteTask(documents, output))
    return publish_output(
        output,
        "dedup",
        documents,
        records,
        notes=DUPLICATES,
        inputs=key,
        options=asdict(options),
        provenance=provenance,
        bands=options.band_layout._asdict() if options.band_layout else None,
        **counts,
    )


def _find_duplicates(
    options: DedupOptions,
    documents: Documents,
    work: Path,
    run: Callable[[str, int, Callable[[int], Record]], list[Record]],
) -> dict[str, int]:
    """Run all phases except the last, and return counts for `stage.json`.

    Args:
        run: runs a phase, given its name, number of tasks and task.
    """
    layout, num_units = options.band_layout, documents.num_tasks
    signatures = SignatureTask(documents, work, options.exact, options.shingle_words, layout)
    records = run("dedup.signatures", num_units, signatures)
    num_short = sum(record["short"] for record in records)
    num_documents = sum(record["documents_in"] for record in records)
    num_entries = num_documents + (num_documents - num_short) * (layout.bands if layout else 0)
    partitions = -(-num_entries * BYTES_PER_ENTRY // options.memory_bytes)
    partitions = max(1, partitions, min(num_units, MIN_PARTITIONS))
    copies = run("dedup.copies", partitions, ExactTask(work, num_units, partitions))
    if layout is not None:
        run("dedup.buckets", partitions, BucketTask(work, num_units, partitions))
    near = layout is not None
    members = MembersTask(documents, work, partitions, options.shingle_words, near)
    run("dedup.members", num_units, members)
    pairs: list[Record] = []
    if layout is not None:
        pairs = run("dedup.verify", num_units, VerifyTask(work, partitions, options.threshold))
    run("dedup.decide", 1, DecideTask(work, num_units, partitions, near))
    return {
        "copies": sum(record["copies"] for record in copies),
        "candidate_pairs": sum(record["pairs"] for record in pairs),
        "similar_pairs": sum(record["links"] for record in pairs),
        "documents_without_shingles": num_short,
    }
