"""What a run has begun to measure: where that has ended a run twice, it is not begun a third time.

A forward pass that runs out of memory, or a text that hangs, would do so after each restart; a kill
would not. So rank 0 writes down in `evaluation_begun.json` what is begun, before any rank computes,
and removes it at the end. A step at which two starts have ended in an evaluation, whichever, is
given up: the supervisor gives a run up that ends three times at one step. Knows no evaluation.
"""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from zerolm.common.files import write_json
from zerolm.common.run_files import RunFiles

MAX_ENDS = 2  # of starts, in evaluations of one step

Entry = dict[str, Any]  # step, tokens, what


class Begun:
    """The file of a run. Rank 0 alone uses it.

    Attributes:
        failed: what starts of this run have ended in.
    """

    def __init__(self, run_dir: Path):
        self.path = RunFiles(run_dir).evaluation_begun
        self.failed: list[Entry] = []

    def settle(self) -> Entry | None:
        """Return what the last start of the run has ended in, from now on one of `failed`."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            found = {}
        self.failed = found.get("failed", [])
        entry = found.get("begun")
        if entry is not None:
            self.failed = [*self.failed, entry]
            self._write(None)
        return entry

    def given_up(self) -> dict[int, int]:
        """Return the steps at which nothing is begun any more, with the tokens of each."""
        ends = Counter(entry["step"] for entry in self.failed)
        return {
            entry["step"]: entry["tokens"]
            for entry in self.failed
            if ends[entry["step"]] >= MAX_ENDS
        }

    def begin(self, step: int, tokens: int, what: str) -> None:
        """Make durable that something begins."""
        self._write({"step": step, "tokens": tokens, "what": what})

    def end(self) -> None:
        """Say that it has ended, well or not, and the run goes on."""
        self._write(None)

    def _write(self, entry: Entry | None) -> None:
        # On a full disk a failure may come again: but what observes a run does not end it.
        with contextlib.suppress(OSError):
            if entry is None and not self.failed:
                self.path.unlink(missing_ok=True)
            else:
                write_json(self.path, {"begun": entry, "failed": self.failed})
