"""Decontamination as a stage: documents that hold a part of an evaluation item are dropped.

One phase, a task a unit; the index of the items is made first, and read by each process.
docs/deduplication.md says what counts as a part.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.bad_input import Tally
from data_prep.evaluation_items import Item, read_items, split_evaluation
from data_prep.overlap import build_index, load_index
from data_prep.phases import Executor, Phase, Record, fingerprint, run_phase
from data_prep.sieve import WORK, begin_stage, publish_judged, sieve_of
from data_prep.stage_documents import Documents, batches
from data_prep.stage_options import options_from
from zerolm.errors import ConfigError
from zerolm.files import sha256_file

CONTAMINATED = "contaminated.jsonl.zst"
ALGORITHM = 1  # to be raised when the same input gives other results


@dataclass(frozen=True)
class DecontaminateOptions:
    """What is looked for."""

    evaluation: tuple[str, ...]  # PATH or PATH:field,field
    ngram_words: int = 13
    min_overlap: float = 0.0  # part of an item's runs of words; one is always needed
    min_item_words: int = 5  # shorter texts are not looked for

    @classmethod
    def from_recipe(cls, value: Any, where: str) -> "DecontaminateOptions":
        """Return the options of a recipe. Raises ConfigError with all problems."""
        return options_from(cls, value, where)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it)."""
        if not self.evaluation:
            yield "evaluation", "names no file. Give at least one, or leave the stage out."
        if not 1 <= self.ngram_words <= 1000:
            yield "ngram_words", f"{self.ngram_words} is not from 1 to 1,000."
        if not 0 <= self.min_overlap <= 1:
            yield "min_overlap", f"{self.min_overlap} is not from 0 to 1."
        if not 1 <= self.min_item_words <= self.ngram_words:
            yield "min_item_words", f"{self.min_item_words} is not from 1 to ngram_words."

    def as_dict(self) -> dict[str, Any]:
        """Return all options, for files."""
        return {**asdict(self), "evaluation": list(self.evaluation)}

    def relative_to(self, directory: Path) -> "DecontaminateOptions":
        """Return options whose files are those seen from a directory, that of the recipe."""
        return replace(self, evaluation=tuple(str(directory / each) for each in self.evaluation))

    def read_items(self) -> list[Item]:
        """Return the items of all files.

        Raises:
            ConfigError: what is wrong with each of them.
        """
        items: list[Item] = []
        problems: list[str] = []
        for argument in self.evaluation:
            try:
                items += read_items(argument)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return items


@dataclass(frozen=True)
class ScanTask:
    """Write a unit's documents that hold nothing of the items, and why the others are dropped."""

    documents: Documents
    output: Path
    index: Path
    min_overlap: float

    def __call__(self, unit: int) -> Record:
        index, tally = load_index(self.index), Tally()
        with sieve_of(self.output, unit) as sieve:
            for rows in batches(self.documents.read(unit, tally)):
                found = index.find([row.text for row in rows], self.min_overlap)
                matches = {match.document: match for match in found}
                for number, row in enumerate(rows):
                    size = len(row.text.encode())
                    match = matches.get(number)
                    if match is None:
                        sieve.keep(row.line, size, size)
                        continue
                    note = {**match._asdict(), "id": row.id}
                    del note["document"]
                    sieve.leave_out("contaminated", size, row.id, match.words, note)
            return {**sieve.close(), "tally": tally.record()}


def identity(options: DecontaminateOptions) -> dict[str, Any]:
    """Return, for a fingerprint, all that decides the result beside the documents."""
    files = [(each, sha256_file(split_evaluation(each)[0])) for each in options.evaluation]
    what = {"algorithm": ALGORITHM, "unicode": unicodedata.unidata_version, "files": files}
    return {**options.as_dict(), **what}


def run_decontaminate(
    options: DecontaminateOptions,
    documents: Documents,
    inputs: str,
    before: dict[str, Any],
    output: Path,
    executor: Executor,
) -> dict[str, Any]:
    """Write a stage without the documents that hold evaluation items, or go on with one.

    Args:
        inputs: fingerprint of the documents.
        before: where they are from, for `stage.json`.

    Returns:
        `stage.json`, published.

    Raises:
        ConfigError: an evaluation file or the input cannot be read.
        ZerolmError: a task was lost.
    """
    items = options.read_items()
    settings, what = options.as_dict(), identity(options)
    files = what["files"]
    whole = fingerprint([inputs, what])
    if (published := begin_stage(output, "decontaminate", whole)) is not None:
        return published
    documents = documents.prepared(output / WORK / "read", executor)
    (output / WORK).mkdir(parents=True, exist_ok=True)
    index, path = build_index(items, options.ngram_words, options.min_item_words), output / WORK
    path /= f"index-{whole}.npz"
    index.save(path)
    task = ScanTask(documents, output, path, options.min_overlap)
    count = documents.num_tasks
    phase = Phase("decontaminate.scan", output, count, task, whole, documents.labels)
    written = run_phase(phase, executor)
    return publish_judged(
        output,
        "decontaminate",
        documents,
        written,
        left_out=CONTAMINATED,
        inputs=whole,
        options=settings,
        before=before,
        evaluation=[{"file": each, "sha256": digest} for each, digest in files],
        items=len(items),
        texts=len(index.texts),
        texts_too_short=index.num_short,
    )
