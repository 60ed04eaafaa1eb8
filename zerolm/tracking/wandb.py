"""`WandbTracker`: copy rows, checkpoint references, samples and alerts from a run to W&B.

Reads only the files in the run directory. Methods may block, and may raise any exception that W&B
raises; `Mirror` handles both.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.files import write_json
from zerolm.common.records import read_record
from zerolm.config.settings import Settings
from zerolm.run_dir.files import MANIFEST, TRACKER_STATE
from zerolm.run_dir.records import read_rollbacks, read_run_json
from zerolm.tracking import alerts, wandb_environment, wandb_files
from zerolm.tracking.tracker import Row, Tracker
from zerolm.tracking.wandb_identity import (
    Identity,
    TrackerState,
    has_key,
    identity,
    mode_variable,
    resolve_mode,
)

INIT_SECONDS, FINISH_SECONDS = 30, 15
STEP_NUMBERS = 100  # W&B steps per training step; rows use the first of them, samples the last
SAMPLE_COLUMNS = ("step", "tokens", "prompt_number", "prompt", "text", "seed", "temperature")


def close() -> None:
    """Stop W&B's service process if this process started it; otherwise disconnect from it."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()
    os.environ.pop(
        "WANDB_SERVICE", None
    )  # the address of a service that may already have a run with this id


class _Manifest(TypedDict):
    progress: dict[str, Any]
    digest: str


