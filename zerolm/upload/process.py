"""`Uploads`: copies a run's published checkpoints to `--upload_to URL` in the background.

The first rank polls for new checkpoints and starts `zerolm upload RUN_DIR URL`, a process that
sends the missing files and exits. The process logs its own events, and its failures never end the
run.
"""

import contextlib
import time
from functools import partial
from pathlib import Path
from shlex import quote

from zerolm.checkpoint.directory import published_checkpoints
from zerolm.common.child import Child
from zerolm.common.store import OFF
from zerolm.distributed.collectives import print_safely
from zerolm.run_dir import events
from zerolm.run_dir.files import MANIFEST, RunFiles
from zerolm.watchdog.progress import record_progress

POLL_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 10.0  # after a failed upload


class Uploads:
    """Starts the upload process whenever there is a checkpoint to send. Only `finish` blocks.

    Args:
        url: URL of the store; None or "off" makes every method a no-op.
        keep: number of checkpoints to keep in the store; 0 keeps all.
        active: whether this is the first rank; False makes every method a no-op.
    """

    def __init__(self, run_dir: Path, url: str | None, keep: int, active: bool):
        self.run_dir, self.url, self.keep = Path(run_dir), url, keep
        self.active = active and url not in (None, OFF)
        self._child = Child(
            "upload", run_dir, url, "--keep", keep,
            supervised=True, first_pause_seconds=FIRST_PAUSE_SECONDS,
        )  # fmt: skip
        self._poll_at = 0.0
        self._sending: set[tuple[str, int]] = set()
        self._sent: set[tuple[str, int]] = set()

    def tick(self) -> None:
        """Start the upload process if there is a checkpoint to send. Takes microseconds."""
        now = time.monotonic()
        if not self.active or now < self._poll_at:
            return
        self._poll_at = now + POLL_SECONDS
        self._check(self._child.poll())
        if self._child.due():
            self._start()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the uploads, and report checkpoints that were not sent.

        A failed upload is not repeated, since the upload process itself makes several attempts.
        """
        if not self.active:
            return
        deadline = time.monotonic() + seconds
        if not self._child.running:
            self._start()
        while self._check(self._child.wait(deadline, waiting=partial(record_progress, "end"))):
            self._start()  # a checkpoint may have been published during the upload
        self._child.kill()  # safe, since the next upload sends only missing files
        missing = sorted(name for name, _ in self._published() - self._sent)
        if missing:
            step = int(missing[-1].rpartition("-")[2])
            with contextlib.suppress(OSError):
                events.append_event(
                    self.run_dir, "upload_unfinished", step, url=self.url, checkpoints=missing
                )
            print_safely(
                f"upload: not sent to {self.url} by the end of the run: {', '.join(missing)}. The "
                f"next start of this run will send them; or run: "
                f"zerolm upload {quote(str(self.run_dir))} {quote(str(self.url))}"
            )

    def _published(self) -> set[tuple[str, int]]:
        """Return {(name, mtime of the manifest in ns)} for the checkpoints to keep in the store."""
        published = set()
        checkpoints = published_checkpoints(RunFiles(self.run_dir).checkpoints)
        for directory in checkpoints[-self.keep :] if self.keep else checkpoints:
            with contextlib.suppress(FileNotFoundError):  # rotated away in the meantime
                published.add((directory.name, (directory / MANIFEST).stat().st_mtime_ns))
        return published

    def _start(self) -> None:
        """Start the upload process unless all checkpoints have been sent."""
        published = self._published()
        if not published - self._sent:
            return
        try:
            self._child.start()
        except OSError as error:
            print_safely(f"upload: cannot start the uploader; training continues: {error}")
        self._sending = published

    def _check(self, code: int | None) -> bool:
        """Record which checkpoints were sent, if an upload process has succeeded.

        Args:
            code: the process's exit code; None if no process has exited.

        Returns:
            Whether the upload succeeded.
        """
        if code != 0:
            return False
        self._sent = self._sending
        return True
