"""`Console`: a run's progress bar and key figures, shown on a terminal below all other output.

If standard output is not a terminal but, for example, a log file or a pipe, there is no bar, and
the run prints plain lines. The bar is drawn at the end of a step, at most five times per second,
without a thread. If drawing fails, the run continues without the bar. First rank only.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from zerolm.common.values import count, duration
from zerolm.parts.metrics import bar_figures
from zerolm.tracking import console_log

DRAW_SECONDS = 0.2
MIN_BAR_WIDTH = 8  # characters; figures are dropped, starting with the last, to leave this room


class Console:
    """The progress bar of a run.

    Args:
        active: whether this is the first rank; False makes every method a no-op.
    """

    def __init__(self, active: bool):
        self._active = active
        self._live: Any = None  # a rich.live.Live while there is a bar
        self._step = self._total_steps = 0
        self._figures: list[str] = []
        self._draw_at = 0.0

    def start(self, step: int, total_steps: int) -> None:
        """Show the bar if standard output is a terminal. Called again after a rollback."""
        if not self._active or not _is_terminal(sys.stdout):
            return
        self._step, self._total_steps = step, total_steps
        if self._live is None:
            self._open()
        self._draw()

    def _open(self) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live

        shown = getattr(sys.stdout, "stream", sys.stdout)  # the bar is not written to rank0.log
        terminal = Terminal(file=shown, force_terminal=True, force_interactive=True)
        self._live = Live(
            self,
            console=terminal,
            auto_refresh=False,  # no thread
            redirect_stdout=False,  # rich would wrap long lines
            redirect_stderr=False,
        )
        sys.stdout = _LinesAboveBar(sys.stdout, terminal, self._give_up)
        if _is_terminal(sys.stderr):
            sys.stderr = _LinesAboveBar(sys.stderr, terminal, self._give_up)
        with self._or_give_up():
            self._live.start()
            terminal.show_cursor()  # rich hides it, and a killed run could not restore it

    def step(self, step: int) -> None:
        """Advance the bar, and redraw it at most every `DRAW_SECONDS`. Takes microseconds."""
        if self._live is not None:
            self._step, self._total_steps = step, max(self._total_steps, step)
            if time.monotonic() >= self._draw_at:
                self._draw()

    def figures(self, row: Mapping[str, Any], total_steps: int, seconds_left: float) -> bool:
        """Show the metrics of a log interval next to the bar; return False if there is no bar."""
        if self._live is None:
            return False
        first, *others = [*bar_figures(row), f"{count(row['tokens'])} tokens"]
        self._figures = [first, f"{duration(seconds_left)} to go", *others]
        self._total_steps = total_steps
        self._draw()
        return True

    def close(self) -> None:
        """Leave the bar on the terminal, and restore the streams."""
        if self._live is not None:
            with self._or_give_up():
                self._live.stop()
            self._give_up()

    def _draw(self) -> None:
        if self._live is not None:
            self._draw_at = time.monotonic() + DRAW_SECONDS
            with self._or_give_up():
                self._live.refresh()

    def __rich_console__(self, terminal: Any, options: Any) -> Iterator[Any]:
        """Render the bar, followed by as many figures as fit."""
        from rich.bar import Bar
        from rich.segment import Segment

        share = self._step / self._total_steps if self._total_steps else 0.0
        left = f"step {self._step:,}/{self._total_steps:,} {share:4.0%} "
        room = options.max_width - 1 - len(left)
        figures = list(self._figures)
        while figures and len(" | ".join(figures)) + 1 + MIN_BAR_WIDTH > room:
            figures.pop()
        right = f" {' | '.join(figures)}" if figures else ""
        width = max(room - len(right), 1)
        (bar,) = terminal.render_lines(Bar(1.0, 0.0, share), options.update(width=width))
        yield Segment(left + "".join(segment.text for segment in bar) + right)

    @contextlib.contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Continue without a bar if rich fails, because rich would retry the same output forever.

        rich fails if the terminal has been closed or its encoding has no block characters.
        """
        try:
            yield
        except Exception:
            self._give_up()
            with contextlib.suppress(Exception):
                print(flush=True)  # ends the line of a partly drawn bar

    def _give_up(self) -> None:
        self._live = None
        if isinstance(sys.stdout, _LinesAboveBar):
            sys.stdout = sys.stdout.finish()
        if isinstance(sys.stderr, _LinesAboveBar):
            sys.stderr = sys.stderr.finish()


class _LinesAboveBar:
    """A stream whose complete lines appear above the bar, unchanged."""

    def __init__(self, stream: TextIO, terminal: Any, give_up: Callable[[], None]):
        self._stream, self._terminal, self._give_up = stream, terminal, give_up
        self._partial, self._pid = "", os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a forked loader worker, which has no bar
            return self._stream.write(text)
        lines, newline, self._partial = (self._partial + text).rpartition("\n")
        if newline:
            from rich.segment import Segment, Segments

            try:
                self._terminal.print(Segments([Segment(lines + newline)]), crop=False)
                console_log.write(lines)
            except Exception:
                self._stream.write(newline + lines + newline)
                self._give_up()
        return len(text)

    def finish(self) -> TextIO:
        """Write the incomplete last line, and return the wrapped stream."""
        with contextlib.suppress(Exception):
            self._stream.write(self._partial)
            self._stream.flush()
        self._partial = ""
        return self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # closed
        return False
