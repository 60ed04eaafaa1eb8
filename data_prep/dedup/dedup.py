"""The dedup stage: drops exact copies, and near-duplicates found by MinHash.

Phases: signatures (one task per work unit) -> copies and buckets (one task per range of hashes) ->
members -> verify -> decide (one task) -> write (one task per unit). Tasks exchange data only
through files. The result depends on the documents, their order and the options, but not on the
number of units, tasks or workers, nor on memory. docs/deduplication.md contains the definitions.

Documents may also be compared with the documents of earlier stages that kept their signatures
(`signatures.py`). Each decision depends only on earlier documents, so the result is the same as if
one stage had processed the documents of all these stages.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.dedup.arrays import NUMBER_MASK, Units, num_partitions
from data_prep.dedup.find_candidates import BucketTask, ExactTask, SignatureTask
from data_prep.dedup.members import MembersTask, find_names
from data_prep.dedup.minhash import BandLayout, choose_bands, load_rensa
from data_prep.dedup.options import DedupOptions
from data_prep.dedup.signatures import (
    SIGNATURES,
    CheckTask,
    KeepTask,
    Signatures,
    open_signatures,
    publish_signatures,
    signatures_manifest,
    withdraw_signatures,
)
from data_prep.dedup.verify_candidates import DecideTask, VerifyTask
from data_prep.read.bad_input import Tally
from data_prep.stages.documents import Documents, StageInput
from data_prep.stages.stage_output import StageRun, task_output
from data_prep.tasks.phases import Executor, Record

DUPLICATES = "duplicates.jsonl.zst"
ALGORITHM = 1  # increment when the result for the same input changes
MIN_PARTITIONS = 16  # or the number of work units, if smaller


def band_layout(options: DedupOptions) -> BandLayout | None:
    """Return how signatures are divided into bands, or None if only exact copies are dropped."""
    return choose_bands(options.threshold, options.permutations) if options.near else None


def open_against(options: DedupOptions) -> list[Signatures]:
    """Open the signatures to compare with."""
    if not options.against:
        return []
    return open_signatures(options.against, comparison_settings(options))


@dataclass(frozen=True)
class WriteTask:
    """Writes a unit's kept documents, and a note on each duplicate."""

    documents: Documents
    output: Path
    units: Units
    stores: tuple[str, ...]  # names of the signatures that the documents are compared with

    def __call__(self, task: int) -> Record:
        decisions = self.units.decisions(task)
        names = find_names(self.units, self.stores, decisions["kept"])
        numbers = (decisions["dropped"] & NUMBER_MASK).tolist()
        dropped = dict(zip(numbers, zip(decisions.tolist(), names, strict=True), strict=True))
        tally = Tally()
        with task_output(self.output, task) as output:
            for number, row in enumerate(self.documents.read(task, tally)):
                size = len(row.text.encode())
                if number not in dropped:
                    output.keep(row.line, size, size)
                    continue
                (_, _, similarity, exact), (name, store) = dropped[number]
                kind = "exact" if exact else "near"
                note = {"id": row.id, "kept": name, "similarity": similarity, "kind": kind}
                reason = f"{kind}_duplicate"
                if store is not None:
                    note["kept_in"] = store
                    reason += f".{store}"
                output.drop(reason, size, row.id, row.text, note)
            return {**output.close(), "tally": tally.record()}


def comparison_settings(options: DedupOptions) -> dict[str, Any]:
    """Return the settings that must be the same for old signatures and for the new documents."""
    keys = ("threshold", "shingle_words", "exact", "near", "permutations")
    settings: dict[str, Any] = {key: getattr(options, key) for key in keys}
    settings |= {"algorithm": ALGORITHM, "unicode": unicodedata.unidata_version}
    if options.near:
        settings["minhash"] = load_rensa().RMinHash.ALGORITHM_VERSION
    return settings


def dedup_identity(options: DedupOptions, against: Sequence[str]) -> dict[str, Any]:
    """Return everything that determines the result except the documents, to be fingerprinted.

    Args:
        against: ids of the signatures that the documents are compared with.
    """
    identity = comparison_settings(options)
    if options.keep_signatures:
        identity["keep_signatures"] = True
    if against:
        identity["against"] = list(against)
    return identity


def run_dedup(
    options: DedupOptions, given: StageInput, output: Path, executor: Executor
) -> dict[str, Any]:
    """Deduplicate documents into a stage, and return its `stage.json`."""
    against = open_against(options)
    identity = dedup_identity(options, [each.id for each in against])
    shown = {**asdict(options), "against": list(options.against)}
    run = StageRun("dedup", shown, identity, given, output, executor)
    if run.published is not None:
        if not options.keep_signatures or signatures_manifest(output).is_file():
            return run.published
        run.withdraw()
    withdraw_signatures(output, options.keep_signatures)
    documents, work = run.documents, run.work
    old = tuple((each.directory.absolute(), each.num_units) for each in against)
    hashes = output / SIGNATURES if options.keep_signatures else work
    units = Units(old, work, hashes, documents.num_tasks)
    stores = tuple(each.name for each in against)
    if old:
        run.phase("check", units.num_old, CheckTask(old, work))
    counts: dict[str, Any] = dict(_find_duplicates(options, units, run))
    if options.keep_signatures:
        near = options.near
        keep = KeepTask(documents, units, stores, work, options.shingle_words, near)
        records = run.phase("keep", documents.num_tasks, keep)
        settings = comparison_settings(options)
        counts["signatures"] = publish_signatures(output, run.key, settings, against, records)
    if against:
        counts["against"] = [each.record() for each in against]
    layout = band_layout(options)
    bands = None if layout is None else layout._asdict()
    task = WriteTask(documents, output, units, stores)
    return run.write("write", task, DUPLICATES, bands=bands, **counts)


def _find_duplicates(options: DedupOptions, units: Units, run: StageRun) -> dict[str, int]:
    """Run all phases except the last, and return the counts to record in `stage.json`."""
    documents = run.documents
    layout, num_units, work = band_layout(options), documents.num_tasks, units.work
    exact, shingle_words = options.exact, options.shingle_words
    signatures = SignatureTask(documents, work, units.hashes, exact, shingle_words, layout)
    records = run.phase("signatures", num_units, signatures)
    num_short = sum(record["short"] for record in records)
    num_documents = sum(record["documents_in"] for record in records)
    num_entries = num_documents + (num_documents - num_short) * (layout.bands if layout else 0)
    partitions = num_partitions(num_entries, options.memory_bytes)
    partitions = max(partitions, min(num_units, MIN_PARTITIONS))
    copies = run.phase("copies", partitions, ExactTask(units, partitions))
    if layout is not None:
        run.phase("buckets", partitions, BucketTask(units, partitions))
    near = layout is not None
    members = MembersTask(documents, units, partitions, shingle_words, near)
    run.phase("members", num_units, members)
    pairs: list[Record] = []
    if layout is not None:
        pairs = run.phase("verify", units.total, VerifyTask(units, partitions, options.threshold))
    run.phase("decide", 1, DecideTask(units, partitions, near))
    return {
        "copies": sum(record["copies"] for record in copies),
        "candidate_pairs": sum(record["pairs"] for record in pairs),
        "similar_pairs": sum(record["links"] for record in pairs),
        "documents_without_shingles": num_short,
    }
