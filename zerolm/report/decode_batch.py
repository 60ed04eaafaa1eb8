"""The text of a batch that a run has seen: for people who want to know what made a spike.

Comes after training, or beside it. zerolm/run_order.py says what a batch holds. No torch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zerolm.errors import ConfigError
from zerolm.excerpts import decoder_of, render
from zerolm.order import MAX_SEQUENCES
from zerolm.run_order import ids_of_step, open_run


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
    run = open_run(run_dir)
    notes: list[str] = []
    if step is not None:
        ids, notes = ids_of_step(run, step)
    else:
        ids = _ids_of_range(str(sequences))
    decoders = [decoder_of(source) for source in run.sources]

    def lines() -> Iterator[str]:
        yield from notes
        for row in run.rows(ids):
            yield (
                f"=== sequence {row.sequence}: source {run.names[row.source]}, epoch {row.epoch}, "
                f"window {row.window}, documents {row.parts[0].document} to "
                f"{row.parts[-1].document} ==="
            )
            yield from render(row.parts, decoders[row.source])

    return lines()


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
