"""What the ranks say of themselves, each in a file that the others and `status` read.

A heartbeat has the token of one start of the run, so that what an earlier start left is not heard.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from zerolm import processes, pulse, vital_signs


class Heartbeats:
    """The heartbeat of this rank, and those of the others.

    Args:
        run_dir: exists, once there is something to write.
        launcher: the process that started this one, if one did.
        signs: of this process.

    Attributes:
        token: of this start of the run, once the ranks have met.
        state: `running` or `ended`, with the reason.
        written_at: when this rank's own heartbeat could last be written; 0: never.
    """

    def __init__(
        self, run_dir: Path, rank: int, launcher: int | None, signs: vital_signs.VitalSigns
    ):
        self.run_dir, self.rank, self.launcher, self.signs = run_dir, rank, launcher, signs
        self.host, self.machine = socket.gethostname(), processes.machine()
        me = processes.look(os.getpid())
        assert me is not None, "this process is in /proc"
        self.me = me
        self.token: str | None = None
        self.state, self.reason = "running", ""
        self.written_at = 0.0

    def identity(self) -> dict[str, Any]:
        """Return who this rank is."""
        return {
            "rank": self.rank, "host": self.host, "machine": self.machine, "pid": self.me.pid,
            "start_ticks": self.me.start_ticks, "launcher_pid": self.launcher,
            "supervisor": os.environ.get(processes.SUPERVISOR),
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return who this rank is, and what it is doing now."""
        limit = round(self.signs.limit_seconds(), 1) if self.signs.hang_timeout else 0
        return {
            **self.identity(), "token": self.token,
            "phase": pulse.PULSE.phase, "step": pulse.PULSE.step, "beats": pulse.PULSE.beats,
            "sequences": pulse.PULSE.sequences, "waiting": vital_signs.waits_in_collective(),
            "collectives": vital_signs.collectives(),
            "quiet_seconds": round(self.signs.quiet_seconds(), 1),
            "limit_seconds": limit,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "state": self.state, "reason": self.reason,
        }  # fmt: skip

    def write(self) -> None:
        """Write the heartbeat; on a full disk touch the last one; a rank never dies of it."""
        if self.rank and self.token is None:
            return
        path = pulse.heartbeat_path(self.run_dir, self.rank)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self.status()) + "\n")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            try:
                os.utime(path)
            except OSError:
                return
        self.written_at = time.monotonic()

    def end(self, reason: str) -> None:
        """Say that this rank has ended, and why; the first reason counts."""
        if self.state == "running":
            self.state, self.reason = "ended", reason
            self.write()

    def of(self, rank: int) -> dict[str, Any] | None:
        """Return what another rank of this start last said, None when it cannot be read."""
        beat = pulse.read_heartbeat(pulse.heartbeat_path(self.run_dir, rank))
        return beat if beat is not None and beat["token"] == self.token else None

    def clear(self, world_size: int) -> None:
        """Remove the files of earlier starts that no rank of this one will write."""
        ranks = self.run_dir / pulse.RANKS
        for path in [*ranks.glob("verdict-*"), *ranks.glob("stop-*")]:
            path.unlink(missing_ok=True)
        for path in ranks.glob("rank-*"):
            if int(path.name[5:10]) >= world_size:
                path.unlink(missing_ok=True)
