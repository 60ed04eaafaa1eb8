"""What a run shows on a terminal: one bar with its key figures at the bottom, all else above it.

Where standard output is no terminal (a log file, a pipe) nothing is here: the run then prints its
plain lines. Only the first rank has a bar. It is drawn when a step ends, at most five times a
second, by no thread of its own; whatever fails in it is given up in silence, and training goes on.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from zerolm.values import count, duration

DRAW_SECONDS = 0.2
USUAL_COLUMNS = 80  # of a terminal that does not say how wide it is
SHORTEST_BAR = 8  # characters; figures that leave less room are left out, the last ones first


class Console:
    """The bar of a run, or nothing.

    Args:
        active: this is the first rank.
    """

    def __init__(self, active: bool):
        self._active = active
        self._bar: Any = None
        self._figures: list[str] = []
        self._streams: tuple[TextIO, TextIO] | None = None

    def begin(self, step: int, total_steps: int) -> None:
        """Show the bar if this is a terminal; a run that went back begins again."""
        if not self._active or not _is_terminal(sys.stdout):
            return
        with contextlib.suppress(Exception):
            if self._bar is None:
                self._open(total_steps)
            self._bar.n, self._bar.total = step, total_steps
            self._draw()

    def _open(self, total_steps: int) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread
        tqdm.set_lock(threading.RLock())  # and no semaphore of the machine
        self._bar = tqdm(
            total=total_steps,
            file=sys.stdout,
            ncols=USUAL_COLUMNS,
            nrows=2,  # a terminal that says it has none gets its bar too
            mininterval=DRAW_SECONDS,
            bar_format=" ",
        )
        self._streams = sys.stdout, sys.stderr
        sys.stdout = _Above(sys.stdout, self._bar)
        if _is_terminal(sys.stderr):
            sys.stderr = _Above(sys.stderr, self._bar)

    def step(self, step: int) -> None:
        """Move the bar on, and draw it if that was not done just now."""
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.total = max(self._bar.total, step)  # refused ones come on top
                self._compose()
                self._bar.update(step - self._bar.n)

    def figures(self, row: Mapping[str, Any], total_steps: int, seconds_left: float) -> bool:
        """Show the figures of an interval; False when there is no bar to show them."""
        if self._bar is None:
            return False
        shown = [f"{duration(seconds_left)} to go"]
        for key, text in (
            ("train/loss", "loss {:.4f}"),
            ("throughput/tokens_per_second", "{} tok/s"),
            ("throughput/mfu", "MFU {:.1%}"),
            ("train/grad_norm", "grad {:.3g}"),
            ("train/learning_rate", "lr {:.2e}"),
        ):
            if (value := row.get(key)) is not None:
                shown.append(text.format(count(value) if "second" in key else value))
        shown.insert(1, shown.pop(0))
        shown.append(f"{count(row['tokens'])} tokens")
        self._figures = shown
        with contextlib.suppress(Exception):
            self._bar.total = total_steps
            self._draw()
        return True

    def _compose(self) -> None:
        """Put as many figures beside the bar as there is room for."""
        bar = self._bar
        share = bar.n / bar.total if bar.total else 0.0
        left = f"step {bar.n:,}/{bar.total:,} {share:4.0%} "
        bar.ncols = width = (os.get_terminal_size(bar.fp.fileno()).columns or USUAL_COLUMNS) - 1
        figures = list(self._figures)
        while figures and len(left) + len(" | ".join(figures)) + SHORTEST_BAR + 2 > width:
            figures.pop()
        right = f" {' | '.join(figures)}" if figures else ""
        bar.bar_format = left + "{bar}" + right

    def _draw(self) -> None:
        self._compose()
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is, and give the terminal back."""
        if self._bar is None:
            return
        with contextlib.suppress(Exception):
            self._draw()
            self._bar.close()
        self._bar = None
        if self._streams is not None:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Above):
                    stream.finish()
            sys.stdout, sys.stderr = self._streams


class _Above:
    """A stream whose whole lines appear above the bar."""

    def __init__(self, stream: TextIO, bar: Any):
        self._stream, self._bar, self._rest, self._pid = stream, bar, "", os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a loader worker was forked: the bar is not its own
            return self._stream.write(text)
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            with self._bar.get_lock():
                with contextlib.suppress(Exception):
                    self._bar.clear(nolock=True)
                self._stream.write(lines + newline)
                self._stream.flush()
                with contextlib.suppress(Exception):
                    self._bar.refresh(nolock=True)
        return len(text)

    def finish(self) -> None:
        """Write what has no end of line."""
        with contextlib.suppress(Exception):
            self._stream.write(self._rest)
            self._stream.flush()
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # closed
        return False
