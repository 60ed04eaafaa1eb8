"""A thread on each rank that ends the run if a rank hangs or dies, and names the rank to blame.

The thread writes this rank's heartbeat file, ends the rank if its launcher has exited, and ends the
whole run if a rank has died, is stopped, or makes no progress. The time limit for each phase adapts
to the run. A rank that reads, writes, or waits for a working rank does not count as hung. Ranks on
the same machine are watched through the kernel. Across machines, rank 0 watches all ranks, and all
ranks watch rank 0. The more ranks there are, the less often each rank reads files, which keeps the
total number of file accesses per second low.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from zerolm.common import machine, processes
from zerolm.common.errors import EXIT_BUG, EXIT_STOPPED
from zerolm.common.process_tree import Launch, end_with_parent
from zerolm.common.secrets import masked
from zerolm.distributed import collectives
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog import (
    flight_recorder,
    hang_detection,
    liveness,
    progress,
    silence,
    stacks,
    verdict,
)
from zerolm.watchdog.heartbeats import Heartbeats, interval_seconds

POLL_SECONDS = 0.5  # time between checks of the processes on this machine
REQUEST_SECONDS = 2.0  # time between checks for another rank's verdict or a stop request
JUDGES = 4  # number of ranks that read all heartbeats when stuck; other ranks follow a verdict
SILENT_SECONDS = 60.0  # while this rank is stuck, a rank silent for this long is considered lost
STOPPED_SECONDS = 10.0  # a process stopped (SIGSTOP) for this long is considered lost
SUSPENDED_SECONDS = 6.0  # a poll this late means that this process was suspended, not the others
EXIT_DELAY_SECONDS = 3.0  # time for the launcher, which polls every second, to notice a dead rank
ORPHAN_SECONDS = 2.0  # time for the main thread to handle the signal that killed the launcher
START_SECONDS = 10.0  # time to reach the first step, and save after it, once a stop is requested
TEARDOWN_SECONDS = 30.0  # time for the interpreter to exit after an error
RUNNER_GONE = "deepspeed has ended"
# What an event contains of the heartbeat of a rank that is blamed.
BLAMED = ("rank", "host", "pid", "device", "stage", "step", "phase", "doing", "sequences")
GOOD_ENDINGS = ("done", "stopped", "gave up")


class Watchdog:
    """Watches this rank and the other ranks. There is one watchdog per process.

    Args:
        run_dir: run directory, which must exist on rank 0, where it is locked.
        hang_timeout: seconds without progress after which a rank counts as hung; 0 disables hang
            detection.
        stop: the `StopRequest`; setting its `reason` makes this rank save and stop.
        stage: this rank's pipeline stage, such as `1 of 2`; "" without stages.
    """

    def __init__(self, run_dir: Path, rank: int, hang_timeout: float, stop: Any, stage: str = ""):
        self.files, self.rank = RunFiles(run_dir), rank
        self.hang_timeout, self.stop = hang_timeout, stop
        self.launch = Launch.of_this_rank()
        if self.launch.node_launcher is not None:  # from here on `_check_processes` watches it
            end_with_parent(0)
        self.runner = self.launch.runner
        self.monitor = liveness.ProgressMonitor(hang_timeout)
        self.heartbeats = Heartbeats(run_dir, rank, self.launch.node_launcher, self.monitor, stage)
        self.peers: dict[int, dict[str, Any]] = {}  # identities of the other ranks
        # Before the ranks connect, only rank 0 knows that the directory belongs to this run.
        self.stacks = stacks.StackFile(self.files.stacks(rank)) if rank == 0 else None
        self._seen: dict[int, tuple[int, float]] = {}  # {rank: (heartbeat mtime, when it changed)}
        self._suspects: dict[int, tuple[int, float]] = {}  # {hung rank: (beats, heartbeat time)}
        self._leads_machine = True  # whether this is the lowest rank on its machine
        self._stopped_since: dict[int, float] = {}
        self._orphan_since: float | None = None
        self._stop_since: float | None = None
        self._oom_kills = machine.oom_kills()
        self._lock = threading.Lock()  # either this thread or the main thread ends the run
        self._quit = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # ---- Called by the main thread

    def connect(self, world_size: int) -> None:
        """Exchange identities with the other ranks, and start watching them.

        Every rank must call this.
        """
        if self.rank == 0:
            self.heartbeats.remove_stale(world_size)
        token = collectives.broadcast_object(secrets.token_hex(4))
        if self.stacks is None:
            self.stacks = stacks.StackFile(self.files.stacks(self.rank))
        self.heartbeats.token, self.heartbeats.seconds = token, interval_seconds(world_size)
        flight_recorder.write_to(self.files.flight_recorder(token))
        self.heartbeats.write()  # before the gather, so every rank then has a heartbeat
        identity = {**self.heartbeats.identity(), "start_bytes": self.stacks.start_bytes}
        identities = collectives.gather_objects(identity)
        self.peers = {peer["rank"]: peer for peer in identities if peer["rank"] != self.rank}
        machine = self.heartbeats.machine
        local = (rank for rank, peer in self.peers.items() if peer["machine"] == machine)
        self._leads_machine = self.rank < min(local, default=world_size)

    def report_failure(self, error: BaseException) -> None:
        """Report that this rank ends with an error, unless another rank's end caused the error.

        If so, this process exits here without printing the error, which is only a consequence.
        """
        if self.stacks is not None:
            self.stacks.exit_after(TEARDOWN_SECONDS)
        causes = [error, error.__cause__] if error.__cause__ else [error]
        lines = [f"{type(cause).__name__}: {cause}".splitlines()[0] for cause in causes]
        lines += silence.NCCL_ERROR.findall(str(error))
        reason = "; ".join(line.rstrip(". ") for line in lines)
        if liveness.raised_in_collective(error) and self.heartbeats.token is not None:
            self._end_for_ceased(f"rank {self.rank} on {self.heartbeats.host}: {reason}")
            if peers := silence.named_peers(str(error), self.peers):
                reason += f"; {peers}, and no rank is silent: check the network between them"
        with self._lock:
            if self.stacks is not None:
                self.stacks.write("its error", masked("".join(traceback.format_exception(error))))
            self._publish({self.rank: f"ended: {reason}"}, "rank_lost", reason)
            self.heartbeats.mark_ended(reason)

    def close(self, reason: str) -> None:
        """Stop watching, because the run has ended.

        Args:
            reason: how the run ended, one of `GOOD_ENDINGS`.
        """
        with self._lock:
            self._quit.set()
            self.heartbeats.mark_ended(reason)
            if self.stacks is not None:
                self.stacks.close()

    # ---- The thread

    def _watch(self) -> None:
        error_printed = False
        polled = beaten = followed = time.monotonic()
        while not self._quit.wait(POLL_SECONDS):
            now = time.monotonic()
            if now - polled > SUSPENDED_SECONDS:
                self._stopped_since.clear()
                self._seen.clear()
                self.monitor.reset()
            polled = now
            try:
                self._check_processes()
                self._end_slow_start()
                beats_due = now - beaten >= self.heartbeats.seconds
                if beats_due or not self.heartbeats.written_at:
                    beaten = now
                    self.monitor.update()
                    self.heartbeats.write()
                    self._check_progress()
                if beats_due or (self._leads_machine and now - followed >= REQUEST_SECONDS):
                    followed = now
                    self._follow_requests()
            except Exception as error:  # an error in the watchdog itself must not end a run
                if not error_printed:
                    print(f"watchdog: rank {self.rank}: {error!r}", file=sys.stderr, flush=True)
                error_printed = True

    def _end_slow_start(self) -> None:
        """Exit if a stop was requested before the first step, and the start takes long.

        There is nothing to save, and the main thread may be in a call that lasts minutes.
        """
        self.stop.receive()
        reason = self.stop.reason or self.stop.received
        if reason in (None, "--stop_after") or "optimizer" in progress.CURRENT.longest_seconds:
            return
        self._stop_since = self._stop_since or time.monotonic()
        if time.monotonic() - self._stop_since < START_SECONDS:
            return
        with self._lock:
            if self.rank == 0:
                text = f"{reason}: stopped before the first step, so there was nothing to save"
                collectives.print_safely(text)
            self.heartbeats.mark_ended("stopped")
            for child in processes.children(os.getpid()):
                name = Path(f"/proc/{child.pid}/comm")
                with contextlib.suppress(OSError):
                    if name.read_text().strip() == "ninja":  # ends its compilers, too
                        processes.signal_process(child, signal.SIGTERM)
            os._exit(EXIT_STOPPED)

    def _check_processes(self) -> None:
        """Check the launcher and the ranks on this machine."""
        if self.launch.is_orphaned():
            self._outlive_launcher()
        if self.runner is not None and not processes.alive(self.runner) and not self.stop.reason:
            verdict.mute_broken_output()
            self.stop.reason = RUNNER_GONE
        session = self.launch.session
        if self.heartbeats.token is None and session and not processes.alive(session):
            self._exit_alone("the ssh session of its launcher has ended", "launcher_lost")
        if self.heartbeats.token is None or progress.CURRENT.phase == "end":
            return
        for rank, peer in self.peers.items():
            if peer["machine"] != self.heartbeats.machine:
                continue
            process = processes.inspect_process(peer["pid"])
            if process is None or process.start_ticks != peer["start_ticks"]:
                self._handle_exit(rank, None)
            elif process.state in "ZX":
                self._handle_exit(rank, processes.exit_reason(process.wait_status))
            elif process.state == "T" and self.hang_timeout:
                since = self._stopped_since.setdefault(rank, time.monotonic())
                if time.monotonic() - since > STOPPED_SECONDS:
                    self._end_run({rank: "is stopped (SIGSTOP)"}, "hang")
            else:
                self._stopped_since.pop(rank, None)

    def _outlive_launcher(self) -> None:
        """Exit after the launcher has exited, unless a stop was requested and this rank must save.

        Closing a terminal signals the launcher and the ranks at the same time.
        """
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if self.stop.reason is not None:
            verdict.mute_broken_output()
        elif now - self._orphan_since > ORPHAN_SECONDS:
            self._exit_alone("its launcher is gone", "launcher_lost")

    def _handle_exit(self, rank: int, how: str | None) -> None:
        """End the run if a rank's process exited before the rank had finished.

        Args:
            how: how the process ended; None if unknown.
        """
        heartbeat = self.heartbeats.read(rank)
        if heartbeat is not None and heartbeat["state"] == "ended":
            if heartbeat["reason"] in GOOD_ENDINGS:
                return
            how = heartbeat["reason"]
        why = f"ended: {how}" if how else "has vanished"
        here = self.heartbeats.machine
        if how in ("SIGABRT", None) and any(p["machine"] != here for p in self.peers.values()):
            # NCCL aborts a rank that has lost a peer.
            below = [other for other in self.peers if other < self.rank]
            self._leads_machine = self._leads_machine or not self._local_processes(below)
            self._end_for_ceased(f"rank {rank} on {self.heartbeats.host} {why}")
        if how == "SIGKILL" and (kills := machine.oom_kills() - self._oom_kills):
            why += f"; {machine.oom_note(kills)}"
        self._end_run({rank: why}, "rank_lost", how)

    def _end_for_ceased(self, symptom: str) -> None:
        """Look for ceased ranks on other hosts for some seconds; end the run if any are found.

        Args:
            symptom: what happened on this host, possibly because a peer has ceased.
        """
        found = silence.ceased(self.heartbeats, self.peers, self._leads_machine)
        if found:
            blamed = {rank: f"{account} ({symptom})" for rank, account in found.items()}
            self._end_run(blamed, "rank_lost")

    def _check_progress(self) -> None:
        """End the run if a rank makes no progress or its heartbeats have stopped."""
        quiet, limit = self.monitor.quiet_seconds(), self.monitor.limit_seconds()
        if not self.hang_timeout:
            return
        if self.heartbeats.token is None:
            if quiet > limit:
                self._exit_alone(f"no progress for {quiet:.0f} s while the ranks connect", "hang")
            return
        silent = limit if self.monitor.is_starting else min(SILENT_SECONDS, limit)
        silent = max(silent, 3 * self.heartbeats.seconds)
        if quiet > silent:
            self._check_heartbeats(silent)
        # Rank 0 judges first, followed by a few other ranks; each of them reads all heartbeats.
        if self.rank < JUDGES and quiet > limit + 4 * self.rank * self.heartbeats.seconds:
            self._judge()

    def _judge(self) -> None:
        """Read all heartbeats; end the run if this and the previous call find that ranks hang."""
        beats: list[Any] = [self.heartbeats.read(rank) for rank in self.peers]
        beats.append(self.heartbeats.status())
        running = [beat for beat in beats if beat is not None and beat["state"] == "running"]
        found = hang_detection.find_hung_ranks(running, complete=None not in beats)
        witnesses = found.witnesses if found else []
        suspects = {
            beat["rank"]: (beat["beats"], beat["monotonic"])
            for beat in running
            if beat["rank"] in witnesses
        }
        before, same = self._suspects, suspects.keys() == self._suspects.keys()
        if not same or any(before[rank][0] != suspects[rank][0] for rank in suspects):
            self._suspects = suspects  # heartbeats may be old, so wait for newer ones
        elif found and all(before[rank][1] < suspects[rank][1] for rank in suspects):
            self._end_run(found.blamed, "hang", reason=found.reason)

    def _check_heartbeats(self, silent: float) -> None:
        """End the run if another rank's heartbeats have stopped.

        Called only while this rank is stuck: as long as it makes progress, all other ranks must be
        alive, whatever their files contain.

        Args:
            silent: seconds without a new heartbeat after which a rank is considered lost.
        """
        now = time.monotonic()
        lost: dict[int, float] = {}
        if now - self.heartbeats.written_at > 2 * self.heartbeats.seconds:
            return  # if this rank cannot write, other ranks may not be able to either
        for rank in self.peers if self.rank == 0 else [0]:
            try:
                mtime = self.files.heartbeat(rank).stat().st_mtime_ns
            except OSError:
                continue
            if self._seen.setdefault(rank, (mtime, now))[0] != mtime:
                self._seen[rank] = (mtime, now)
            quiet = now - self._seen[rank][1]
            heartbeat = self.heartbeats.read(rank) if quiet > silent else None
            if heartbeat is not None and heartbeat["state"] == "running":
                lost[rank] = quiet
        blamed = silence.accounts(lost, self.peers, self.heartbeats.machine)
        for rank in blamed:
            for state in map(liveness.why_silent, self._local_processes([rank])):
                blamed[rank] += f", {state}" if state else ""
        if blamed:
            self._end_run(blamed, "hang")

    def _follow_requests(self) -> None:
        """Request a stop if a file requests one; exit if another rank has written a verdict."""
        token = self.heartbeats.token
        if token is None:
            return
        if self.rank == 0 and self.stop.reason is None:
            with contextlib.suppress(OSError):
                self.stop.reason = self.files.stop_request(token).read_text().strip()
        path = self.files.verdict(token)
        if path.exists():
            self._exit(verdict.read_ranks(path), first=False)

    # ---- The end of the run

    def _end_run(
        self, blamed: dict[int, str], event: str, how: str | None = None, reason: str = ""
    ) -> None:
        """End the run: publish the verdict for the other ranks, collect stacks, and exit.

        Args:
            blamed: {blamed rank: reason}.
            how: how the blamed rank's process ended, if it has ended.
            reason: why the run ends, if no rank is blamed.
        """
        first = self._publish(blamed, event, how, reason)
        self._exit(list(blamed), first)

    def _exit(self, blamed: list[int], first: bool) -> None:
        """Write the stacks, kill the blamed ranks on this machine, and exit.

        Args:
            first: whether this rank published the verdict. If so, it collects the stacks of the
                blamed ranks, while the other ranks wait.
        """
        with self._lock:
            if self._quit.is_set():
                return
            self._quit.set()
            if self.stacks is not None:
                self.stacks.write("the run ends")
                self.stacks.exit_after(TEARDOWN_SECONDS)  # the next line queries the device
                flight_recorder.keep(self.files, self.heartbeats.token, self.rank, first)
            others = self._local_processes([rank for rank in blamed if rank != self.rank])
            if first:
                stacks.request_stacks(others)
                for rank in blamed:
                    stacks.print_tail(self.files.stacks(rank))
            else:
                time.sleep(2 * stacks.RESPONSE_SECONDS if others else 0)
            for process in others:
                processes.signal_process(process, signal.SIGKILL)
            self.heartbeats.mark_ended("the run ended; see events.jsonl")
            if self.rank not in blamed:
                self._let_launcher_see(blamed)
            os._exit(EXIT_BUG)

    def _let_launcher_see(self, blamed: list[int]) -> None:
        """Wait up to `EXIT_DELAY_SECONDS` for this machine's launcher to notice a dead rank."""
        deadline = time.monotonic() + EXIT_DELAY_SECONDS
        peers = [self.peers[rank] for rank in blamed if rank in self.peers]
        local = [peer for peer in peers if peer["machine"] == self.heartbeats.machine]
        while time.monotonic() < deadline:
            found = [processes.inspect_process(peer["pid"]) for peer in local]
            if None in found:  # the launcher has reaped a dead rank
                return
            time.sleep(0.05)

    def _exit_alone(self, why: str, event: str) -> None:
        """End this rank without waiting for a launcher; connected ranks follow the verdict."""
        verdict.mute_broken_output()
        host, pid = self.heartbeats.host, self.heartbeats.process.pid
        if self.rank == 0 or self.heartbeats.token is not None:
            if self.stacks is not None:
                self.stacks.write("the run ends")
            self._publish({self.rank: why}, event, None, host=host, pid=pid, reason=why)
        else:  # it is unknown whether the directory belongs to this run
            print(f"watchdog: rank {self.rank} on {host} exits: {why}", file=sys.stderr, flush=True)
        self.heartbeats.mark_ended(why)
        os._exit(EXIT_BUG)

    def _publish(
        self, blamed: dict[int, str], event: str, how: str | None, why: str = "", **fields: Any
    ) -> bool:
        """Publish a verdict about the blamed ranks; return False if another rank was first."""
        entries = []
        for rank, reason in blamed.items():
            own = rank == self.rank
            heartbeat = self.heartbeats.status() if own else dict(self.heartbeats.read(rank) or {})
            heartbeat = heartbeat or self.peers[rank]
            path = self.files.stacks(rank)
            # A killed rank has left no stacks; a hung rank will be requested to write them later.
            before = self.stacks.start_bytes if own and self.stacks else 0
            before = before if own else self.peers[rank]["start_bytes"]
            has_stacks = event == "hang" or stacks.size_bytes(path) > before
            entry: dict[str, Any] = {name: heartbeat.get(name) for name in BLAMED}
            entries.append(entry | {"reason": reason, "stacks": str(path) if has_stacks else None})
        # A heartbeat may be a few steps old; ranks are never more than one step apart.
        step = max([progress.CURRENT.step] + [entry["step"] or 0 for entry in entries])
        token = self.heartbeats.token
        return verdict.publish(
            self.files.run_dir, token, event, step, self.rank, how, entries, why, **fields
        )

    def _local_processes(self, ranks: list[int]) -> list[processes.Process]:
        """Return the running processes of those given ranks that are on this machine."""
        peers = [self.peers[rank] for rank in ranks]
        local = [peer for peer in peers if peer["machine"] == self.heartbeats.machine]
        found = [(peer, processes.inspect_process(peer["pid"])) for peer in local]
        return [
            process
            for peer, process in found
            if process is not None
            and process.start_ticks == peer["start_ticks"]
            and process.state not in "ZX"
        ]
