"""A thread on each rank that sees to it that no run hangs and no rank outlives it in silence.

It writes this rank's heartbeat file, ends the rank when its launcher is gone, and ends the whole
run, with the one to blame named, when a rank has died, is stopped, or makes no progress. What a
slow step is it learns from the run; a rank that reads, writes or waits for a busy one is not hung.
Ranks of the same machine are watched through the kernel; of the others, rank 0 watches all, and all
watch rank 0.
"""

import contextlib
import os
import secrets
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from zerolm import distributed, events, processes, pulse, stacks, verdict, vital_signs
from zerolm.errors import EXIT_BUG
from zerolm.heartbeats import Heartbeats

LOOK_SECONDS = 0.5  # between two looks at the processes of this machine
BEAT_SECONDS = 2.0  # between two heartbeats
SILENT_SECONDS = 60.0  # a rank of another machine is lost after this, if this one stands still too
STOPPED_SECONDS = 10.0  # a stopped process (SIGSTOP) is lost after this
SUSPENDED_SECONDS = 6.0  # a look that came so late: this process did not run, so nobody did wrong
LINGER_SECONDS = 3.0  # so that the launcher, which looks every second, finds the dead rank first
EXPLAIN_SECONDS = 8.0  # how long a collective's error waits for its cause to be found
EXIT_SECONDS = 30.0  # for the interpreter to end after an error
RUNNER_GONE = "deepspeed has ended"
ENDED_WELL = ("done", "stopped", "gave up")


