"""`zerolm decode-batch`: print the text of a batch, to find the cause of a spike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zerolm.common.errors import ConfigError
from zerolm.data.quotas import MAX_SEQUENCES
from zerolm.data.window_text import render_window, source_decoder
from zerolm.report.run_order import ids_of_step, open_run


def decode_batch(run_dir: Path, step: int | None, sequences: str | None) -> Iterator[str]:
    """Yield lines that show a batch: the origin and text of each sequence.

    Args:
        run_dir: directory of a run that has started. Relative paths in its `--data` are resolved
            against the current directory.
        step: show this step's batch in the run's current data order; None: use `sequences`.
        sequences: a sequence number, or a range `A-B` that includes A but not B.

    Raises:
        ConfigError: the run, step, sequences or data do not exist; the data has no tokenizer; or
            the data has changed since the run started.
    """
    run = open_run(run_dir)
    notes: list[str] = []
    if step is not None:
        ids, notes = ids_of_step(run, step)
    else:
        ids = _ids_of_range(str(sequences))
    decoders = [source_decoder(source) for source in run.sources]

    def lines() -> Iterator[str]:
        yield from notes
        for row in run.rows(ids):
            yield (
                f"=== sequence {row.sequence}: source {run.names[row.source]}, epoch {row.epoch}, "
                f"window {row.window}, documents {row.parts[0].document} to "
                f"{row.parts[-1].document} ==="
            )
            source = run.sources[row.source]
            yield from render_window(source, row.parts, decoders[row.source])

    return lines()


def _ids_of_range(text: str) -> np.ndarray:
    first, dash, end = text.partition("-")
    try:
        start = int(first)
        stop = int(end) if dash else start + 1
    except ValueError:
        raise ConfigError(
            f"--sequences {text}: neither A-B nor a number. Write for example 232-240 for eight "
            "sequences."
        ) from None
    if not 0 <= start < stop <= MAX_SEQUENCES:
        raise ConfigError(
            f"--sequences {text}: A-B excludes B, so B must be greater than A, and A at least 0. "
            "Write for example 232-240."
        )
    return np.arange(start, stop, dtype=np.int64)
