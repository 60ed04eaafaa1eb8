"""Loss and bits per byte of an exported model on token shards, as `eval/...` of a run.

In one process. Must not depend on a run or an engine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.common.errors import ConfigError, ShardError
from zerolm.config.defaults import EVAL_TOKENS
from zerolm.data.packing import num_rows, open_packing
from zerolm.data.sources import source_names
from zerolm.evaluate.rules import MIN_NEEDLE_TEXT
from zerolm.model import document_mask
from zerolm.model.architecture import causal_lm_class
from zerolm.model.config_file import load_model_config
from zerolm.model.model import max_positions
from zerolm.shards.reader import Source, open_source
from zerolm.shards.token_bytes import read_token_bytes
from zerolm.shards.tokenizer import gives_equal_ids

BATCH_TOKENS = 8192  # maximum of a forward pass
DEFAULT_SEQ_LEN = 2048  # or the positions of the model, if fewer
SDPA = "sdpa"


class HeldOut(NamedTuple):
    """Validation shards, and how they are divided into sequences, as in the settings of a run.

    Attributes:
        seq_len: tokens in a sequence; None for `DEFAULT_SEQ_LEN`.
        eval_tokens: total over all shards; None for the default of a run.
        by_position: also measure the loss of three quarters of a sequence.
        needle_items: windows with a needle; 0: none.
    """

    paths: Sequence[str]
    seq_len: int | None = None
    eval_tokens: int | None = None
    document_mask: bool = False
    packing: str = "concat"
    by_position: bool = False
    needle_items: int = 0


def open_held_out(directory: Path, given: HeldOut) -> tuple[list[Source], HeldOut]:
    """Open the shards, check that they are for the model, and fill in the values of `given`."""
    config = load_model_config(str(directory / "config.json"), [])
    positions = max_positions(config)
    seq_len = given.seq_len or min(positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
    problems, sources = [], []
    if positions and seq_len > positions:
        problems.append(f"--seq_len {seq_len}: the model has {positions} positions. Lower it.")
    if given.document_mask and (
        why := document_mask.unsupported_reason(config, causal_lm_class(config), SDPA)
    ):
        problems.append(f"--document_mask: {why}. Remove it.")
    for path in given.paths:
        try:
            sources.append(open_source(path))
            problems += _problems(sources[-1], directory, config, seq_len, given.packing)
        except ConfigError as error:
            problems += [f"{problem} (--val_data)" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    eval_tokens = given.eval_tokens or max(EVAL_TOKENS, seq_len)
    if given.needle_items and seq_len < MIN_NEEDLE_TEXT:
        raise ConfigError(f"--needle_items: needs --seq_len {MIN_NEEDLE_TEXT} or more. Raise it.")
    if eval_tokens < seq_len:
        raise ConfigError(
            f"--eval_tokens {eval_tokens}: below one sequence of {seq_len}. Raise it."
        )
    return sources, given._replace(seq_len=seq_len, eval_tokens=eval_tokens)


def _problems(
    source: Source, directory: Path, config: Any, seq_len: int, packing: str
) -> list[str]:
    tokenizer = source.tokenizer_directory()
    if not tokenizer.is_dir():
        raise ShardError(
            f"{tokenizer}: no such directory, so that nobody knows whether the ids are those of "
            f"the model. Tokenize again."
        )
    if not gives_equal_ids(tokenizer, directory):
        raise ShardError(
            f"{source.directory}: its ids were made by another tokenizer than that of the model "
            f"in {directory}. Tokenize the text with --tokenizer {directory}."
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
    return []


def held_out_figures(
    model: Any, sources: Sequence[Source], given: HeldOut, print_line: Callable[..., None]
) -> dict[str, float]:
    """Return the figures of `validation_loss`, and of needles, without `eval/` in their names.

    Args:
        sources, given: the result of `open_held_out`.
    """
    import torch

    from zerolm.data.loader import ValidationStream, make_loader, prefetch_to_device
    from zerolm.evaluate import needle
    from zerolm.evaluate.likelihood import SINGLE_PROCESS, max_batch_tokens
    from zerolm.evaluate.validation import validation_loss

    assert given.seq_len and given.eval_tokens
    rows = sum(num_rows(source, given.seq_len, given.packing) for source in sources)
    stream = ValidationStream(
        sources,
        seq_len=given.seq_len,
        num_sequences=min(given.eval_tokens // given.seq_len, rows),
        micro_batch_size=max(1, max_batch_tokens(BATCH_TOKENS, model.config) // given.seq_len),
        rank=0,
        world_size=1,
        document_mask=given.document_mask,
        packing=given.packing,
    )
    print_line(f"{stream.num_sequences:,} sequences of {given.seq_len:,} tokens")
    token_bytes = None
    try:
        vocab_size = max(source.vocab_size for source in sources)
        table = read_token_bytes(sources[0].tokenizer_directory(), vocab_size)
        token_bytes = torch.from_numpy(table.rows()).to(model.device)
        if table.notice:
            print_line(f"note: bits per byte: {table.notice}")
    except ConfigError as error:
        print_line(f"note: no bits per byte: {error}")
    batches = prefetch_to_device(make_loader(stream, 0, False), model.device)
    row = validation_loss(
        model, batches, source_names(sources), token_bytes, by_position=given.by_position
    )
    model.eval()
    if given.needle_items:
        row |= needle.figures(
            model,
            sources,
            num_items=given.needle_items,
            seq_len=given.seq_len,
            packing=given.packing,
            device=model.device,
            batch_tokens=max_batch_tokens(BATCH_TOKENS, model.config),
            ranks=SINGLE_PROCESS,
        )
    return {key.removeprefix("eval/"): value for key, value in row.items()}
