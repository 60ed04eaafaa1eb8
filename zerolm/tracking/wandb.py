"""A W&B run as a copy of a run directory: rows, checkpoints as references, samples, alerts.

Knows W&B, and of training only what stands in the files. May wait for W&B's servers as long as they
like, and raises whatever W&B raises: `zerolm.mirror`, which calls it, bounds the one and bears the
other.
"""

import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zerolm import alerts, wandb_files
from zerolm.files import write_json
from zerolm.machine import has_wandb_key, told_wandb_mode

INIT_SECONDS, FINISH_SECONDS = 30, 15
NUMBERS = 100  # of W&B's steps for each step of training: its rows from 0, its samples the last
MEMORY = "run.json"  # below wandb/: the id of the W&B run
SAMPLE_COLUMNS = ("step", "tokens", "prompt_number", "prompt", "text", "seed", "temperature")

Row = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """How a W&B run is found: what W&B calls it. `mode` is auto, online or offline."""

    mode: str
    project: str
    entity: str | None
    group: str
    name: str
    tags: tuple[str, ...]


def identity(run_dir: Path, settings: Row, suffix: str = "") -> Identity:
    """Return what the settings in run.json say of the W&B run.

    Args:
        suffix: of its name, for another run of the group.
    """
    name = settings.get("wandb_name") or run_dir.resolve().name
    tags = (settings.get("wandb_tags") or "").split(",")
    return Identity(
        mode=settings.get("wandb") or "auto",
        project=settings.get("wandb_project") or "zerolm",
        entity=settings.get("wandb_entity"),
        group=settings.get("wandb_group") or name,
        name=name + suffix,
        tags=tuple(tag.strip() for tag in tags if tag.strip()),
    )


def mode_of(mode: str) -> str:
    """Return `online` or `offline` for `auto`: as W&B was told, else by whether it has a key.

    Where W&B was told `disabled`, nothing is sent: a run has no W&B tracker then, `wandb-sync`
    writes files.
    """
    if mode != "auto":
        return mode
    told = told_wandb_mode()
    if told:
        return "online" if told == "online" else "offline"
    return "online" if has_wandb_key() else "offline"


