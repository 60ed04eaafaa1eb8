"""The text of a batch that a run has seen: for people who want to know what made a spike.

Comes after training, or beside it. Everything is worked out again from `run.json`, the checkpoints'
manifests and the token shards (docs/data_order.md); nothing of a batch is stored. No torch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zerolm import rollback
from zerolm.budget import batch_schedule
from zerolm.checkpoint_directory import by_step, read
from zerolm.errors import CheckpointError, ConfigError
from zerolm.excerpts import Decoder, load_decoder, read_row, read_window, render
from zerolm.flags import parse_settings
from zerolm.order import MAX_SEQUENCES, Order
from zerolm.packing import data_fingerprint, num_rows, open_packing
from zerolm.settings import BEST_FIT, Settings
from zerolm.shards import TOKENIZER_DIRECTORY
from zerolm.skipped import Windows, sequence_ids
from zerolm.sources import Sources, open_sources, source_names
from zerolm.values import read_json

RUN_RECORD = "run.json"


def decode_batch(run_dir: Path, step: int | None, sequences: str | None) -> Iterator[str]:
    """Yield the lines that show a batch: where each of its sequences is from, and its text.

    Args:
        run_dir: of a run that has begun. Relative paths in its `--data` are taken from here.
        step: the batch of this step, as the run's data order is now; or None, and
        sequences: `A-B`, sequence numbers from A up to but without B, or one number.

    Raises:
        ConfigError: there is no such run, step, sequence or data; the data is not the run's any
            more; or no tokenizer lies beside it.
    """
    path = run_dir / RUN_RECORD
    record = read_json(path, "the --run_dir of a run that has begun")
    settings, problems = parse_settings(["--settings", str(path)])
    sources = open_sources(settings, problems)
    if problems:
        raise ConfigError(
            [f"{problem} Start this where the run was started." for problem in problems]
        )
    assert settings.seq_len is not None
    prints = data_fingerprint(sources.training, settings.seq_len, settings.packing)
    if prints != record.get("data_fingerprint"):
        raise ConfigError(
            f"{path}: data_fingerprint: the token shards have changed since the run began. Restore "
            f"them: other tokens would be shown."
        )
    notes: list[str] = []
    if step is not None:
        ids, notes = _ids_of_step(run_dir, settings, step, record.get("skipped_windows", []))
    else:
        ids = _ids_of_range(str(sequences))
    decoders = [_decoder(source.directory) for source in sources.training]
    return _lines(sources, settings, ids, notes, decoders)


def _lines(
    sources: Sources,
    settings: Settings,
    ids: np.ndarray,
    notes: list[str],
    decoders: list[Decoder],
) -> Iterator[str]:
    seq_len, packing = settings.seq_len, settings.packing
    assert seq_len is not None
    counts = [num_rows(source, seq_len, packing) for source in sources.training]
    placed = Order(counts, sources.weights, settings.seed)(ids)
    names = source_names(sources.training)
    yield from notes
    for number, where, window, epoch in zip(ids.tolist(), *placed, strict=True):
        source = sources.training[where]
        if packing == BEST_FIT:
            parts = read_row(source, open_packing(source, seq_len), int(window))
        else:
            parts = read_window(source, int(window), seq_len)
        yield (
            f"=== sequence {number}: source {names[where]}, epoch {epoch}, window {window}, "
            f"documents {parts[0].document} to {parts[-1].document} ==="
        )
        yield from render(parts, decoders[where])


def _ids_of_step(
    run_dir: Path, settings: Settings, step: int, windows: Windows
) -> tuple[np.ndarray, list[str]]:
    """Return the sequence numbers of a step's batch, and what else is to be said of the step."""
    if step < 1:
        raise ConfigError(f"--step {step}: steps are numbered from 1. Give a larger number.")
    schedule = batch_schedule(settings)
    # From a checkpoint, since a run may have been resumed with another batch; else from the start.
    now, position = 0, 0
    for directory in by_step(run_dir / "checkpoints"):
        try:
            progress = read(directory).progress
        except CheckpointError:
            continue
        if progress.step < step:
            now, position = progress.step, progress.position
    while now < step - 1:
        position += schedule(position)
        now += 1
    ids = sequence_ids(np.arange(position, position + schedule(position)), windows)
    notes = [
        f"step {step} was also taken before rollback {entry['number']}; its events in "
        f"{run_dir}/events.jsonl have the sequences of that time"
        for entry in rollback.entries(run_dir)
        if entry["to_step"] < step <= entry["from_step"]
    ]
    return ids, [*notes, f"step {step}: {len(ids)} sequences"]


def _ids_of_range(text: str) -> np.ndarray:
    first, dash, end = text.partition("-")
    try:
        start = int(first)
        stop = int(end) if dash else start + 1
    except ValueError:
        raise ConfigError(
            f"--sequences {text}: not A-B or a number. Write for example 232-240, which is eight "
            f"sequences."
        ) from None
    if not 0 <= start < stop <= MAX_SEQUENCES:
        raise ConfigError(
            f"--sequences {text}: from A up to but without B, so B must be above A. Correct them."
        )
    return np.arange(start, stop, dtype=np.int64)


def _decoder(shards: Path) -> Decoder:
    copy = shards / TOKENIZER_DIRECTORY
    if not copy.is_dir():
        raise ConfigError(
            f"{copy}: no such directory, so ids cannot be shown as text. Put the tokenizer there "
            f"that made the shards."
        )
    return load_decoder(copy)