class Watchdog:
    """Watches this rank, and the others with it. One a process; the training loop calls `beat`.

    Args:
        run_dir: exists on rank 0, which holds its lock.
        rank: of this process.
        hang_timeout: seconds without progress after which a rank is hung; 0: never.
        stop: its `reason` is set to ask this rank to save and stop.
    """

    def __init__(self, run_dir: Path, rank: int, hang_timeout: float, stop: Any):
        self.run_dir, self.rank, self.hang_timeout, self.stop = run_dir, rank, hang_timeout, stop
        self.began = time.time()
        # A rank without a launcher may outlive the shell that started it.
        self.launcher = os.getppid() if "RANK" in os.environ else None
        self.runner = _deepspeed_runner(self.launcher)
        self.signs = vital_signs.VitalSigns(hang_timeout)
        self.beats = Heartbeats(run_dir, rank, self.launcher, self.signs)
        self.peers: dict[int, dict[str, Any]] = {}  # what they said of themselves when they met
        # Only rank 0 knows before the ranks meet that the directory is this run's.
        self.stacks = stacks.StackFile(pulse.stacks_path(run_dir, rank)) if rank == 0 else None
        self._seen: dict[int, tuple[int, float]] = {}  # heartbeats of others: mtime, when it moved
        self._stopped_since: dict[int, float] = {}
        self._lock = threading.Lock()  # one ends the run: the thread, or the main thread's error
        self._quit = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # ---- What the main thread calls

    def meet(self, world_size: int) -> None:
        """Let the ranks know each other, and watch them from now on. Every rank must call."""
        if self.rank == 0:
            self.beats.clear(world_size)
        token = distributed.broadcast_object(secrets.token_hex(4))
        if self.stacks is None:
            self.stacks = stacks.StackFile(pulse.stacks_path(self.run_dir, self.rank))
        self.beats.token = token
        self.beats.write()  # once all have met, every rank has one of this start
        met = distributed.gather_objects(self.beats.identity())
        self.peers = {peer["rank"]: peer for peer in met if peer["rank"] != self.rank}

    def failed(self, error: BaseException) -> None:
        """Say that this rank ends with an error, unless another rank's end explains it.

        In that case the process ends here, and the error, which is only its echo, is not shown.
        """
        if self.stacks is not None:
            self.stacks.end_after(EXIT_SECONDS)
        if vital_signs.from_collective(error) and self.beats.token is not None:
            time.sleep(EXPLAIN_SECONDS)  # the thread ends this process if it finds the cause
        causes = [error, error.__cause__] if error.__cause__ else [error]
        lines = [f"{type(cause).__name__}: {cause}".splitlines()[0] for cause in causes]
        reason = "; ".join(line.rstrip(". ") for line in lines)
        with self._lock:
            if self.stacks is not None:
                self.stacks.write("its error", "".join(traceback.format_exception(error)))
            self._publish({self.rank: f"ended: {reason}"}, "rank_lost", reason)
            self.beats.end(reason)

    def close(self, reason: str) -> None:
        """Stop watching: the run has ended as it should, for one of `ENDED_WELL`."""
        with self._lock:
            self._quit.set()
            self.beats.end(reason)
            if self.stacks is not None:
                self.stacks.close()

    # ---- The thread

    def _watch(self) -> None:
        said = False
        looked = beaten = time.monotonic()
        while not self._quit.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > SUSPENDED_SECONDS:
                self._stopped_since.clear()
                self._seen.clear()
                self.signs.forgive()
            looked = now
            try:
                self._look()
                if now - beaten >= BEAT_SECONDS or not self.beats.written_at:
                    beaten = now
                    self.signs.look()
                    self.beats.write()
                    self._obey()
                    self._judge()
            except Exception as error:  # a watchdog's own trouble must not end a run
                if not said:
                    print(f"watchdog: rank {self.rank}: {error!r}", file=sys.stderr, flush=True)
                said = True

    def _look(self) -> None:
        """Look at the launcher and at the ranks of this machine."""
        if self.launcher not in (None, os.getppid()):
            self._leave("its launcher is gone", "launcher_lost")
        if self.runner is not None and not processes.alive(self.runner) and not self.stop.reason:
            _mute_broken_output()
            self.stop.reason = RUNNER_GONE
        if self.beats.token is None or pulse.PULSE.phase == "end":
            return
        for rank, peer in self.peers.items():
            if peer["machine"] != self.beats.machine:
                continue
            process = processes.look(peer["pid"])
            if process is None or process.start_ticks != peer["start_ticks"]:
                self._lost(rank, None)
            elif process.state in "ZX":
                self._lost(rank, processes.how_it_ended(process.wait_status))
            elif process.state == "T" and self.hang_timeout:
                since = self._stopped_since.setdefault(rank, time.monotonic())
                if time.monotonic() - since > STOPPED_SECONDS:
                    self._end({rank: "is stopped (SIGSTOP)"}, "hang")
            else:
                self._stopped_since.pop(rank, None)

    def _lost(self, rank: int, how: str | None) -> None:
        """End the run for a rank whose process has ended, unless it did so as it should."""
        beat = self.beats.of(rank)
        if beat is not None and beat["state"] == "ended":
            if beat["reason"] in ENDED_WELL:
                return
            how = beat["reason"]
        self._end({rank: f"ended: {how}" if how else "has vanished"}, "rank_lost", how)

    def _judge(self) -> None:
        """End the run for a rank that makes no progress, or of which nothing is heard any more."""
        quiet, limit = self.signs.quiet_seconds(), self.signs.limit_seconds()
        if not self.hang_timeout:
            return
        if self.beats.token is None:
            if quiet > limit:
                self._leave(f"no progress for {quiet:.0f} s while the ranks gather", "hang")
            return
        silent = limit if self.signs.starting else min(SILENT_SECONDS, limit)
        if quiet > silent:
            self._listen(silent)
        # Rank 0 first: of thousands of ranks not all should read all heartbeats at once.
        if quiet > limit + (0.0 if self.rank == 0 else 3 * BEAT_SECONDS + self.rank % 10):
            beats = [self.beats.of(rank) for rank in self.peers] + [self.beats.status()]
            running = [beat for beat in beats if beat is not None and beat["state"] == "running"]
            found = verdict.hanging(running, complete=None not in beats)
            if found is not None:
                self._end(dict.fromkeys(*found), "hang")

    def _listen(self, silent: float) -> None:
        """End the run for a rank whose heartbeats have stopped while this one stands still.

        As long as this rank goes on training, every other one is alive, whatever its file says.
        """
        now = time.monotonic()
        if now - self.beats.written_at > 2 * BEAT_SECONDS:
            return  # where this rank cannot write, others may not be able to either
        for rank in self.peers if self.rank == 0 else [0]:
            try:
                moved = pulse.heartbeat_path(self.run_dir, rank).stat().st_mtime_ns
            except OSError:
                continue
            if self._seen.setdefault(rank, (moved, now))[0] != moved:
                self._seen[rank] = (moved, now)
            quiet = now - self._seen[rank][1]
            beat = self.beats.of(rank)
            if quiet > silent and beat is not None and beat["state"] == "running":
                self._end({rank: f"has been silent for {quiet:.0f} s"}, "hang")

    # ---- The end of the run

    def _obey(self) -> None:
        """End this rank if another one has found who is to blame; stop if a file asks for it."""
        token = self.beats.token
        if token is None:
            return
        if self.rank == 0 and self.stop.reason is None:
            with contextlib.suppress(OSError):
                self.stop.reason = pulse.stop_path(self.run_dir, token).read_text().strip()
        path = verdict.path_of(self.run_dir, token)
        if path.exists():
            found = pulse.read_heartbeat(path) or {"ranks": []}
            self._exit([entry["rank"] for entry in found["ranks"]], first=False)

    def _end(self, blamed: dict[int, str], event: str, how: str | None = None) -> None:
        """End the run: name the ranks to blame, get their stacks, tell the others, and leave."""
        first = self._publish(blamed, event, how)
        self._exit(list(blamed), first)

    def _exit(self, blamed: list[int], first: bool) -> None:
        with self._lock:
            if self._quit.is_set():
                return
            self._quit.set()
            if self.stacks is not None:
                self.stacks.write("the run ends")
            others = self._alive([rank for rank in blamed if rank != self.rank])
            if first:
                stacks.collect(others)
                for rank in blamed:
                    stacks.show(pulse.stacks_path(self.run_dir, rank))
            else:
                time.sleep(2 * stacks.ANSWER_SECONDS if others else 0)
            for process in others:
                processes.send_to(process, signal.SIGKILL)
            self.beats.end("the run ended, see events.jsonl")
            time.sleep(0 if self.rank in blamed else LINGER_SECONDS)
            os._exit(EXIT_BUG)

    def _leave(self, why: str, event: str) -> None:
        """End this rank alone: nobody is left to agree with."""
        _mute_broken_output()
        where = f"step {pulse.PULSE.step}, {pulse.PULSE.phase}"
        host, pid, step = self.beats.host, self.beats.me.pid, pulse.PULSE.step
        print(f"watchdog: rank {self.rank} on {host} ends: {why} ({where})",
              file=sys.stderr, flush=True)  # fmt: skip
        if self.rank == 0:
            entry = {"rank": 0, "host": host, "pid": pid, "step": step}
            entry |= {"phase": pulse.PULSE.phase, "sequences": pulse.PULSE.sequences}
            entry |= {"reason": why, "stacks": None}
            who = {"host": host, "pid": pid, "reason": why}
            self._event(event, step, **who, ended=None, found_by=0, ranks=[entry])
        self.beats.end(why)
        os._exit(EXIT_BUG)

    def _publish(self, blamed: dict[int, str], event: str, how: str | None) -> bool:
        """Write verdict, event and one line for people; False when another rank was first."""
        _mute_broken_output()
        entries = []
        for rank, reason in blamed.items():
            known = self.beats.status() if rank == self.rank else self.beats.of(rank)
            known = known or self.peers[rank]
            names = ("rank", "host", "pid", "step", "phase", "sequences")
            path = pulse.stacks_path(self.run_dir, rank)
            # A killed rank has left none; one that hangs is asked for them after this.
            where = str(path) if event == "hang" or stacks.written_since(path, self.began) else None
            entries.append({name: known.get(name) for name in names})
            entries[-1] |= {"reason": reason, "stacks": where}
        # A heartbeat may be some steps old; ranks are never more than one step apart.
        step = max([pulse.PULSE.step] + [entry["step"] or 0 for entry in entries])
        found = {"ended": how, "found_by": self.rank, "ranks": entries}
        if self.beats.token is not None and not verdict.write_once(
            verdict.path_of(self.run_dir, self.beats.token), {"event": event, "step": step, **found}
        ):
            return False
        for entry in entries:
            print(
                f"watchdog: rank {entry['rank']} on {entry['host']} (pid {entry['pid']}) "
                f"{entry['reason']}. The run was in step {step}, the rank last said step "
                f"{entry['step']}, {entry['phase']}. Stacks: {entry['stacks'] or 'none'}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._event(event, step, **found)
        return True

    def _event(self, event: str, step: int, **what: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk
            events.append(self.run_dir, event, step, **what)

    def _alive(self, ranks: list[int]) -> list[processes.Process]:
        """Return the processes of those ranks that are on this machine and have not ended."""
        here = [
            self.peers[rank] for rank in ranks if self.peers[rank]["machine"] == self.beats.machine
        ]
        looks = [(peer, processes.look(peer["pid"])) for peer in here]
        return [
            process
            for peer, process in looks
            if process is not None
            and process.start_ticks == peer["start_ticks"]
            and process.state not in "ZX"
        ]


def _deepspeed_runner(launcher: int | None) -> processes.Process | None:
    """Return the `deepspeed` process that started the launcher, where it is one and is here."""
    parent = processes.look(launcher) if launcher else None
    with contextlib.suppress(OSError):
        if parent and b"deepspeed" in Path(f"/proc/{parent.parent}/cmdline").read_bytes():
            return processes.look(parent.parent)
    return None


def _mute_broken_output() -> None:
    """Send output nowhere if whoever read it is gone: a failing print must not prevent a save."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(stream, 0)
            if any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0)):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream)
