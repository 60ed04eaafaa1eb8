"""The decontaminate stage: drops documents that share an n-gram with an evaluation item.

The stage writes an index of the evaluation items, and then runs a phase with one task per work
unit, in which each process reads the index. docs/deduplication.md defines when a document matches
an item.
"""

import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.dedup.evaluation_items import read_all_items, split_evaluation
from data_prep.dedup.ngram_index import build_index, load_index
from data_prep.dedup.options import DecontaminateOptions
from data_prep.read.bad_input import Tally
from data_prep.stages.documents import Documents, StageInput, batch_rows
from data_prep.stages.stage_output import StageRun, task_output
from data_prep.tasks.phases import Executor, Record
from zerolm.common.files import sha256_file

CONTAMINATED = "contaminated.jsonl.zst"
ALGORITHM = 1  # increment when the result for the same input changes


@dataclass(frozen=True)
class ScanTask:
    """Writes those documents of a unit that match no item, and a note on each dropped document."""

    documents: Documents
    output: Path
    index: Path
    min_overlap: float

    def __call__(self, unit: int) -> Record:
        index, tally = load_index(self.index), Tally()
        with task_output(self.output, unit) as output:
            for rows in batch_rows(self.documents.read(unit, tally)):
                found = index.find([row.text for row in rows], self.min_overlap)
                matches = {match.document: match for match in found}
                for number, row in enumerate(rows):
                    size = len(row.text.encode())
                    match = matches.get(number)
                    if match is None:
                        output.keep(row.line, size, size)
                        continue
                    note = {**match._asdict(), "id": row.id}
                    del note["document"]
                    output.drop("contaminated", size, row.id, match.words, note)
            return {**output.close(), "tally": tally.record()}


def decontaminate_identity(options: DecontaminateOptions) -> dict[str, Any]:
    """Return everything that determines the result except the documents, to be fingerprinted."""
    files = [(each, sha256_file(split_evaluation(each)[0])) for each in options.evaluation]
    versions = {"algorithm": ALGORITHM, "unicode": unicodedata.unidata_version, "files": files}
    return {**asdict(options), **versions}


def run_decontaminate(
    options: DecontaminateOptions, given: StageInput, output: Path, executor: Executor
) -> dict[str, Any]:
    """Copy all but the contaminated documents to a new stage, and return its `stage.json`."""
    items = read_all_items(options.evaluation)
    identity = decontaminate_identity(options)
    run = StageRun("decontaminate", asdict(options), identity, given, output, executor)
    if run.published is not None:
        return run.published
    documents, index_path = run.documents, run.work / f"index-{run.key}.npz"
    index = build_index(items, options.ngram_words, options.min_item_words)
    index.save(index_path)
    return run.write(
        "scan",
        ScanTask(documents, output, index_path, options.min_overlap),
        CONTAMINATED,
        evaluation=[{"file": each, "sha256": digest} for each, digest in identity["files"]],
        items=len(items),
        texts=len(index.texts),
        texts_too_short=index.num_short,
    )
