"""One launch under the supervisor: its process, its ranks, and how it ended.

The launcher's exit code is not believed: `deepspeed` ends with 0 when its node launcher is killed.
What counts is what the run wrote into `events.jsonl` during this launch. Signals go to the ranks,
never to the launcher, whose answer to them is to kill. Every process of the launch carries a mark
in its environment, by which this module finds it; nothing is ever ended by its name.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolm import processes, pulse
from zerolm.errors import EXIT_BUG, EXIT_DONE, EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED

VARIABLE = processes.SUPERVISOR
POLL_SECONDS = 0.2
LEFT_OVER_SECONDS = 30.0  # for what a launch left behind to end by itself
RANKS_GONE_SECONDS = 60.0  # for the launcher to notice that its ranks are gone
STOPPED_SECONDS = 30.0  # all ranks of this host stopped (SIGSTOP), so none can say so
SILENT_SECONDS = 60.0  # beyond what a rank itself allows, for one that cannot say anything
SUSPENDED_SECONDS = 6.0  # a look that came so late: this process did not run either
KILL_SECONDS = 5.0
RUNNER_GONE = "deepspeed has ended"  # the reason of a stop, zerolm/watchdog.py
KEPT_LINES = 400
PR_SET_PDEATHSIG = 1
RETURN_CODE = re.compile(r"exits with return code = (-?\d+)")
ERROR_LINE = re.compile(r"(Error\b|Exception\b|refused|watchdog:|FAULT |pretrain\.py: |[Kk]illed)")


@dataclass
class Ending:
    """How a launch ended.

    Attributes:
        code: one of zerolm's exit codes, whatever the launcher returned.
        step: the optimizer step that was being taken; None: none was begun.
        sequences: (first, count) of its sequence numbers, where known.
        reasons: what happened, a line each.
        lines: the last lines of its output that look like errors.
    """

    code: int
    step: int | None = None
    sequences: list[int] | None = None
    reasons: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Attempt:
    """A running launch.

    Args:
        command: what starts it.
        mark: what the value of `VARIABLE` is for its processes, different for each launch.
        run_dir: of the run.
        start_seconds: in which the first rank has to show its heartbeat.
    """

    def __init__(
        self, command: Sequence[str], mark: str, run_dir: Path, start_seconds: float = 1800.0
    ):
        self.mark, self.run_dir, self.start_seconds = f"{VARIABLE}={mark}", run_dir, start_seconds
        self.events_path = run_dir / "events.jsonl"
        self.events_start = self.events_path.stat().st_size if self.events_path.exists() else 0
        before = pulse.read_heartbeats(run_dir).values()
        self.older_tokens = {heartbeat["token"] for heartbeat in before}
        self.machine = processes.machine()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.killed_for: str | None = None
        self._absent_since: float | None = None
        self._stopped_since: float | None = None
        self._began = self._looked = time.monotonic()
        self.process = subprocess.Popen(
            list(command),
            env={**os.environ, VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal is this process's to pass on
            preexec_fn=_end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # ---- While it runs

    def running(self) -> bool:
        """Tell whether it goes on, after ending what can no longer go on."""
        if self.process.poll() is not None:
            return False
        now = time.monotonic()
        if now - self._looked > SUSPENDED_SECONDS:
            self._absent_since = self._stopped_since = None
            self._began += now - self._looked
        self._looked = now
        why = self._beyond_hope(now)
        if why is not None:
            self.killed_for = why
            self.kill()
        return self.process.poll() is None

    def heartbeats(self) -> list[dict[str, Any]]:
        """Return what the ranks of this launch last said."""
        found = pulse.read_heartbeats(self.run_dir).values()
        value = self.mark.partition("=")[2]
        return [
            beat
            for beat in found
            # DeepSpeed does not hand the mark on to other hosts; their token is a new one.
            if beat["supervisor"] == value
            or (beat["supervisor"] is None and beat["token"] not in {None, *self.older_tokens})
        ]

    def ask_to_stop(self, number: int) -> bool:
        """Pass a signal on to the ranks of this host; they save and leave together.

        Returns:
            False when no rank is there yet that could save anything.
        """
        beats = self.heartbeats()
        here = [beat for beat in beats if beat["machine"] == self.machine]
        sent = [processes.send(beat["pid"], number, self.mark) for beat in here]
        if any(sent):
            return True
        tokens = {beat["token"] for beat in beats if beat["state"] == "running"} - {None}
        for token in tokens:  # no rank is on this host: rank 0 looks for this file
            path = pulse.stop_path(self.run_dir, token)
            path.write_text(signal.Signals(number).name + "\n")
        return bool(tokens)

    def kill(self) -> list[int]:
        """End every process of this launch on this host, at once; return their numbers."""
        ended: set[int] = set()
        deadline = time.monotonic() + KILL_SECONDS  # one may be stuck in the kernel
        while (left := processes.marked(self.mark)) and time.monotonic() < deadline:
            ended.update(pid for pid in left if processes.send(pid, signal.SIGKILL, self.mark))
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=KILL_SECONDS)
        return sorted(ended)

    def _beyond_hope(self, now: float) -> str | None:
        """Return why this launch cannot go on, though its launcher does not notice; else None."""
        beats = self.heartbeats()
        if not beats:
            late = now - self._began > self.start_seconds
            return (
                f"no rank has shown a sign of life in {now - self._began:.0f} s" if late else None
            )
        here = [beat for beat in beats if beat["machine"] == self.machine]
        looks = [(beat, processes.look(beat["pid"])) for beat in here]
        alive = [
            (beat, process)
            for beat, process in looks
            if process and process.start_ticks == beat["start_ticks"] and process.state not in "ZX"
        ]
        self._absent_since = None if alive or not here else self._absent_since or now
        if self._absent_since is not None and now - self._absent_since > RANKS_GONE_SECONDS:
            return "its ranks have ended, and the launcher has not noticed"
        stopped = bool(alive) and all(process.state == "T" for _, process in alive)
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now - self._stopped_since > STOPPED_SECONDS:
            return self._stacks_of(alive, "every rank is stopped (SIGSTOP)")
        silent = [pair for pair in alive if self._silent(pair[0])]
        if silent and len(silent) == len(alive) and _can_write(self.run_dir / pulse.RANKS):
            return self._stacks_of(silent, "no rank has said anything for longer than allowed")
        return None

    def _silent(self, beat: dict[str, Any]) -> bool:
        if beat["limit_seconds"] == 0:
            return False  # --hang_timeout 0
        try:
            written = pulse.heartbeat_path(self.run_dir, beat["rank"]).stat().st_mtime
        except OSError:
            return False
        return time.time() - written > beat["limit_seconds"] + SILENT_SECONDS

    def _stacks_of(self, alive: list[Any], why: str) -> str:
        """Have ranks write their stacks before they are ended, and name one of them."""
        for _, process in alive:
            if processes.catches(process.pid, signal.SIGQUIT):
                processes.send(process.pid, signal.SIGQUIT, self.mark)
                processes.send(process.pid, signal.SIGCONT, self.mark)
        time.sleep(2.0)
        names = ", ".join(f"{beat['rank']} on {beat['host']} (pid {beat['pid']})"
                          for beat, _ in alive[:8])  # fmt: skip
        where = pulse.stacks_path(self.run_dir, alive[0][0]["rank"])
        return f"{why}: {names}; stacks: {where}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    # ---- How it ended

    def finish(self) -> Ending:
        """Wait for what the launcher left behind, end the rest, and say how the launch ended."""
        left = self._wait_for_left_overs()
        self._reader.join(timeout=2.0)
        events = self.new_events()
        beats = self.heartbeats()
        steps = [beat["step"] for beat in beats if beat["step"]]
        ending = Ending(self._code(events), max(steps, default=None))
        if ending.code in (EXIT_DONE, EXIT_STOPPED) and not left:
            return ending
        if self.killed_for:
            ending.reasons.append(self.killed_for)
        codes = [match.group(1) for match in map(RETURN_CODE.search, self.lines) if match]
        code = shown_code(int(codes[-1])) if codes else None
        for event in events:
            if event["event"] in ("rank_lost", "hang", "launcher_lost"):
                self._describe(event, ending, code)
        if ending.sequences is None:
            known = [beat["sequences"] for beat in beats if beat["step"] == ending.step]
            ending.sequences = next(filter(None, known), None)
        if code is not None and not ending.reasons:
            ending.reasons.append(f"a rank ended with {code}")
        if ending.code == EXIT_BUG and not ending.reasons:
            ending.reasons.append(
                f"the launcher ended with {shown_code(self.process.returncode)}, "
                f"and the run has not said that it is done"
            )
        if left:
            ending.reasons.append(f"ended what it left behind: {len(left)} processes, {left}")
        ending.lines = [line for line in self.lines if ERROR_LINE.search(line)][-8:]
        return ending

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events that the run has written during this launch."""
        events = []
        with contextlib.suppress(OSError), open(self.events_path, "rb") as file:
            file.seek(self.events_start)
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError):
                    events.append(json.loads(line))
        return events

    def _code(self, events: list[dict[str, Any]]) -> int:
        names = {event["event"] for event in events}
        if any(event.get("reason") == RUNNER_GONE for event in events):
            # The ranks saved and stopped. Did somebody ask for that, or was `deepspeed` killed?
            asked = self.process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
            return EXIT_STOPPED if asked else EXIT_BUG
        for name, code in (
            ("done", EXIT_DONE), ("stopped", EXIT_STOPPED), ("gave_up", EXIT_GAVE_UP)
        ):  # fmt: skip
            if name in names:
                return code
        code = self.process.returncode
        return code if code in (EXIT_REFUSED, EXIT_STOPPED, EXIT_GAVE_UP) else EXIT_BUG

    def _describe(self, event: dict[str, Any], ending: Ending, code: str | None) -> None:
        if event["event"] == "launcher_lost":
            ending.reasons.append(f"the launcher of {event['host']} is gone")
            return
        ending.step = event["step"]
        for rank in event["ranks"]:
            ending.sequences = rank["sequences"] if rank["step"] == event["step"] else None
            reason = rank["reason"]
            if event["event"] == "rank_lost" and event["ended"] is None and code is not None:
                reason += f" (the launcher saw {code})"
            where = f"; stacks: {rank['stacks']}" if rank["stacks"] else ""
            ending.reasons.append(
                f"rank {rank['rank']} on {rank['host']} (pid {rank['pid']}) {reason}, "
                f"in step {event['step']}{where}"
            )

    def _wait_for_left_overs(self) -> list[int]:
        """Wait until no process of this launch is left here, or end those that do not end."""
        deadline = time.monotonic() + LEFT_OVER_SECONDS
        while left := processes.marked(self.mark):
            # A node launcher that lives on means ranks that save: `deepspeed` alone was ended.
            launchers = {beat["launcher_pid"] for beat in self.heartbeats()}
            if launchers.isdisjoint(left) and time.monotonic() > deadline:
                return self.kill()
            time.sleep(POLL_SECONDS)
        return []


def shown_code(code: int) -> str:
    """Return an exit code of a process as `SIGKILL` or `exit code 1`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"


def _can_write(directory: Path) -> bool:
    try:
        (directory / "supervisor.tmp").write_text("")
        (directory / "supervisor.tmp").unlink()
    except OSError:
        return False
    return True


def _end_with_parent() -> None:
    """Have the kernel end `deepspeed` with the supervisor; the ranks see that, save and stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
