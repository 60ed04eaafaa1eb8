"""One launch of a run as a child process: start it, watch its ranks, stop it, and clean up.

Signals are sent to the ranks, which save and stop; DeepSpeed's launcher would kill them instead.
Every process of a launch has a mark in its environment, by which this module finds the process. No
process is ever signalled by name.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.supervise.downtime import downtime
from launch.supervise.imports import Imports
from launch.supervise.outcome import (
    FINAL_EVENTS,
    LOST_EVENTS,
    RETURN_CODE,
    Outcome,
    classify,
    shown_code,
)
from zerolm.common import machine, processes
from zerolm.run_dir import jsonl
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow
from zerolm.watchdog import progress
from zerolm.watchdog.heartbeats import HEARTBEATS_PER_SECOND, interval_seconds
from zerolm.watchdog.progress import Heartbeat, read_heartbeat
from zerolm.watchdog.silence import CEASED_BEATS, Ages

POLL_SECONDS = 0.2
ORPHAN_SECONDS = 30.0  # time for processes left behind by a launch to exit before being killed
MEET_SECONDS = 20.0  # time for all launchers to exit after a rank has exited before connecting
RANKS_GONE_SECONDS = 60.0  # time for the launcher to notice that its ranks have exited
LAUNCHER_SECONDS = 1.5  # the same if the cause is known; the launcher polls every second
STOPPED_SECONDS = 30.0  # how long all ranks on this host may be stopped (SIGSTOP)
SILENT_SECONDS = 60.0  # added to a rank's own time limit before its silence counts as a hang
SUSPENDED_SECONDS = 6.0  # a longer gap between checks means that this process was suspended as well
REASON_SECONDS = 30.0  # time for ranks that outlive their launcher to log the reason and exit
WHY_EVENTS = {*FINAL_EVENTS, *LOST_EVENTS, "corrupted"}
KILL_SECONDS = 5.0
STACKS_SECONDS = 2.0  # time for ranks to write their stacks
MAX_OUTPUT_LINES = 400


class Attempt:
    """A running launch.

    Args:
        mark: value of ZEROLM_SUPERVISOR in the environment of the launch's processes; unique to the
            launch.
        start_seconds: time limit for the first heartbeat of any rank.
        imports: those that later launches may share.
    """

    def __init__(
        self,
        command: Sequence[str],
        mark: str,
        run_dir: Path,
        start_seconds: float = 1800.0,
        imports: Imports | None = None,
    ):
        self.mark = f"{processes.SUPERVISOR}={mark}"
        self.files, self.start_seconds = RunFiles(run_dir), start_seconds
        self.events_start = self.files.events.stat().st_size if self.files.events.exists() else 0
        self.problem: str | None = None  # the last error in the supervisor's own checks
        earlier = progress.read_heartbeats(run_dir).values()
        self.earlier_tokens = {heartbeat["token"] for heartbeat in earlier}
        self.machine = processes.machine_id()
        self.output: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
        self.kill_reason: str | None = None
        self._oom_kills = machine.oom_kills()
        self._ended_early: tuple[str, float] | None = None  # (reason, time)
        self._written: dict[int, tuple[int, float]] = {}  # {rank: (heartbeat mtime, first seen)}
        self._beats: list[Heartbeat] = []
        self._beats_read_at = 0.0
        self._launcher_ended = 0.0  # measured with `time.time`
        self._gone_since: float | None = None
        self._stopped_since: float | None = None
        self._started = self._checked = time.monotonic()
        self.process = (imports or Imports(shared=False)).start(
            command, {**os.environ, processes.SUPERVISOR: mark}
        )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    # ---- While it runs

    def running(self) -> bool:
        """Return whether the launch is still running; kill it first if it is stuck."""
        if self.process.poll() is not None:
            self._launcher_ended = self._launcher_ended or time.time()
            return False
        now = time.monotonic()
        if now - self._checked > SUSPENDED_SECONDS:
            self._gone_since = self._stopped_since = None
            self._written.clear()
            self._started += now - self._checked
        self._checked = now
        try:
            reason = self._stuck_reason(now)
            self._end_idle_launchers(now)
        except Exception as error:  # a failing check must not end the run
            reason, self.problem = None, f"cannot check the ranks: {error!r}"
        if reason is not None:
            self.kill_reason = reason
            self.kill()
        return self.process.poll() is None

    def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each rank in this launch."""
        mark = self.mark.partition("=")[2]
        return [
            beat
            for beat in progress.read_heartbeats(self.files.run_dir).values()
            # DeepSpeed does not forward the mark to other hosts, so ranks on other hosts are
            # recognized by a new token.
            if beat["supervisor"] == mark
            or (beat["supervisor"] is None and beat["token"] not in {None, *self.earlier_tokens})
        ]

    def request_stop(self, number: int) -> bool:
        """Forward a signal to the ranks on this host; all ranks then save and stop together.

        Return False if no rank has anything to save yet.
        """
        beats = self.heartbeats()
        local = [beat for beat in beats if beat["machine"] == self.machine]
        sent = [processes.signal_marked(beat["pid"], number, self.mark) for beat in local]
        if any(sent):
            return True
        tokens = {beat["token"] for beat in beats if beat["token"] and beat["state"] == "running"}
        for token in tokens:  # if no rank runs on this host, use a file, for which rank 0 polls
            path = self.files.stop_request(token)
            with contextlib.suppress(OSError):
                path.write_text(signal.Signals(number).name + "\n")
        return bool(tokens)

    def kill(self) -> list[int]:
        """Kill all of this launch's processes on this host immediately; return their IDs."""
        killed: set[int] = set()
        for beat in self.heartbeats():  # ranks started over ssh do not have the mark
            rank = processes.inspect_process(beat["pid"])
            if rank and not self._is_over(beat) and beat["machine"] == self.machine:
                processes.signal_process(rank, signal.SIGKILL)  # its launcher then exits
                killed.add(rank.pid)
        deadline = time.monotonic() + KILL_SECONDS  # a process may be stuck in the kernel
        while (alive := processes.marked_pids(self.mark)) and time.monotonic() < deadline:
            killed.update(
                pid for pid in alive if processes.signal_marked(pid, signal.SIGKILL, self.mark)
            )
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=KILL_SECONDS)
        return sorted(killed)

    def finish(self) -> Outcome:
        """Wait for orphaned processes, kill those that do not exit, and return the outcome."""
        self._launcher_ended = self._launcher_ended or time.time()
        killed = self._wait_for_orphans()
        self._reader.join(timeout=2.0)
        code, output = self.process.wait(), list(self.output)
        try:
            self._wait_for_reason()
            ended, beats = time.time(), self.heartbeats()
            outcome = classify(
                code, self._new_events(), beats, output, self.kill_reason, killed,
                jsonl.last_step(self.files.metrics),
            )  # fmt: skip
            outcome.downtime = downtime(self.files, beats, self._launcher_ended, ended)
            killed_ranks = any("SIGKILL" in reason for reason in outcome.reasons)
            if killed_ranks and (kills := machine.oom_kills() - self._oom_kills):
                note = machine.oom_note(kills)
                outcome.reasons += [note] * (note not in " ".join(outcome.reasons))
        except Exception as error:  # a bug in the supervisor: use only the launcher's exit code
            outcome = classify(code, [], [], output, self.kill_reason, killed)
            outcome.reasons.append(f"cannot read how the launch ended: {error!r}")
        return outcome

    # ---- Stuck launches, which DeepSpeed's launcher does not detect

    def _stuck_reason(self, now: float) -> str | None:
        """Return why this launch cannot make progress, or None if it is not stuck."""
        if now - self._beats_read_at > len(self._beats) / HEARTBEATS_PER_SECOND:
            self._beats, self._beats_read_at = self.heartbeats(), now
        beats = self._beats
        if not beats:
            waited = now - self._started
            late = waited > self.start_seconds
            if self._ended_early and now - self._ended_early[1] > MEET_SECONDS:
                return (
                    f"{self._ended_early[0]} before the ranks had connected, and the others are "
                    f"waiting for it"
                )
            return f"no rank has written a heartbeat in {waited:.0f} s" if late else None
        local = [beat for beat in beats if beat["machine"] == self.machine]
        alive = [
            (beat, process)
            for beat in local
            if (process := processes.inspect_process(beat["pid"]))
            and process.start_ticks == beat["start_ticks"]
            and process.state not in "ZX"
        ]
        self._gone_since = None if alive or not local else self._gone_since or now
        if self._gone_since is not None and now - self._gone_since > RANKS_GONE_SECONDS:
            return "all ranks on this host have ended, but the launcher has not noticed"
        stopped = bool(alive) and all(process.state == "T" for _, process in alive)
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now - self._stopped_since > STOPPED_SECONDS:
            return self._with_stacks(alive, "every rank is stopped (SIGSTOP)")
        silent = [pair for pair in alive if self._is_silent(pair[0], now)]
        if silent and len(silent) == len(alive) and _is_writable(self.files.ranks):
            return self._with_stacks(silent, "every rank's heartbeat is older than its limit")
        return None

    def _end_idle_launchers(self, now: float) -> None:
        """Kill the launchers if all ranks have exited and the reason is logged.

        DeepSpeed's launcher would wait up to 30 s for every process started by a rank. There is no
        need to: a tracker's process, for example, can send its last rows while the run restarts.
        """
        gone = self._gone_since is not None and now - self._gone_since > LAUNCHER_SECONDS
        if not gone or any(beat["machine"] != self.machine for beat in self._beats):
            return
        lost = [each for each in self._new_events() if each["event"] in ("rank_lost", "hang")]
        if any(each["event"] == "hang" or each.get("ended") for each in lost):
            for pid in {beat["launcher_pid"] for beat in self._beats}:
                if pid is not None:
                    processes.signal_marked(pid, signal.SIGKILL, self.mark)
            self.process.send_signal(signal.SIGKILL)

    def _is_silent(self, beat: Heartbeat, now: float) -> bool:
        """Return whether a heartbeat has not changed for longer than allowed.

        The time is measured with the monotonic clock.
        """
        rank = beat["rank"]
        try:
            mtime = self.files.heartbeat(rank).stat().st_mtime_ns
        except OSError:
            return False
        if self._written.setdefault(rank, (mtime, now))[0] != mtime:
            self._written[rank] = (mtime, now)
        if beat["limit_seconds"] == 0:
            return False  # --hang_timeout 0
        return now - self._written[rank][1] > beat["limit_seconds"] + SILENT_SECONDS

    def _with_stacks(
        self, ranks: Sequence[tuple[Heartbeat, processes.Process]], reason: str
    ) -> str:
        """Make the ranks write their stacks.

        Return the reason extended by a list of the ranks and the path of a stack file.
        """
        for _, process in ranks:
            if processes.handles_signal(process.pid, signal.SIGQUIT):
                processes.signal_marked(process.pid, signal.SIGQUIT, self.mark)
                processes.signal_marked(process.pid, signal.SIGCONT, self.mark)
        time.sleep(STACKS_SECONDS)
        names = ", ".join(
            f"{beat['rank']} on {beat['host']} (pid {beat['pid']})" for beat, _ in ranks[:8]
        )
        stacks = self.files.stacks(ranks[0][0]["rank"])
        return f"{reason}: {names}; stacks: {stacks}"

    # ---- Output, events, and orphans

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.decode(errors="replace").rstrip())
            match = RETURN_CODE.match(self.output[-1])
            if match and match["host"] and match["code"] != "0" and not self._ended_early:
                how = shown_code(int(match["code"]))
                self._ended_early = f"a rank on {match['host']} ended with {how}", time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    def _new_events(self) -> list[dict[str, Any]]:
        """Return the events that the run logged during this launch."""
        return list(jsonl.read_rows(self.files.events, EventRow, start_bytes=self.events_start))

    def _wait_for_orphans(self) -> list[int]:
        """Wait until this launch has no processes left on this host.

        Kill processes that take longer than `ORPHAN_SECONDS`, and return their IDs.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        beats = [beat for beat in self.heartbeats() if beat["machine"] == self.machine]
        launchers, ranks = ({beat[key] for beat in beats} for key in ("launcher_pid", "pid"))
        while alive := processes.marked_pids(self.mark):
            # If only `deepspeed` itself has exited, the ranks are saving and their launcher is
            # waiting for them.
            if not launchers.isdisjoint(alive) and not ranks.isdisjoint(alive):
                deadline = time.monotonic() + ORPHAN_SECONDS
            elif time.monotonic() > deadline:
                return self.kill()
            time.sleep(POLL_SECONDS)
        return []

    def _wait_for_reason(self) -> None:
        """Wait until a rank has logged the reason for its exit, or no rank is left on any host.

        Ranks may outlive their launcher by up to `REASON_SECONDS`.
        """
        deadline = time.monotonic() + REASON_SECONDS
        ages = Ages(lambda rank: read_heartbeat(self.files.heartbeat(rank)), self.files.heartbeat)
        while time.monotonic() < deadline:
            if any(event["event"] in WHY_EVENTS for event in self._new_events()):
                return
            beats = [beat for beat in self.heartbeats() if not self._is_over(beat)]
            quiet = ages.look(beat["rank"] for beat in beats)
            if min(quiet.values(), default=math.inf) > CEASED_BEATS * interval_seconds(len(beats)):
                return
            time.sleep(POLL_SECONDS)

    def left_on_other_hosts(self) -> dict[str, str]:
        """Return {host: shell command that kills ranks left on that host, such as stopped ones}.

        The command kills a process only if its host's boot ID and its start time match.
        """
        commands: dict[str, str] = {}
        for beat in self.heartbeats():
            if beat["machine"] == self.machine or beat["state"] != "running":
                continue
            pid, boot = beat["pid"], beat["machine"].partition(" ")[0]
            ticks = f"sed 's/.*) //' /proc/{pid}/stat 2>/dev/null | cut -d' ' -f20"
            same_boot = f'"$(cat /proc/sys/kernel/random/boot_id)" = {shlex.quote(boot)}'
            host = beat["host"].partition(".")[0]
            commands[host] = commands.get(host, "") + (
                f'[ "$({ticks})" = {beat["start_ticks"]} ] && [ {same_boot} ] && kill -9 {pid}; '
            )
        return commands

    def _is_over(self, beat: Heartbeat) -> bool:
        """Return whether a rank's process has exited; always False for ranks on other hosts."""
        if beat["machine"] != self.machine:
            return False
        process = processes.inspect_process(beat["pid"])
        return process is None or process.start_ticks != beat["start_ticks"]


def left_behind(run_dir: Path) -> list[int]:
    """Return the IDs of processes on this host that belong to a launch in a run's heartbeats."""
    marks = {beat["supervisor"] for beat in progress.read_heartbeats(run_dir).values()}
    launches = [f"{processes.SUPERVISOR}={mark}" for mark in marks if mark is not None]
    return [pid for launch in launches for pid in processes.marked_pids(launch)]


def _is_writable(directory: Path) -> bool:
    try:
        (directory / "supervisor.tmp").write_text("")
        (directory / "supervisor.tmp").unlink()
    except OSError:
        return False
    return True
