"""Options of a tokenization."""

from dataclasses import dataclass, field

from data_prep.encode.encode_units import PART_SECONDS
from data_prep.files.documents import InputRules
from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

MAX_UNKNOWN = 0.01  # of the tokens


@dataclass(frozen=True)
class TokenizeOptions:
    """The options for tokenization, besides the inputs and the tokenizer.

    Attributes:
        encoder: an encoding backend, or "auto" for the fastest backend equivalent to the reference.
        val_fraction: fraction of documents to write to the second output; None for a single output.
        bos: whether to write the tokenizer's BOS id before each document.
        shard_tokens: maximum number of tokens per shard.
        unit_bytes: size of a work unit; None to derive it from the size of the input.
        max_unknown: maximum fraction of tokens that may be the tokenizer's unknown token.
    """

    rules: InputRules = field(default_factory=InputRules)
    encoder: str = "auto"
    val_fraction: float | None = None
    bos: bool = False
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    unit_bytes: int | None = None
    part_seconds: float = PART_SECONDS
    max_unknown: float = MAX_UNKNOWN
