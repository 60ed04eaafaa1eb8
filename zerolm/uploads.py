"""The run's part in `--upload_to URL`: keep one child busy while there is something to send.

Now and then the first rank looks whether a checkpoint was published, and starts a process of low
priority, `python -m zerolm upload RUN_DIR URL`, that sends it and ends (zerolm/uploader.py). All
that can be slow or broken is over there. It writes its own events; nothing of it ends a run.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from zerolm import events, pulse
from zerolm.checkpoint_directory import MANIFEST, by_step
from zerolm.distributed import tell
from zerolm.object_store import OFF

LOOK_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 600.0


class Uploads:
    """Starts the uploader when there is work for it. No call waits, but `finish`.

    Args:
        url: of the store; None or "off" makes every method a no-op, as `active` False does.
        keep: checkpoints to keep in the store, 0 for all.
        active: on the first rank only.
    """

    def __init__(self, run_dir: Path, url: str | None, keep: int, active: bool):
        self.run_dir, self.url, self.keep = Path(run_dir), url, keep
        self.active = active and url not in (None, OFF)
        self._child: subprocess.Popen[bytes] | None = None
        self._look_at = self._start_at = 0.0
        self._pause = FIRST_PAUSE_SECONDS
        self._sending: set[tuple[str, int]] = set()
        self._sent: set[tuple[str, int]] = set()

    def poke(self) -> None:
        """Start a child if there is something to send and none is at it. Takes microseconds."""
        now = time.monotonic()
        if not self.active or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        self._reap()
        if self._child is None and now >= self._start_at:
            self._start()

    def finish(self, seconds: float) -> None:
        """Send what is left, for so long, and say what is not in the store by then.

        A pass that fails is not repeated: its own attempts were the chance.
        """
        if not self.active:
            return
        deadline = time.monotonic() + seconds
        if self._child is None:
            self._start()
        while self._child is not None and time.monotonic() < deadline:
            time.sleep(0.05)
            pulse.beat("end")  # to wait here is not to hang
            if self._reap() == 0:
                self._start()  # what was published after the last pass began
        if self._child is not None:
            self._child.kill()  # what it has sent stays sent: the next one goes on from there
            self._child.wait()
        left = sorted(name for name, _ in self._published() - self._sent)
        if left:
            step = int(left[-1].rpartition("-")[2])
            with contextlib.suppress(OSError):
                events.append(
                    self.run_dir, "upload_unfinished", step, url=self.url, checkpoints=left
                )
            tell(
                f"upload: not in {self.url} at the end: {', '.join(left)}. The next start of this "
                f"run sends what is missing, or: python -m zerolm upload {self.run_dir} {self.url}"
            )

    def _published(self) -> set[tuple[str, int]]:
        """Return what there is to send: names, and when their manifests were written."""
        found = set()
        wanted = by_step(self.run_dir / "checkpoints")
        for directory in wanted[-self.keep :] if self.keep else wanted:
            with contextlib.suppress(FileNotFoundError):  # rotated away under our eyes
                found.add((directory.name, (directory / MANIFEST).stat().st_mtime_ns))
        return found

    def _start(self) -> None:
        """Start a child unless everything is sent."""
        published = self._published()
        if not published - self._sent:
            return
        words = [sys.executable, "-m", "zerolm", "upload", str(self.run_dir), str(self.url)]
        words += ["--keep", str(self.keep), "--of_process", str(os.getpid())]
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            self._child = subprocess.Popen(
                words, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL
            )
        except OSError as error:  # no memory for a process: training goes on
            tell(f"upload: cannot start its process, training goes on: {error}")
            self._start_at = time.monotonic() + LONGEST_PAUSE_SECONDS
        self._sending = published

    def _reap(self) -> int | None:
        """Return the exit code of a child that has ended, and set when the next may start."""
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return None
        self._child = None
        if code == 0:
            self._sent, self._pause = self._sending, FIRST_PAUSE_SECONDS
        else:
            self._start_at = time.monotonic() + self._pause
            self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause)
        return code