def close() -> None:
    """End W&B's own process, if this one has started one, and use no other process's."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # its address: a run of one id may be in it already


class WandbTracker:
    """A W&B run that mirrors a run directory, one id over all its starts.

    A rollback begins another W&B run of the same group, which has every row of `metrics.jsonl`: W&B
    keeps what it has got, so the rows of steps that are taken again, on other data, would stand
    between those that were rolled back. The run before keeps those.

    Rows are numbered by W&B's step, which follows from the training step alone and grows from row
    to row: a step that is taken again has the same numbers, on any machine. So the newest number of
    W&B's server says which rows it has. Offline, every start writes a file of its own that has
    everything from the first row, in place of those before.

    Args:
        of_process: whose memory and threads W&B is to show among its system metrics.
        fresh: for `wandb-sync`: a W&B run of its own, which is not gone on with; no alerts.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        of_process: int | None = None,
        fresh: Identity | None = None,
        fresh_id: str | None = None,
    ):
        self.run_dir, self.of_process = Path(run_dir), of_process
        self.config: Row = json.loads((self.run_dir / "run.json").read_text())
        self.settings: Row = self.config["settings"]
        self.where = ""
        self.live = fresh is None
        path = self.run_dir / "rollbacks.json"
        done = json.loads(path.read_text())["rollbacks"] if path.is_file() else []
        self.rollbacks, self._rolled_back = len(done), 0
        suffix = f"-rollback-{self.rollbacks}" if done else ""
        self.identity = fresh or identity(self.run_dir, self.settings, suffix)
        self.identity = replace(self.identity, mode=mode_of(self.identity.mode))
        self.run_id = fresh_id or uuid.uuid4().hex[:8] if fresh else self._remembered_id()
        self.run: Any = None
        self._first = 0  # number that W&B's server has not
        self._number = -1  # of the newest row
        self._told: set[str] = set()  # texts of alerts, names of checkpoints
        self._older: list[Path] = []  # files of earlier starts
        self._table: Any = None
        self._texts: set[tuple[int, int]] = set()
        self._waiting: list[Row] = []  # samples, until a row of a later step comes
        self._mfu, self._limit = alerts.LowMfu(), alerts.Limit()

    def _remembered_id(self) -> str:
        """Return the id that earlier starts have used since the last rollback, or a new one."""
        with contextlib.suppress(OSError, ValueError):
            old = json.loads((self.run_dir / "wandb" / MEMORY).read_text())
            if old.get("id") and old.get("rollbacks", 0) == self.rollbacks:
                return old["id"]
        return uuid.uuid4().hex[:8]

    # ---- What zerolm.mirror calls

    def open(self) -> None:
        """Begin or go on with the W&B run."""
        directory = self.run_dir / "wandb"
        directory.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_DATA_DIR", str((directory / "data").resolve()))
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        mode: Any = self.identity.mode
        known = wandb_files.Told(set(), set())
        self._older = wandb_files.files_of(self.run_dir, self.run_id)
        if self.live:
            write_json(directory / MEMORY, {"id": self.run_id, "rollbacks": self.rollbacks})
            if mode == "online":
                known = wandb_files.told(self.run_dir, self.run_id)
        self._told = known.alerts | known.artifacts
        close()
        self.run = wandb.init(
            project=self.identity.project,
            entity=self.identity.entity,
            group=self.identity.group,
            name=self.identity.name,
            tags=list(self.identity.tags) or None,
            id=self.run_id,
            resume="allow" if mode == "online" and self.live else None,
            dir=str(self.run_dir),
            mode=mode,
            config=self.config,
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                console="off",
                x_stats_pid=self.of_process or os.getpid(),
            ),
        )
        self.run.define_metric("tokens")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="tokens")
        self.run.define_metric("eval/loss", step_metric="tokens", summary="min,last")
        if mode == "online" and self.live:
            self._first = self.run.starting_step
        if mode == "online":
            self.where = self.run.url or f"online, run {self.run.id}"
        else:
            self.where = f"offline in {directory} (send with: wandb sync {directory})"

    def wants(self, row: Row) -> bool:
        """Tell whether W&B lacks a row; called once for each of all, in their order."""
        if self._waiting and self._waiting[0]["step"] < row["step"]:
            self._put_samples(row["step"])
        self._number = max(row["step"] * NUMBERS, self._number + 1)
        return self._number >= self._first

    def log(self, row: Row) -> None:
        """Send one row."""
        self.run.log(row, step=self._number, commit=True)
        if self.live and (alert := self._mfu.judge(row)):
            self._alert(alert, time.time())

    def samples(self, rows: list[Row]) -> None:
        """Take in samples, to send those of each step after its rows.

        They must come before the first row of a later step: W&B takes no number after a higher one.
        """
        for row in rows:
            _ = row["tokens"]  # what lacks it is told here, and ends nothing later
            key = row["step"], row["prompt_number"]
            if key not in self._texts:  # not generated again after a resume
                self._texts.add(key)
                if _samples_number(row["step"]) >= self._first:  # else W&B's table has it
                    self._waiting.append(row)

    def _put_samples(self, step: int | None = None) -> None:
        """Send the samples of the steps before `step`, of all without one, as one growing table."""
        import wandb

        while self._waiting and (step is None or self._waiting[0]["step"] < step):
            first = self._waiting[0]
            if self._table is None:
                self._table = wandb.Table(
                    columns=list(SAMPLE_COLUMNS), log_mode="INCREMENTAL", allow_mixed_types=True
                )
            while self._waiting and self._waiting[0]["step"] == first["step"]:
                row = self._waiting.pop(0)
                self._table.add_data(*(row.get(name) for name in SAMPLE_COLUMNS))
            content = {"step": first["step"], "tokens": first["tokens"], "samples": self._table}
            self.run.log(content, step=_samples_number(first["step"]), commit=True)

    def event(self, event: Row) -> None:
        """Tell of an event what is to be told, unless an earlier start has.

        What came before the last rollback is told by the W&B run of that time.
        """
        if event.get("event") == "rollback":
            self._rolled_back = event.get("number", 0)
        if self.live and self._rolled_back != self.rollbacks:
            return
        if event.get("event") in ("checkpoint", "upload"):
            self._reference(event)
        alert = alerts.of_event(event) if self.live else None
        if alert is not None:
            self._alert(alert, _seconds(event))

    def flush(self) -> None:
        """Note that this start has caught up. W&B's process writes by itself."""
        if self._older:
            wandb_files.supersede(self._older)
            self._older = []

    def finish(self, exit_code: int) -> None:
        """Send the rest, and end the W&B run.

        Raises:
            TimeoutError: W&B did not take all within its time.
        """
        self._put_samples()
        self.run.finish(exit_code=exit_code)
        self.flush()
        close()  # offline, its process is still writing the file until it ends

    # ---- More than rows

    def _alert(self, alert: alerts.Alert, when: float) -> None:
        if alert.text not in self._told and self._limit.allows(alert, when):
            self.run.alert(
                f"{self.identity.name[:40]}: {alert.title}",
                alert.text,
                level=alert.level,
                wait_duration=alerts.SAME_TITLE_SECONDS,
            )

    def _reference(self, event: Row) -> None:
        """Log a checkpoint as a reference: where it is, what it is, none of its bytes."""
        import wandb

        uploaded = self.settings.get("upload_to") not in (None, "off")
        if uploaded != (event["event"] == "upload"):
            return  # of the two places, the one that lasts
        name = event["checkpoint"]
        if name in self._told:
            return
        path = (self.run_dir / "checkpoints" / name).resolve()
        try:
            manifest = json.loads((path / "MANIFEST.json").read_text())
        except (OSError, ValueError):  # it was removed since
            return
        url = f"{event['url'].rstrip('/')}/{name}" if uploaded else path.as_uri()
        progress = manifest.get("progress", {})
        artifact = wandb.Artifact(
            f"checkpoint-{self.run.id}",
            type="checkpoint",
            metadata={
                "url": url,
                "step": event["step"],
                "tokens": progress.get("tokens"),
                "digest": manifest.get("digest"),
                "world_size": manifest.get("world_size"),
                "zero_stage": manifest.get("zero_stage"),
            },
        )
        try:
            artifact.add_reference(url, name=name, checksum=False)
        except Exception:  # W&B wants a library of the store's; the metadata name it
            artifact.add_reference(path.as_uri(), name=name, checksum=False)
        self.run.log_artifact(artifact, aliases=["latest", name])


def _samples_number(step: int) -> int:
    return step * NUMBERS + NUMBERS - 1


def _seconds(event: Row) -> float:
    """Return when an event was written, in seconds since the epoch; now, if it does not say."""
    try:
        return datetime.strptime(event["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, ValueError):
        return time.time()
