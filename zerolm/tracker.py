"""W&B as a copy of `metrics.jsonl`: bounded in time, whatever its servers do. First rank only.

Knows W&B and nothing of training. Its errors are the caller's to catch: no tracker ends a run.
"""

import json
import os
from pathlib import Path
from typing import Any

from zerolm.files import write_atomically
from zerolm.machine import has_wandb_key

# Of waiting for W&B's servers: without the second, a run whose network went down waits for days.
WANDB_INIT_SECONDS, WANDB_FINISH_SECONDS = 30, 30

Row = dict[str, Any]


class WandbTracker:
    """A W&B run that mirrors `metrics.jsonl`, one id over all starts of a run directory.

    A rollback begins another one, in the same group: W&B keeps what it has got, so the rows of
    steps that are taken again, on other data, would stand between those that were rolled back.

    Rows carry `tokens` and `step` as values (`define_metric`), never W&B's own step: a row whose
    own step does not grow is dropped by W&B, which is what a resume would run into.
    """

    def __init__(
        self, run_dir: Path, settings: Any, config: Row, written: list[Row], rollbacks: int
    ):
        import wandb

        mode = settings.wandb
        if mode == "auto":
            mode = "online" if has_wandb_key() else "offline"
        directory = run_dir / "wandb"
        directory.mkdir(exist_ok=True)
        memory = directory / "run.json"
        saved = json.loads(memory.read_text()) if memory.is_file() else {}
        if saved.get("rollbacks", 0) != rollbacks:
            saved, written = {}, []
        self.sent_step: int = saved.get("sent_step", -1)
        self.sent_keys = set(saved.get("sent_keys", ()))
        for row in written:
            if row["step"] > self.sent_step:
                self.sent_step, self.sent_keys = row["step"], set()
            if row["step"] == self.sent_step:
                self.sent_keys.update(row)
        os.environ.setdefault("WANDB_SILENT", "true")

        def begin(mode: Any) -> Any:
            return wandb.init(
                project=settings.wandb_project,
                group=settings.wandb_group or run_dir.name,
                name=run_dir.name + (f"-rollback-{rollbacks}" if rollbacks else ""),
                id=saved.get("id"),
                resume="allow" if saved.get("id") and mode == "online" else None,
                dir=str(run_dir),
                mode=mode,
                config=config,
                settings=wandb.Settings(
                    init_timeout=WANDB_INIT_SECONDS,
                    finish_timeout=WANDB_FINISH_SECONDS,
                    finish_timeout_raises=True,
                    console="off",
                ),
            )

        self.failure = ""
        try:
            self.run = begin(mode)
        except Exception as error:
            if mode != "online":
                raise
            self.failure = " ".join(repr(error).split())
            self.run = begin("offline")
        self.run.define_metric("tokens")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="tokens")
        self.where = self.run.url or f"offline in {directory} (send with: wandb sync)"
        if self.failure:
            self.where += f"; online failed: {self.failure[:200]}"
        what = {
            "id": self.run.id,
            "rollbacks": rollbacks,
            "sent_step": self.sent_step,
            "sent_keys": sorted(self.sent_keys),
        }
        write_atomically(memory, lambda file: file.write(json.dumps(what).encode()))

    def log(self, row: Row) -> None:
        """Mirror one row, unless an earlier start of the run has sent it already."""
        if row["step"] < self.sent_step:
            return
        if row["step"] == self.sent_step and self.sent_keys.issuperset(row):
            return
        self.run.log(row)

    def finish(self) -> None:
        """Flush and end the W&B run.

        Raises:
            TimeoutError: W&B did not take all within its time. Its files have what it lacks.
        """
        self.run.finish()
