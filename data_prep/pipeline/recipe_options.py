"""Options of those parts of a recipe that have no module of their own: checked, not acted upon."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from data_prep.documents import InputRules
from zerolm.shard_writer import DEFAULT_SHARD_TOKENS

BACKENDS = ("auto", "tokenizers", "gigatoken", "fastokens", "tiktoken", "transformers")
MAX_SEQ_LEN = (1 << 24) - 1


@dataclass(frozen=True)
class SourceOptions:
    """Where a source's documents are, and how they are read: as the flags of `tokenize`."""

    input: tuple[str, ...]
    text_field: str = "text"
    on_bad_input: str = "fail"
    max_bad_fraction: float = 0.01
    max_document_bytes: int = 1 << 26
    max_expansion: int = 200

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it)."""
        if self.on_bad_input not in ("fail", "skip"):
            yield "on_bad_input", f"{self.on_bad_input!r} is not fail or skip."
        if not 0 <= self.max_bad_fraction <= 1:
            yield "max_bad_fraction", f"{self.max_bad_fraction} is not from 0 to 1."
        for name in ("max_document_bytes", "max_expansion"):
            if getattr(self, name) < 1:
                yield name, f"{getattr(self, name)} is not from 1 up."

    def rules(self) -> InputRules:
        """Return the rules of reading; whole records are read, to be written again."""
        given = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return InputRules(**given, keep_records=True)


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer that is trained on what is left of all sources: flags of `train-tokenizer`."""

    vocab_size: int
    split: str = "gpt2"
    digits: str = ""  # as the split has it
    whitespace: str = "runs"
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 0
    sample_bytes: int = 1 << 30  # of text, chosen by a hash; 0 is all

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it), but for what the trainer says itself."""
        for name in ("min_frequency", "sample_bytes"):
            if getattr(self, name) < 0:
                yield name, f"{getattr(self, name)} is not from 0 up."


@dataclass(frozen=True)
class ShardOptions:
    """How the documents that are left become token shards: as the flags of `tokenize`."""

    tokenizer: str = ""  # that of `train_tokenizer`
    val_fraction: float = 0.0
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    encoder: str = "auto"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it)."""
        if not 0 <= self.val_fraction < 1:
            yield "val_fraction", f"{self.val_fraction} is not from 0 to below 1."
        if self.shard_tokens < 1:
            yield "shard_tokens", f"{self.shard_tokens} is not from 1 up."
        if self.encoder not in BACKENDS:
            yield "encoder", f"{self.encoder!r} is not one of {', '.join(BACKENDS)}."


@dataclass(frozen=True)
class PackOptions:
    """For which lengths of rows the shards are packed best-fit: as the flags of `pack`."""

    seq_len: int

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (option, what is wrong with it)."""
        if not 1 <= self.seq_len <= MAX_SEQ_LEN:
            yield "seq_len", f"{self.seq_len} is not from 1 to {MAX_SEQ_LEN:,}."
