"""How far a command is: a bar on a terminal, one plain line an interval anywhere else."""

import sys
import time

LINE_SECONDS = 10


class Progress:
    """Count what is done, and show it on standard error.

    Args:
        command: the name to show.
        total_bytes: what all inputs have; None when a hub data set is among them.
    """

    def __init__(self, command: str, total_bytes: int | None):
        self.command, self.total_bytes = command, total_bytes
        self.input_bytes = self.num_documents = self.num_tokens = 0
        self.start = self.shown = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total_bytes, desc=command, unit="B", unit_scale=True)

    def add(self, input_bytes: int, num_documents: int, num_tokens: int = 0) -> None:
        """Add to the counts, and show them when it is time."""
        self.input_bytes += input_bytes
        self.num_documents += num_documents
        self.num_tokens += num_tokens
        if self.bar is not None:
            counts = f"{self.num_documents:,} documents"
            if self.num_tokens:
                counts += f", {self.num_tokens / 1e6:.1f}M tokens"
            self.bar.set_postfix_str(counts, refresh=False)
            self.bar.update(input_bytes)
        elif time.monotonic() - self.shown >= LINE_SECONDS:
            self.shown = time.monotonic()
            self._print_line()

    def _print_line(self) -> None:
        seconds = self.shown - self.start
        words = [f"read_mb={self.input_bytes / 1e6:.1f}"]
        if self.total_bytes:
            words.append(f"of_mb={self.total_bytes / 1e6:.1f}")
        words += [f"documents={self.num_documents}"]
        if self.num_tokens:
            words.append(f"tokens={self.num_tokens}")
        words += [f"seconds={seconds:.0f}"]
        if self.total_bytes and self.input_bytes:
            left = seconds * max(0, self.total_bytes / self.input_bytes - 1)
            words.append(f"seconds_left={left:.0f}")
        print(f"{self.command}: {' '.join(words)}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()
