"""Find a training window by its sequence number, as training would. zerolm/excerpts.py shows it."""

import numpy as np

from zerolm.errors import ConfigError
from zerolm.order import Order, num_windows
from zerolm.shards import Source


def find_window(source: Source, sequence: int, seq_len: int, seed: int | None) -> tuple[int, int]:
    """Return (window, epoch) of a sequence.

    Without a seed `sequence` is the window itself; with one it is a sequence number of a run on
    this source alone, and zerolm.order says which window that is.

    Raises:
        ConfigError: a sequence that does not exist.
    """
    count = num_windows(source.num_tokens, seq_len)
    if count == 0:
        raise ConfigError(
            f"{source.directory}: {source.num_tokens} tokens are not one window of --seq_len "
            f"{seq_len}, which needs {seq_len + 1}. Choose a smaller --seq_len."
        )
    if seed is not None:
        place = Order([count], [1.0], seed)(np.array([sequence]))
        return int(place.window[0]), int(place.epoch[0])
    if sequence >= count:
        raise ConfigError(
            f"--sequence {sequence}: {source.directory} has {count:,} windows of --seq_len "
            f"{seq_len}, numbered from 0. Choose a smaller one, or give the --seed of a run."
        )
    return sequence, 0
