"""What a run says: `metrics.jsonl`, `events.jsonl`, one console line; trackers copy the files.

The files are the truth. A tracker may be down, slow or misconfigured; that is an event, never the
end of a run. Only rank 0 has a `RunLog` that writes.
"""

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm import events, jsonl, skipped, tracker
from zerolm.distributed import tell
from zerolm.files import write_atomically
from zerolm.line_file import LineFile
from zerolm.values import count, duration

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
ROLLED_BACK = "metrics-rolled-back-{:04d}.jsonl"
EVENTS = events.EVENTS

Row = dict[str, Any]


class RunLog:
    """The metrics and events of one run directory.

    Args:
        run_dir: exists.
        resumed_step: lines of later steps are dropped: a killed run leaves the lines of steps that
            are now taken again, with the same values, and possibly half a line.
        writes: False makes every method a no-op (all ranks but the first).
    """

    def __init__(self, run_dir: Path, resumed_step: int, writes: bool):
        self.run_dir, self.writes = Path(run_dir), writes
        self.trackers: tracker.Trackers | None = None
        self._metrics: LineFile | None = None
        self._events: LineFile | None = None
        self._values: dict[str, dict[int, float]] = {}  # of keys that were asked for, by step
        self._newest: tuple[int, set[str]] = (-1, set())  # the last step, and the keys it has
        if not writes:
            return
        path = self.run_dir / METRICS
        written, end = jsonl.read_end(path, resumed_step)
        jsonl.cut_end(path, end)
        for row in written:
            if row["step"] == resumed_step:
                self._note(row)
        self._metrics = LineFile(path, tell)
        path = self.run_dir / SAMPLES
        if path.is_file():
            jsonl.cut_end(path, jsonl.read_end(path, resumed_step)[1])
        path = self.run_dir / EVENTS
        half = path.is_file() and not path.read_bytes().endswith(b"\n")
        self._events = LineFile(path, tell)
        if half and path.stat().st_size:
            self._events.write("")  # a writer was killed in its line: the next one is its own

    def has(self, step: int, key: str) -> bool:
        """Tell whether the newest step is `step` and has `key`. Rank 0 only.

        Args:
            key: whole, or with a slash at its end what a key begins with.
        """
        newest, keys = self._newest
        found = key in keys or (key.endswith("/") and any(each.startswith(key) for each in keys))
        return newest == step and found

    def best_steps(self, key: str, count: int) -> list[int]:
        """Return the `count` steps with the lowest values of `key`. Empty but on rank 0."""
        if not self.writes or not count:
            return []
        if key not in self._values:  # read once: a run may have a million lines
            rows = jsonl.rows_with(self.run_dir / METRICS, key)
            self._values[key] = {row["step"]: row[key] for row in rows if row[key] is not None}
        values = self._values[key]
        return sorted(values, key=lambda step: (values[step], step))[:count]

    def metrics(self, row: Row) -> None:
        """Append one line. `row` has `step` and `tokens`."""
        if self._metrics is None:
            return
        row = {key: _json_value(value) for key, value in row.items()}
        self._metrics.write(json.dumps(row, allow_nan=False))
        self._note(row)
        for key, values in self._values.items():
            if row.get(key) is not None:
                values[row["step"]] = row[key]
        if self.trackers is not None:
            self.trackers.poke()

    def _note(self, row: Row) -> None:
        step, keys = self._newest
        self._newest = row["step"], {*row, *(keys if step == row["step"] else ())}

    def samples(self, rows: Sequence[Row]) -> None:
        """Append what the model wrote: a line for each prompt, all of one step at once."""
        if not self.writes:
            return
        with open(self.run_dir / SAMPLES, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def sampled_tokens(self) -> int:
        """Return the tokens at which the run last wrote samples, 0 if never. Rank 0 only."""
        rows = jsonl.read_all(self.run_dir / SAMPLES)
        return rows[-1]["tokens"] if rows else 0

    def event(self, event: str, step: int, **what: Any) -> None:
        """Append what happened and why."""
        if self._events is not None:
            self._events.write(events.line(event, step, **what))

    def sync(self) -> None:
        """Make the lines durable: no checkpoint is ahead of its metrics after a power cut.

        On a full disk they wait in memory; what becomes of the checkpoint is another matter.
        """
        for file in (self._metrics, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # the file has said so
                    file.sync()

    def track(self, settings: Any, before: tracker.Trackers | None = None) -> None:
        """Start the trackers that the settings name. They read run.json; no call waits for them.

        Args:
            before: those of the log before a rollback, which have still something to say.
        """
        names = tracker.names(settings)
        if self.writes and names:
            self.trackers = tracker.Trackers(self.run_dir, names, self._note_of_tracker, before)

    def _note_of_tracker(self, event: str, **what: Any) -> None:
        step = self._newest[0]
        if self._events is None or self._events.closed:
            events.append(self.run_dir, event, step, **what)
        else:
            self.event(event, step, **what)

    def close(self, how: str = "done") -> None:
        """Flush everything, and tell the trackers that nothing more is written.

        Args:
            how: the run ends: `done`, `stopped`, `gave_up`, `failed`; `rollback`: its log does.
        """
        self.sync()
        if self.trackers is not None:
            self.trackers.end(how)
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()

    def finish_trackers(self) -> None:
        """Wait for the trackers, for a bounded time, once all else has ended."""
        if self.trackers is not None:
            self.trackers.finish()


def archive(run_dir: Path, number: int, step: int) -> None:
    """Keep the metrics of the steps after `step` beside the others, before they are taken again.

    Rank 0 alone calls, before the next `RunLog` of the directory drops them. The archive of a
    rollback is written once: a call after a crash finds it, or makes it.

    Args:
        number: of the rollback.
    """
    path = Path(run_dir) / ROLLED_BACK.format(number)
    if not path.exists():
        rows = [row for row in jsonl.read_all(Path(run_dir) / METRICS) if row["step"] > step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(path, lambda file: file.write(text.encode()))


def _json_value(value: Any) -> Any:
    """Return None for what JSON has no number for: infinities and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def training_row(result: Any, source_names: Sequence[str]) -> Row:
    """Return the `train/` metrics of a step, and the loss of each source that was in its batch.

    Args:
        result: the `StepResult` of the step.
    """
    row = {
        "train/loss": result.loss,
        "train/perplexity": math.exp(min(result.loss, 700.0)),
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
    }
    if result.auxiliary_loss is not None:
        row["train/auxiliary_loss"] = result.auxiliary_loss
    for name, loss, tokens in zip(
        source_names, result.source_losses, result.source_tokens, strict=True
    ):
        if tokens:
            row[f"data/{name}/loss"] = loss / tokens
    return row


def data_row(
    order: Any,
    source_names: Sequence[str],
    position: int,
    seq_len: int,
    skipped_windows: skipped.Windows = (),
) -> Row:
    """Return how many tokens and epochs of each source the run has consumed.

    Args:
        order: the run's `Order`.
        position: sequences consumed.
        skipped_windows: what the run leaves out of the order.
    """
    row: Row = {}
    if len(order.starts) > 1:
        row["data/stage"] = 1 + order.stage_of(last_sequence(position, skipped_windows))
    drawn = skipped.counts(order, position, skipped_windows).tolist()
    for name, sequences, windows in zip(
        source_names, drawn, order.num_windows.tolist(), strict=True
    ):
        row[f"data/{name}/tokens"] = sequences * seq_len
        row[f"data/{name}/epochs"] = sequences / windows
    return row


def store_row(traffic: Counter[str]) -> Row:
    """Return what came from stores and from the cache; nothing without sources in stores.

    Args:
        traffic: of a `WindowStream`.
    """
    blocks = traffic["hits"] + traffic["fetched"]
    if not blocks:
        return {}
    return {
        "data/store_bytes": traffic["bytes"],
        "data/store_repeats": traffic["repeated"],
        "data/cache_hits": traffic["hits"] / blocks,
    }


def last_sequence(position: int, skipped_windows: skipped.Windows) -> int:
    """Return the number of the last sequence that a run at `position` has consumed."""
    return skipped.sequence_range(0, position, skipped_windows)[1] - 1 if position else 0


def console_line(row: Row, total_steps: int, seconds_left: float) -> str:
    """Format one interval as `key=value`, the same in a terminal and in a log file."""
    parts = [
        f"step={row['step']}/{total_steps}",
        f"tokens={count(row['tokens'])}",
        f"loss={row['train/loss']:.4f}",
        f"lr={row['train/learning_rate']:.3e}",
        f"grad_norm={row['train/grad_norm']:.3f}",
        f"tok/s={count(row['throughput/tokens_per_second'])}",
    ]
    if "throughput/mfu" in row:
        parts.append(f"mfu={row['throughput/mfu']:.1%}")
    parts.append(f"eta={duration(seconds_left)}")
    return " ".join(parts)
