"""Options of the dedup and decontaminate stages.

This module imports little, so `--help` is instant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.stages.options import SWITCH, option, share

MIN_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True)
class DedupOptions:
    """Options that define which documents are duplicates. Of each group of duplicates, the first
    document in input order is kept.
    """

    threshold: float = option(
        0.8,
        "near-duplicates are pairs whose sets of shingles have at least this Jaccard similarity",
        "J",
        above=0,
        high=1,
    )
    shingle_words: int = option(13, "words in a shingle", low=1, high=1000)
    exact: str = option(
        "text",
        "exact copies have the same text, or the same words",
        "text|words",
        choices=("text", "words"),
    )
    near: bool = option(True, "on: also find near-duplicates; off: only exact copies", SWITCH)
    permutations: int = option(
        128, "maximum number of values in a MinHash signature", low=16, high=4096
    )
    memory_bytes: int = option(
        1 << 30,
        "memory of a process that sorts hashes; does not change the result",
        "BYTES",
        low=MIN_MEMORY_BYTES,
        flag="memory",
    )
    keep_signatures: bool = option(
        False,
        "on: write OUTPUT/signatures for a later --against, about 450 bytes per document plus 8 "
        "per word",
        SWITCH,
    )
    against: tuple[str, ...] = option(
        (),
        "outputs of earlier dedup runs with signatures; documents that duplicate a document there "
        "are dropped, as in a single pass over everything in this order",
        "DIR",
    )

    def relative_to(self, directory: Path) -> "DedupOptions":
        """Return the options with directories resolved relative to the recipe's directory."""
        return replace(self, against=tuple(str(directory / each) for each in self.against))


@dataclass(frozen=True)
class DecontaminateOptions:
    """The evaluation items to search for, and how much of an item a document must contain to match
    it.
    """

    evaluation: tuple[str, ...] = option(
        help="evaluation sets: HellaSwag's JSON lines, .txt (one item per paragraph), .jsonl(.gz, "
        ".zst) or .parquet with the fields to search for (default: text)",
        shows="PATH[:FIELD,...]",
    )
    ngram_words: int = option(13, "consecutive words that make a match", low=1, high=1000)
    min_overlap: float = share(
        0.0, "fraction of an item's n-grams that must be found", shown="0, one n-gram is enough"
    )
    min_item_words: int = option(5, "ignore texts shorter than this", low=1)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, problem)."""
        if not self.evaluation:
            yield "evaluation", "names no file. Give at least one, or remove the stage."
        if self.min_item_words > self.ngram_words:
            yield "min_item_words", f"{self.min_item_words} is greater than ngram_words."

    def relative_to(self, directory: Path) -> "DecontaminateOptions":
        """Return the options with file paths resolved relative to the recipe's directory."""
        return replace(self, evaluation=tuple(str(directory / each) for each in self.evaluation))


def against_problems(arguments: Sequence[str], output: Path, where: str) -> list[str]:
    """Return a problem for each directory of signatures that the output would replace."""
    target = output.resolve()
    return [
        f"{where} {each}: is in the output of this stage, which replaces it. Give another output."
        for each in arguments
        if target in (Path(each).resolve(), *Path(each).resolve().parents)
    ]
