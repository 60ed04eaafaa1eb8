"""The ranks' heartbeat files, which the other ranks and `status` read.

Each heartbeat contains the token of its launch, so files from earlier launches are ignored.
Thousands of ranks may share a directory. Therefore, a heartbeat overwrites the previous one in
place, which does not change the directory, and all ranks together write only a few heartbeats per
second.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from zerolm.common import processes
from zerolm.common.files import write_atomically
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog import flight_recorder, liveness, progress

HEARTBEATS_PER_SECOND = 32  # of all ranks together, unless `MAX_SECONDS` requires more
MIN_SECONDS, MAX_SECONDS = 2.0, 20.0  # time between two heartbeats of a rank
SIZE_BYTES = 2048  # heartbeats are padded with spaces to overwrite the previous one completely


def interval_seconds(world_size: int) -> float:
    """Return the time between two heartbeats of a rank."""
    return min(MAX_SECONDS, max(MIN_SECONDS, world_size / HEARTBEATS_PER_SECOND))


class Heartbeats:
    """Writes this rank's heartbeat and reads the other ranks'.

    Args:
        run_dir: the run directory; must exist before the first heartbeat is written.
        launcher: process ID of the launcher, if any.
        stage: this rank's pipeline stage, such as `1 of 2`; "" without stages.

    Attributes:
        token: identifies this launch; None until the ranks are connected.
        state: `running` or `ended`.
        reason: why this rank ended; "" while it is running.
        written_at: `time.monotonic()` of the last successful write; 0 before the first one.
        seconds: time between two heartbeats.
    """

    def __init__(
        self, run_dir: Path, rank: int, launcher: int | None, monitor: liveness.ProgressMonitor,
        stage: str = "",
    ):  # fmt: skip
        self.files, self.rank, self.stage = RunFiles(run_dir), rank, stage
        self.launcher, self.monitor = launcher, monitor
        self.host, self.machine = socket.gethostname(), processes.machine_id()
        process = processes.inspect_process(os.getpid())
        assert process is not None, "this process is in /proc"
        self.process = process
        self.token: str | None = None
        self.state, self.reason = "running", ""
        self.written_at, self.seconds = 0.0, MIN_SECONDS

    def identity(self) -> dict[str, Any]:
        """Return the constant part of the heartbeat, which identifies this rank's process."""
        return {
            "rank": self.rank, "host": self.host, "machine": self.machine, "pid": self.process.pid,
            "start_ticks": self.process.start_ticks, "launcher_pid": self.launcher,
            "supervisor": os.environ.get(processes.SUPERVISOR),
            "device": int(os.environ.get("LOCAL_RANK", 0)), "stage": self.stage,
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return the complete heartbeat: this rank's identity and current activity."""
        current = progress.CURRENT
        limit = round(self.monitor.limit_seconds(), 1) if self.monitor.hang_timeout else 0
        stalled = self.monitor.is_stalled
        groups, calls = flight_recorder.collectives(with_calls=stalled)
        return {
            **self.identity(), "token": self.token,
            "phase": current.phase, "step": current.step, "beats": current.num_records,
            "sequences": current.sequences, "waiting": liveness.in_collective(),
            "doing": liveness.doing() if stalled else "",
            "groups": groups, "calls": calls,
            "quiet_seconds": round(self.monitor.quiet_seconds(), 1),
            "limit_seconds": limit,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "monotonic": time.monotonic(),
            "state": self.state, "reason": self.reason,
        }  # fmt: skip

    def write(self) -> None:
        """Write the heartbeat, or touch its file if the disk is full. Never raises OSError."""
        if self.rank and self.token is None:
            return
        path = self.files.heartbeat(self.rank)
        content = json.dumps(self.status()).encode().ljust(SIZE_BYTES - 1) + b"\n"
        try:
            if not self.written_at or not _overwrite(path, content):
                write_atomically(path, content, durable=False)
        except OSError:
            try:
                os.utime(path)
            except OSError:
                return
        self.written_at = time.monotonic()

    def mark_ended(self, reason: str) -> None:
        """Record that this rank has ended, and why; only the first call has an effect."""
        if self.state == "running":
            self.state, self.reason = "ended", reason
            self.write()

    def read(self, rank: int) -> progress.Heartbeat | None:
        """Return another rank's last heartbeat from this launch, or None."""
        heartbeat = progress.read_heartbeat(self.files.heartbeat(rank))
        return heartbeat if heartbeat is not None and heartbeat["token"] == self.token else None

    def remove_stale(self, world_size: int) -> None:
        """Remove files from earlier launches that no rank of this launch will overwrite."""
        for path in self.files.stale_rank_files(world_size):
            path.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> bool:
    """Overwrite a file in place; return False if it is missing or longer than `content`."""
    try:
        file = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(file).st_size > len(content):
            return False
        os.pwrite(file, content, 0)
    finally:
        os.close(file)  # a network file system writes the data on close
    return True
