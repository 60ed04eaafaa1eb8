"""Options for a recipe's sources, dedup, tokenizer, shards and packing, and for the corresponding
commands.

This module only defines options and checks their values. The other stages define their own options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.dedup.options import DedupOptions, against_problems
from data_prep.files.documents import InputRules
from data_prep.files.encodings import encoding_problems
from data_prep.formats import help_of_endings
from data_prep.stages.options import option, share
from data_prep.tokenizer.bpe import BpeOptions

ENCODERS = ("auto", "gigatoken", "tiktoken", "tokenizers", "transformers")
TOKENIZER = "tokenizer"  # directory for the tokenizer that a pipeline trains
MIN_VOCAB_SIZE = 257  # one id per byte, and the EOS token
DEFAULTS = InputRules()
INPUT_HELP = (
    f"{help_of_endings()}; a directory (all such files in it, sorted by path); a "
    "quoted glob; a URL of any of these (s3://, gs://; https:// for a file); or a dataset on the "
    "Hugging Face hub, namespace/name[:config][@split] (default split: train). Inputs are read in "
    "the given order; the flag may be repeated"
)


@dataclass(frozen=True)
class SourceOptions:
    """The inputs of a source, and the rules for reading them.

    Attributes:
        val_fraction: fraction of documents to hold out; overrides the fraction for all sources.
    """

    input: tuple[str, ...] = option(help=INPUT_HELP, shows=None)
    text_field: str = option(
        DEFAULTS.text_field, "key or column with the text; a.b for a key in a nested object", None
    )
    code: bool = option(
        False,
        "read every text file of --input as source code, one document each, with the keys path, "
        "language and license",
    )
    encoding: str = option(
        DEFAULTS.encoding,
        "encoding of text, code, CSV and JSON lines, such as utf-8 or cp1252; auto uses UTF-8 for "
        "valid UTF-8, and otherwise detects the encoding. Pages declare their own",
        "NAME",
    )
    max_page_seconds: float = option(
        DEFAULTS.max_page_seconds,
        "maximum CPU time to extract the text of a web page; a page that takes longer is bad input",
        "S",
        above=0,
    )
    on_bad_input: str = option(
        DEFAULTS.on_bad_input,
        "for documents that cannot be read: fail refuses the input; skip leaves them out, counts "
        "and reports them",
        "fail|skip",
        choices=("fail", "skip"),
    )
    max_bad_fraction: float = share(
        DEFAULTS.max_bad_fraction,
        "with --on_bad_input skip: maximum fraction of bad documents, and of bad bytes",
    )
    max_document_bytes: int = option(
        DEFAULTS.max_document_bytes,
        "maximum size of a line, a text file, or the text of a row; anything longer is bad input",
        "BYTES",
        low=1,
        high=1 << 40,
    )
    max_expansion: int = option(
        DEFAULTS.max_expansion,
        "maximum ratio of a file's decompressed to compressed size, checked beyond 64 MiB of "
        "decompressed data",
        low=1,
        high=1 << 40,
    )
    val_fraction: float | None = option(None, low=0, below=1)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        yield from encoding_problems(self.encoding)

    def rules(self, keep_records: bool = True) -> InputRules:
        """Return the rules for reading; stages that rewrite documents need `keep_records`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        del given["input"], given["val_fraction"]
        return InputRules(**given, keep_records=keep_records)


@dataclass(frozen=True)
class SourcesDedupOptions(DedupOptions):
    """Options for deduplicating each source, either by itself or together with other sources.

    Attributes:
        across_sources: also drop documents that duplicate a document in an earlier source.
        source_order: names of all sources, from most to least preferred; by default in the recipe's
            order.
    """

    across_sources: bool = False
    source_order: tuple[str, ...] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for each invalid value."""
        if self.source_order and not self.across_sources:
            yield "source_order", "has no effect without across_sources: true. Add it."

    def problems_with_sources(self, sources: Sequence[str], output: Path) -> list[str]:
        """Return contradictions between the options and the source names or pipeline's output."""
        problems = []
        if self.source_order and sorted(self.source_order) != sorted(sources):
            problems.append(
                f"source_order: {list(self.source_order)} must name each of {', '.join(sources)} "
                "exactly once."
            )
        for name in sources:
            problems += against_problems(self.against, output / name / "dedup", "against:")
        return problems

    def of_stage(self, earlier: Sequence[str]) -> DedupOptions:
        """Return the options for one source's stage."""
        given = {field.name: getattr(self, field.name) for field in fields(DedupOptions)}
        given["against"] = (*self.against, *earlier)
        given["keep_signatures"] = self.keep_signatures or self.across_sources
        return DedupOptions(**given)


