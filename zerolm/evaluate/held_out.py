"""`HeldOut`: validation shards, divided into sequences for a run or an exported model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerolm.common.errors import ConfigError, ShardError
from zerolm.config import defaults
from zerolm.config.settings import Settings
from zerolm.data.loader import ValidationStream, make_loader, prefetch_to_device
from zerolm.data.packing import num_rows, open_packing
from zerolm.data.sources import Sources, open_sources, overlap_problems, source_names
from zerolm.evaluate.likelihood import max_batch_tokens
from zerolm.model import document_mask
from zerolm.model.architecture import causal_lm_class
from zerolm.model.config_file import load_model_config
from zerolm.model.model import max_positions
from zerolm.shards.reader import Source, open_source
from zerolm.shards.token_bytes import read_token_bytes
from zerolm.shards.tokenizer import gives_equal_ids

BATCH_TOKENS = 8192  # maximum number of tokens per forward pass of an exported model
DEFAULT_SEQ_LEN = 2048  # or the model's number of positions, if smaller
SDPA = "sdpa"


class HeldOut(NamedTuple):
    """Validation shards, and their division into sequences.

    Attributes:
        options: arguments of `ValidationStream`: the shape of this rank's batches, and its shard.
        token_bytes: number of text bytes in each token, for `sums_by_source`; None if unknown.
        notices: lines to print about the shards.
    """

    sources: Sequence[Source]
    names: Sequence[str]
    num_sequences: int
    options: dict[str, Any]
    token_bytes: torch.Tensor | None
    notices: Sequence[str] = ()

    def batches(self, device: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches; every rank yields the same number of them."""
        stream = ValidationStream(self.sources, num_sequences=self.num_sequences, **self.options)
        yield from prefetch_to_device(make_loader(stream, 0, False), device)

    def windows(self, count: int) -> list[list[int]]:
        """Return the token ids of the first windows, which are the same on every rank."""
        options = {**self.options, "micro_batch_size": 1, "shard": 0, "num_shards": 1}
        options["document_mask"] = False
        stream = ValidationStream(self.sources, num_sequences=count, **options)
        return [batch["input_ids"][0].tolist() for batch in stream]


def open_held_out(directory: Path, settings: Settings) -> HeldOut:
    """Open the shards in `--val_data`, and check that they match the model in a directory."""
    config = load_model_config(str(directory / "config.json"), [])
    positions, packing = max_positions(config), settings.packing
    seq_len = settings.seq_len or min(positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
    problems: list[str] = []
    sources: list[Source] = []
    if positions and seq_len > positions:
        problems.append(f"--seq_len {seq_len}: the model has {positions} positions. Lower it.")
    if settings.document_mask and (
        why := document_mask.unsupported_reason(config, causal_lm_class(config), SDPA)
    ):
        problems.append(f"--document_mask: {why}. Remove it.")
    for path in settings.val_data:
        try:
            sources.append(open_source(path))
            _check(sources[-1], directory, config, seq_len, packing)
        except ConfigError as error:
            problems += [f"{problem} (--val_data)" for problem in error.problems]
    if settings.data and not problems:
        training = open_sources(replace(settings, val_data=()), problems).training
        problems += overlap_problems(Sources(training, [], sources), settings, if_equal=True)
    if problems:
        raise ConfigError(problems)
    eval_tokens = settings.eval_tokens or defaults.eval_tokens(seq_len)
    if eval_tokens < seq_len:
        raise ConfigError(
            f"--eval_tokens {eval_tokens}: below one sequence of {seq_len}. Raise it."
        )
    rows = sum(num_rows(source, seq_len, packing) for source in sources)
    options = {
        "seq_len": seq_len,
        "micro_batch_size": max(1, max_batch_tokens(BATCH_TOKENS, config) // seq_len),
        "document_mask": settings.document_mask,
        "packing": packing,
        "shard": 0,
        "num_shards": 1,
    }
    num_sequences = min(eval_tokens // seq_len, rows)
    notices = [f"{num_sequences:,} sequences of {seq_len:,} tokens"]
    if not settings.data:
        notices.append("note: not compared with the training data. Give its shards by --data")
    token_bytes = _token_bytes(sources, notices)
    return HeldOut(sources, source_names(sources), num_sequences, options, token_bytes, notices)


def _check(source: Source, directory: Path, config: Any, seq_len: int, packing: str) -> None:
    tokenizer = source.tokenizer_directory()
    if not tokenizer.is_dir():
        raise ShardError(
            f"{tokenizer}: no such directory, so the ids cannot be compared with the model's "
            f"tokenizer. Tokenize again."
        )
    if not gives_equal_ids(tokenizer, directory):
        raise ShardError(
            f"{source.directory}: its ids were not produced by the tokenizer of the model in "
            f"{directory}. Tokenize the text with --tokenizer {directory}."
        )
    vocab_size = config.get_text_config().vocab_size
    if source.vocab_size > vocab_size:
        raise ShardError(
            f"{source.directory}: vocab_size {source.vocab_size}, but the model has {vocab_size}."
        )
    if packing != "concat":
        open_packing(source, seq_len)
    if num_rows(source, seq_len, packing) < 1:
        raise ShardError(
            f"{source.directory}: {source.num_tokens} tokens are too few for a sequence of "
            f"{seq_len}. Lower --seq_len."
        )


def _token_bytes(sources: Sequence[Source], notices: list[str]) -> torch.Tensor | None:
    try:
        vocab_size = max(source.vocab_size for source in sources)
        table = read_token_bytes(sources[0].tokenizer_directory(), vocab_size)
    except ConfigError as error:
        notices.append(f"note: no bits per byte: {error}")
        return None
    if table.notice:
        notices.append(f"note: bits per byte: {table.notice}")
    return torch.from_numpy(table.rows())
