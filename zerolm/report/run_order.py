"""The data order of a run that has begun, worked out again from what it left behind.

From `run.json`, the checkpoints' manifests and the token shards (docs/data_order.md); nothing of a
batch is stored. For whoever looks at data: no text and no tokenizer here, and no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolm import rollback
from zerolm.budget import batch_schedule, num_steps
from zerolm.checkpoint_directory import by_step, read
from zerolm.errors import CheckpointError, ConfigError
from zerolm.excerpts import Part, read_row, read_window
from zerolm.flags import parse_settings
from zerolm.mixture import recorded_stages
from zerolm.order import Order
from zerolm.packing import data_fingerprint, num_rows, open_packing
from zerolm.settings import BEST_FIT, Settings
from zerolm.shards import Source
from zerolm.skipped import Windows, sequence_ids
from zerolm.sources import open_sources, source_names
from zerolm.values import read_json

RUN_RECORD = "run.json"


class Row(NamedTuple):
    """One sequence of a run."""

    sequence: int
    source: int
    epoch: int
    window: int
    parts: list[Part]


@dataclass(frozen=True)
class RunOrder:
    """What a run reads, and in which order; with the names of its sources."""

    run_dir: Path
    settings: Settings
    sources: list[Source]
    names: list[str]
    order: Order
    skipped_windows: Windows

    def rows(self, sequence_ids: np.ndarray) -> Iterator[Row]:
        """Yield the rows of sequence numbers, (N,) int64."""
        seq_len = self.settings.seq_len
        assert seq_len is not None
        placed = self.order(sequence_ids)
        for number, place, window, epoch in zip(sequence_ids.tolist(), *placed, strict=True):
            source = self.sources[place]
            if self.settings.packing == BEST_FIT:
                parts = read_row(source, open_packing(source, seq_len), int(window))
            else:
                parts = read_window(source, int(window), seq_len)
            yield Row(number, int(place), int(epoch), int(window), parts)


def open_run(run_dir: Path) -> RunOrder:
    """Open the data of a run that has begun. Relative paths in its `--data` are taken from here.

    Raises:
        ConfigError: there is no such run or data, or the data is not the run's any more.
    """
    path = run_dir / RUN_RECORD
    record = read_json(path, "the --run_dir of a run that has begun")
    settings, problems = parse_settings(["--settings", str(path)])
    sources = open_sources(settings, problems)
    if problems:
        raise ConfigError(
            [f"{problem} Start this where the run was started." for problem in problems]
        )
    seq_len, training = settings.seq_len, sources.training
    assert seq_len is not None
    if data_fingerprint(training, seq_len, settings.packing) != record.get("data_fingerprint"):
        raise ConfigError(
            f"{path}: data_fingerprint: the token shards have changed since the run began. Restore "
            f"them: other tokens would be shown."
        )
    sizes = [num_rows(source, seq_len, settings.packing) for source in training]
    recorded = record.get("mixture", {}).get("stages") or [[0, sources.weights]]
    first, *later = recorded_stages(recorded)
    return RunOrder(
        run_dir,
        settings,
        training,
        source_names(training),
        Order(sizes, first.weights, settings.seed, stages=later),
        record.get("skipped_windows", []),
    )


def ids_of_step(run: RunOrder, step: int) -> tuple[np.ndarray, list[str]]:
    """Return the sequence numbers of a step's batch, as the run's data order is now, (N,) int64;
    and what else is to be said of the step.

    Raises:
        ConfigError: there is no such step.
    """
    if step < 1:
        raise ConfigError(f"--step {step}: steps are numbered from 1. Give a larger number.")
    schedule = batch_schedule(run.settings)
    # From a checkpoint, since a run may have been resumed with another batch; else from the start.
    now = position = skipped = 0
    for directory in by_step(run.run_dir / "checkpoints"):
        try:
            progress = read(directory).progress
        except CheckpointError:
            continue
        skipped = progress.skipped_steps
        if progress.step < step:
            now, position = progress.step, progress.position
    while now < step - 1:
        position += schedule(position)
        now += 1
    ids = sequence_ids(np.arange(position, position + schedule(position)), run.skipped_windows)
    notes = [
        f"step {step} was also taken before rollback {entry['number']}; its events in "
        f"{run.run_dir}/events.jsonl have the sequences of that time"
        for entry in rollback.entries(run.run_dir)
        if entry["to_step"] < step <= entry["from_step"]
    ]
    total = run.settings.total_tokens
    if total and step > (last := num_steps(run.settings, total) + skipped):
        notes.append(f"step {step} is behind the end of the run, step {last}: no step saw these")
    return ids, [*notes, f"step {step}: {len(ids)} sequences"]
