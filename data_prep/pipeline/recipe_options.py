"""Options of a recipe's sources, dedup, tokenizer, shards and packing, named like the flags.

Defines and checks values only. The options of the other stages are defined beside the stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.dedup.dedup import DedupOptions
from data_prep.dedup.signatures import against_problems
from data_prep.read.documents import InputRules
from data_prep.read.encodings import reading_problems
from data_prep.tokenizer.backends import BACKENDS
from data_prep.tokenizer.bpe import BpeOptions
from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

ENCODERS = ("auto", *BACKENDS)
TOKENIZER = "tokenizer"  # directory of the tokenizer that a pipeline trains
MAX_SEQ_LEN = (1 << 24) - 1


@dataclass(frozen=True)
class SourceOptions:
    """Inputs of a source, and the rules for reading them; the flags of `tokenize`.

    Attributes:
        val_fraction: instead of the one for all sources.
    """

    input: tuple[str, ...]
    text_field: str = "text"
    on_bad_input: str = "fail"
    max_bad_fraction: float = 0.01
    max_document_bytes: int = 1 << 26
    max_expansion: int = 200
    encoding: str = "utf-8"
    repair: tuple[str, ...] = ()
    code: bool = False
    max_page_seconds: float = 10.0
    val_fraction: float | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        yield from reading_problems(self.encoding, self.repair, self.max_page_seconds)
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            yield "val_fraction", f"{self.val_fraction} is not at least 0 and below 1."
        if self.on_bad_input not in ("fail", "skip"):
            yield "on_bad_input", f"{self.on_bad_input!r} is not fail or skip."
        if not 0 <= self.max_bad_fraction <= 1:
            yield "max_bad_fraction", f"{self.max_bad_fraction} is not between 0 and 1."
        for name in ("max_document_bytes", "max_expansion"):
            if getattr(self, name) < 1:
                yield name, f"{getattr(self, name)} is not at least 1."

    def rules(self) -> InputRules:
        """Return the rules for reading complete records, which the stages write out again."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        del given["input"], given["val_fraction"]
        given["repairs"] = given.pop("repair")
        return InputRules(**given, keep_records=True)


@dataclass(frozen=True)
class SourcesDedupOptions(DedupOptions):
    """How each source is deduplicated, and whether its documents are compared with other sources'.

    Attributes:
        across_sources: drop a document if a source before its own has a duplicate of it.
        source_order: names of all sources; default: as in the recipe.
    """

    across_sources: bool = False
    source_order: tuple[str, ...] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        yield from super().problems()
        if self.source_order and not self.across_sources:
            yield "source_order", "has no effect without across_sources: true. Add it."

    def problems_with_sources(self, sources: Sequence[str], output: Path) -> list[str]:
        """Return what contradicts the names of the sources, and the output of the pipeline."""
        problems = []
        if self.source_order and sorted(self.source_order) != sorted(sources):
            problems.append(
                f"source_order: {list(self.source_order)} does not name each of "
                f"{', '.join(sources)} once."
            )
        for name in sources:
            problems += against_problems(self.against, output / name / "dedup", "against:")
        return problems

    def of_stage(self, earlier: Sequence[str]) -> DedupOptions:
        """Return the options of one source's stage.

        Args:
            earlier: outputs of the sources that come before it.
        """
        given = {field.name: getattr(self, field.name) for field in fields(DedupOptions)}
        given["against"] = (*self.against, *earlier)
        given["keep_signatures"] = self.keep_signatures or self.across_sources
        return DedupOptions(**given)


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer trained on the kept documents of all sources; the flags of `train-tokenizer`.

    Attributes:
        digits: "" for the default of the split.
        sample_bytes: size of the sample of text to train on; 0 for all text.
    """

    vocab_size: int
    split: str = "gpt2"
    digits: str = ""
    whitespace: str = "runs"
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 0
    sample_bytes: int = 1 << 30

    def bpe(self) -> BpeOptions:
        """Return the options for the trainer."""
        return BpeOptions(
            self.vocab_size,
            self.split,
            self.digits or None,
            self.whitespace,
            self.special_tokens,
            self.min_frequency,
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value that `BpeOptions` does not check."""
        for name in ("min_frequency", "sample_bytes"):
            if getattr(self, name) < 0:
                yield name, f"{getattr(self, name)} is not at least 0."


@dataclass(frozen=True)
class ShardOptions:
    """How the remaining documents are tokenized; the flags of `tokenize`.

    Attributes:
        tokenizer: "" for the tokenizer that the pipeline trains.
    """

    tokenizer: str = ""
    val_fraction: float = 0.0
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    encoder: str = "auto"
    max_unknown: float = 0.01

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        if not 0 <= self.val_fraction < 1:
            yield "val_fraction", f"{self.val_fraction} is not at least 0 and below 1."
        if self.shard_tokens < 1:
            yield "shard_tokens", f"{self.shard_tokens} is not at least 1."
        if not 0 <= self.max_unknown <= 1:
            yield "max_unknown", f"{self.max_unknown} is not from 0 to 1."
        if self.encoder not in ENCODERS:
            yield "encoder", f"{self.encoder!r} is not one of {', '.join(ENCODERS)}."


@dataclass(frozen=True)
class PackOptions:
    """Best-fit packing of the shards; the flags of `pack`."""

    seq_len: int

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        if not 1 <= self.seq_len <= MAX_SEQ_LEN:
            yield "seq_len", f"{self.seq_len} is not between 1 and {MAX_SEQ_LEN:,}."


@dataclass(frozen=True)
class ReportOptions:
    """What the report shows beside the counts of the stages.

    Attributes:
        shares_by: keys of documents, by whose values documents, bytes and tokens are counted.
    """

    shares_by: tuple[str, ...]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        if not self.shares_by or len(set(self.shares_by)) < len(self.shares_by):
            yield (
                "shares_by",
                f"{list(self.shares_by)}: name one or more keys, without repeating one.",
            )


def tokenizer_problems(
    content: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> list[str]:
    """Return the contradictions between the keys that train, need and use a tokenizer."""
    problems = []
    if options["train_tokenizer"] is not None:
        lines = options["train_tokenizer"].bpe().problems()
        problems += [f"{where}: train_tokenizer.{line.removeprefix('--')}" for line in lines]
        if "tokenize" not in content:
            problems.append(f"{where}: train_tokenizer: needs tokenize, which uses it. Add it.")
        if TOKENIZER in (content.get("sources") or ()):
            problems.append(
                f"{where}: sources.{TOKENIZER}: is the name of the tokenizer's directory. Rename "
                f"the source."
            )
    if "pack" in content and "tokenize" not in content:
        problems.append(f"{where}: pack: needs tokenize, whose shards it packs. Add it.")
    shards = options["tokenize"]
    if shards is not None and bool(shards.tokenizer) == ("train_tokenizer" in content):
        problems.append(
            f"{where}: tokenize.tokenizer: give exactly one of this key and train_tokenizer."
        )
    return problems