class WandbTracker(Tracker):
    """A W&B run that mirrors a run directory, with the same id for all starts of the run.

    A rollback starts another W&B run in the same group, with every row in metrics.jsonl. W&B cannot
    delete rows, so rows from repeated steps, which use other data, would otherwise be mixed with
    rows from the steps that were rolled back. Those remain in the earlier W&B run.

    A row's number (W&B's step) depends only on the training step, and increases from row to row. A
    repeated step has the same numbers on any machine, so the newest number on W&B's server shows
    which rows the server has. Offline, every start writes a file with all rows, which replaces the
    files from earlier starts.

    Args:
        of_process: ID of the process whose memory and threads W&B shows as system metrics.
        separate: identity of a W&B run created by `wandb-sync`, which is never resumed and sends no
            alerts.
        separate_id: id of the W&B run created by `wandb-sync`; None creates a new id.
    """

    state_files = (TRACKER_STATE,)

    def __init__(
        self,
        run_dir: Path,
        of_process: int | None = None,
        *,
        separate: Identity | None = None,
        separate_id: str | None = None,
    ):
        super().__init__(run_dir, of_process)
        self.directory = self.files.tracker("wandb")
        self.config: Row = read_run_json(run_dir)
        self.settings: Row = self.config.get("settings", {})
        self.live = separate is None
        rollbacks = read_rollbacks(run_dir)
        # Not the number of rollbacks, because a branch continues its trunk's numbering.
        self.num_rollbacks = rollbacks[-1]["number"] if rollbacks else 0
        self._last_rollback = 0
        suffix = f"-rollback-{self.num_rollbacks}" if rollbacks else ""
        self.identity = separate or identity(self.run_dir, self.config, suffix)
        self.identity = replace(self.identity, mode=resolve_mode(self.identity.mode))
        self.run_id = self._saved_id() if self.live else separate_id or new_id()
        self.run: Any = None
        self._first = 0  # lowest number missing on W&B's server
        self._number = -1  # number of the newest row
        self._logged: set[str] = set()  # texts of alerts and names of checkpoints already logged
        self._earlier_files: list[Path] = []
        self._table: Any = None
        self._sample_keys: set[tuple[int, int]] = set()  # (step, prompt number)
        self._waiting: list[Row] = []  # samples to log before the first row of a later step
        self._mfu, self._limit = alerts.LowMfuDetector(), alerts.RateLimit()

    def _saved_id(self) -> str:
        """Return the id used by earlier starts since the last rollback, or a new id."""
        with contextlib.suppress(RecordError):
            state = read_record(self.directory / TRACKER_STATE, TrackerState)
            if state is not None and state.get("rollbacks", 0) == self.num_rollbacks:
                return state["id"]
        return new_id()

    def _save_state(self, url: str | None = None) -> None:
        """Record which W&B run the next start continues, and that run's URL for the report."""
        if self.live:
            state = {"id": self.run_id, "rollbacks": self.num_rollbacks}
            write_json(self.directory / TRACKER_STATE, state | ({"url": url} if url else {}))

    # ---- Called in the run

    @classmethod
    def is_enabled(cls, value: Any) -> bool:
        return value != "off" and not (value == "auto" and mode_variable() == "disabled")

    @classmethod
    def problems(cls, name: str, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        if settings.wandb != "online" or has_key(environment):
            return []
        return [
            f"{settings.where(name)}: online, but no key is configured. Run wandb login, "
            f"set WANDB_API_KEY, or use --wandb offline."
        ]

    @classmethod
    def resolve(cls, settings: Settings, environment: Mapping[str, str]) -> Settings:
        return wandb_environment.with_environment(settings, environment)

    @classmethod
    def value_problems(cls, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        mode = resolve_mode(settings.wandb, environment)
        return wandb_environment.problems(settings, environment, mode)

    @classmethod
    def notices(cls, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        mode = resolve_mode(settings.wandb, environment)
        names = wandb_environment.NAMES
        used = {name: (settings.where(name), getattr(settings, name)) for name in names}
        return wandb_environment.notices(environment, used, mode)

    @classmethod
    def repair(cls, run_dir: Path) -> str:
        return f"metrics.jsonl is complete; send it with: zerolm wandb-sync {quote(str(run_dir))}"

    # ---- Called in the tracker's process

    def open(self) -> None:
        """Start or resume the W&B run."""
        self.directory.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_DATA_DIR", str((self.directory / "data").resolve()))
        os.environ.setdefault("WANDB_SILENT", "true")
        for variable in wandb_environment.REPLACED:
            os.environ.pop(variable, None)
        # Disable telemetry, which W&B sends to its developers even offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = self.identity.mode
        resumable = mode == "online" and self.live
        self._earlier_files = wandb_files.files_of(self.run_dir, self.run_id)
        self._logged = set()
        self._save_state()
        if resumable:
            self._logged = wandb_files.logged(self.run_dir, self.run_id)
        close()
        self.run = wandb.init(
            project=self.identity.project or wandb.setup().settings.project or "zerolm",
            entity=self.identity.entity,
            group=self.identity.group,
            name=self.identity.name,
            tags=list(self.identity.tags) or None,
            id=self.run_id,
            resume="allow" if resumable else None,
            dir=str(self.run_dir),
            mode=mode,
            config=self.config,
            settings=wandb.Settings(
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_SECONDS)),
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
        if resumable:
            self._first = self.run.starting_step
        if mode == "online":
            self.where = self.run.url or f"online, run {self.run.id}"
            self._save_state(url=self.run.url)
        else:
            self.where = f"offline in {self.directory} (send with: wandb sync {self.directory})"

    def lacks(self, row: Row) -> bool:
        if self._waiting and self._waiting[0]["step"] < row["step"]:
            self._log_samples(before=row["step"])
        self._number = max(row["step"] * STEP_NUMBERS, self._number + 1)
        return self._number >= self._first

    def log(self, row: Row) -> None:
        self.run.log(row, step=self._number, commit=True)
        if self.live and (alert := self._mfu.check(row)):
            self._alert(alert, time.time())

    def samples(self, rows: list[Row]) -> None:
        """Hold samples back until all rows from the same step have been logged.

        W&B rejects numbers lower than an earlier number, so samples must be logged before rows from
        later steps.
        """
        for row in rows:
            _ = row[
                "tokens"
            ]  # a line without this key must fail here, where only this line is skipped
            key = row["step"], row["prompt_number"]
            if key not in self._sample_keys:  # a resumed run writes samples again
                self._sample_keys.add(key)
                if (
                    _samples_number(row["step"]) >= self._first
                ):  # otherwise W&B's table already has it
                    self._waiting.append(row)

    def _log_samples(self, before: int | None = None) -> None:
        """Log the samples from steps before `before` (None: all samples) as one table.

        The table grows: each version contains the samples from all steps so far.
        """
        import wandb

        while self._waiting and (before is None or self._waiting[0]["step"] < before):
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
        """Send an event's alert or checkpoint reference, unless an earlier start has sent it.

        Events before the last rollback belong to the earlier W&B run.
        """
        if event.get("event") == "rollback":
            self._last_rollback = event.get("number", 0)
        if self.live and self._last_rollback != self.num_rollbacks:
            return
        if event.get("event") in ("checkpoint", "upload"):
            self._log_reference(event)
        alert = alerts.of_event(event) if self.live else None
        if alert is not None:
            self._alert(alert, _seconds(event))

    def flush(self) -> None:
        """Retire files from earlier starts, because the file from this start contains all rows."""
        if self._earlier_files:
            wandb_files.retire(self._earlier_files)
            self._earlier_files = []

    def finish(self, exit_code: int) -> None:
        """Send all remaining data, and end the W&B run.

        Raises:
            TimeoutError: W&B did not accept everything within `FINISH_SECONDS`.
        """
        self._log_samples()
        self.run.finish(exit_code=exit_code)
        self.flush()
        close()  # offline, the service process writes the file until it ends

    # ---- Alerts and checkpoints

    def _alert(self, alert: alerts.Alert, when: float) -> None:
        """Send an alert, unless it was already sent or the rate limit is reached."""
        if alert.text not in self._logged and self._limit.allows(alert, when):
            self.run.alert(
                f"{self.identity.name[:40]}: {alert.title}",
                alert.text,
                level=alert.level,
                wait_duration=alerts.SAME_TITLE_SECONDS,
            )

    def _log_reference(self, event: Row) -> None:
        """Log a checkpoint's URL and metadata as an artifact, without uploading its files."""
        import wandb

        uploaded = self.settings.get("upload_to") not in (None, "off")
        if uploaded != (event["event"] == "upload"):
            return  # with uploads, reference the store's copy, which outlives the local copy
        name = event["checkpoint"]
        if name in self._logged:
            return
        path = self.files.checkpoint(name).resolve()
        try:
            manifest = read_record(path / MANIFEST, _Manifest)
        except RecordError:
            return
        if manifest is None:  # removed in the meantime
            return
        url = f"{event['url'].rstrip('/')}/{name}" if uploaded else path.as_uri()
        progress = manifest["progress"]
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
            try:
                artifact.add_reference(url, name=name, checksum=False)
            except Exception:  # W&B lacks the library for this store; the metadata contains the URL
                artifact.add_reference(path.as_uri(), name=name, checksum=False)
        except Exception:
            if not (path / MANIFEST).exists():
                return  # removed in the meantime
            raise
        self.run.log_artifact(artifact, aliases=["latest", name])


def new_id() -> str:
    return uuid.uuid4().hex[:8]


def _samples_number(step: int) -> int:
    return step * STEP_NUMBERS + STEP_NUMBERS - 1


def _seconds(event: Row) -> float:
    """Return an event's time in seconds since the epoch, or the current time if it is unknown."""
    try:
        return datetime.strptime(event["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, ValueError):
        return time.time()
