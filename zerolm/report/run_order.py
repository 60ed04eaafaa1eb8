"""The data order of a run: which sequences each step reads.

Batches are not stored; they are recomputed from `run.json`, the checkpoint manifests and the token
shards (docs/data_order.md). Must not depend on tokenizers or torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolm.checkpoint.directory import published_checkpoints, read
from zerolm.common.errors import CheckpointError, ConfigError
from zerolm.config.settings import BEST_FIT, Settings
from zerolm.data.mixture import blends_from_record, group_size
from zerolm.data.order import Order
from zerolm.data.packing import Packing, data_fingerprint, num_rows, open_intact_packing
from zerolm.data.skips import SkippedRanges, sequence_ids
from zerolm.data.sources import open_sources, source_names
from zerolm.data.window_text import DocumentSpan, read_row, read_window
from zerolm.parts.parse import parse_settings
from zerolm.plan.budget import batch_schedule, num_steps
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import read_rollbacks, read_run_json
from zerolm.shards.reader import Source


class Row(NamedTuple):
    """One sequence of a run, and its origin."""

    sequence: int
    source: int
    epoch: int
    window: int
    parts: list[DocumentSpan]


@dataclass(frozen=True)
class RunOrder:
    """A run's data, the data's order, and the names of the sources."""

    run_dir: Path
    settings: Settings
    sources: list[Source]
    names: list[str]
    order: Order
    skipped_windows: SkippedRanges

    def rows(self, sequence_ids: np.ndarray) -> Iterator[Row]:
        """Yield the rows with these sequence numbers, (N,) int64, in the order given."""
        seq_len = self.settings.seq_len
        assert seq_len is not None
        placed = self.order(sequence_ids)
        for number, place, window, epoch in zip(sequence_ids.tolist(), *placed, strict=True):
            source = self.sources[place]
            if self.settings.packing == BEST_FIT:
                parts = read_row(source, self._packings[place], int(window))
            else:
                parts = read_window(source, int(window), seq_len)
            yield Row(number, int(place), int(epoch), int(window), parts)

    @cached_property
    def _packings(self) -> list[Packing]:
        assert self.settings.seq_len is not None
        return [open_intact_packing(source, self.settings.seq_len) for source in self.sources]


def open_run(run_dir: Path) -> RunOrder:
    """Open the data of a run that has started.

    Relative paths in the run's `--data` are resolved against the current directory.

    Raises:
        ConfigError: the run or its data does not exist, or the data has changed since the run
            started.
    """
    path = RunFiles(run_dir).record
    record = read_run_json(run_dir)
    settings, problems = parse_settings(["--settings", str(path), "--run_dir", str(run_dir)])
    sources = open_sources(settings, problems)
    if problems:
        raise ConfigError(
            [f"{problem} Use the directory that the run was started in." for problem in problems]
        )
    seq_len, training = settings.seq_len, sources.training
    assert seq_len is not None
    if data_fingerprint(training, seq_len, settings.packing) != record.get("data_fingerprint"):
        raise ConfigError(
            f"{path}: data_fingerprint: the token shards have changed since the run started, so "
            "the wrong tokens would be shown. Restore the shards."
        )
    sizes = [num_rows(source, seq_len, settings.packing) for source in training]
    recorded = record.get("mixture", {}).get("stages") or [[0, sources.weights]]
    first, *later = blends_from_record(recorded)
    return RunOrder(
        run_dir,
        settings,
        training,
        source_names(training),
        Order(sizes, first.weights, settings.seed, blends=later, group=group_size(settings)),
        record.get("skipped_windows", []),
    )


def ids_of_step(run: RunOrder, step: int) -> tuple[np.ndarray, list[str]]:
    """Return the sequence numbers of a step's batch in the current data order, with notes.

    Returns: (N,) int64 sequence numbers, and notes for the user.

    Raises:
        ConfigError: the run has no such step.
    """
    if step < 1:
        raise ConfigError(f"--step {step}: steps are numbered from 1. Give a positive number.")
    schedule = batch_schedule(run.settings)
    # Count from a checkpoint, because the run may have been resumed with another batch size.
    now = position = skipped = 0
    for directory in published_checkpoints(RunFiles(run.run_dir).checkpoints):
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
        f"step {step} was also run before rollback {entry['number']}; its events in "
        f"{RunFiles(run.run_dir).events} name the sequences that it read then"
        for entry in read_rollbacks(run.run_dir)
        if entry["to_step"] < step <= entry["from_step"]
    ]
    branch = read_run_json(run.run_dir).get("branch")
    if branch and step <= branch["step"]:
        notes.append(f"step {step} was run by the trunk {branch['run']}; see the data order there")
    total = run.settings.total_tokens
    if total and step > (last := num_steps(schedule, run.settings.seq_len or 1, total) + skipped):
        notes.append(
            f"step {step} is after the last step of the run, {last}; no step reads these sequences"
        )
    return ids, [*notes, f"step {step}: {len(ids)} sequences"]