@dataclass(frozen=True)
class TokenizerOptions:
    """Options for the tokenizer trained on the kept documents of all sources, and flags of
    `train-tokenizer`.

    Attributes:
        digits: "" for the split's default.
        sample_bytes: size of the text sample to train on; 0 to train on all text.
    """

    vocab_size: int = option(
        help="total number of token ids: special tokens, bytes and merges",
        low=MIN_VOCAB_SIZE,
        high=1 << 32,
    )
    split: str = option(
        "gpt2",
        "pattern that splits text into pieces, which merges never cross: gpt2, llama3 or o200k",
        None,
    )
    digits: str = option("", "maximum digits per piece: 1, 3 or any", None, shown="that of --split")
    whitespace: str = option(
        "runs",
        "runs: a run of spaces may become one token; single: each whitespace character is a "
        "separate piece",
        None,
    )
    special_tokens: tuple[str, ...] = option(
        (), "special tokens in addition to the EOS token; their ids are 1, 2, ...", "TOKEN"
    )
    min_frequency: int = option(0, "minimum number of occurrences for a pair to be merged", low=0)
    sample_bytes: int = option(1 << 30, low=0)

    def bpe(self) -> BpeOptions:
        """Return the options for the trainer."""
        given = {field.name: getattr(self, field.name) for field in fields(BpeOptions)}
        return BpeOptions(**given | {"digits": self.digits or None})


@dataclass(frozen=True)
class ShardOptions:
    """Options for tokenizing the remaining documents, and flags of `tokenize`.

    Attributes:
        tokenizer: the tokenizer to use; "" for the tokenizer that the pipeline trains.
    """

    tokenizer: str = ""
    val_fraction: float = option(0.0, low=0, below=1)
    shard_tokens: int = option(
        1 << 27,  # zerolm.shards.writer.DEFAULT_SHARD_TOKENS
        "maximum tokens per shard",
        low=1,
        shown="134217728, or 256 to 512 MiB",
    )
    bos: bool = option(False, "write the tokenizer's BOS id before each document too")
    max_unknown: float = share(
        0.01,
        "maximum fraction of tokens that may be the tokenizer's unknown token, whose text is lost",
    )
    encoder: str = option(
        "auto",
        "gigatoken, tiktoken, tokenizers or transformers",
        "NAME",
        choices=ENCODERS,
        shown="auto: gigatoken if it passes the equivalence check",
    )


@dataclass(frozen=True)
class PackOptions:
    """Options for best-fit packing of the shards, and flags of `pack`."""

    seq_len: int = option(help="tokens of a sequence", shows="T", low=1, high=(1 << 24) - 1)


def tokenizer_problems(
    content: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> list[str]:
    """Return the contradictions between the recipe's keys that train or use a tokenizer."""
    problems = []
    if options["train_tokenizer"] is not None:
        lines = options["train_tokenizer"].bpe().problems()
        problems += [f"{where}: train_tokenizer.{line.removeprefix('--')}" for line in lines]
        if "tokenize" not in content:
            problems.append(
                f"{where}: train_tokenizer: needs the key tokenize, which uses the tokenizer. "
                "Add it."
            )
        if TOKENIZER in (content.get("sources") or ()):
            problems.append(
                f"{where}: sources.{TOKENIZER}: is the name of the tokenizer's directory. Rename "
                "the source."
            )
    if "pack" in content and "tokenize" not in content:
        problems.append(
            f"{where}: pack: needs the key tokenize, which writes the shards to pack. Add it."
        )
    shards = options["tokenize"]
    if shards is not None and shards.bos and options["train_tokenizer"] is not None:
        problems.append(
            f"{where}: tokenize.bos: a trained tokenizer has no BOS token. Remove the key."
        )
    if shards is not None and bool(shards.tokenizer) == ("train_tokenizer" in content):
        problems.append(
            f"{where}: tokenize.tokenizer: give exactly one of this key and train_tokenizer."
        )
    return problems
