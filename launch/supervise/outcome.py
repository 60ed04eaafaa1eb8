"""Classify how a launch ended, from its events, heartbeats, output and exit code. No side effects.

The launcher's exit code alone is not trusted: `deepspeed` exits with 0 when its node launcher is
killed. The events that the run itself logged during this launch take precedence.
"""

import contextlib
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from zerolm.common.errors import EXIT_BUG, EXIT_DONE, EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED
from zerolm.common.records import Count, mismatch
from zerolm.run_dir.records import OLD_VALUE
from zerolm.watchdog.progress import Heartbeat

RUNNER_GONE = "deepspeed has ended"  # reason for a stop, as logged by zerolm/watchdog/watchdog.py
FINAL_EVENTS = {"done": EXIT_DONE, "stopped": EXIT_STOPPED, "gave_up": EXIT_GAVE_UP}
LOST_EVENTS = ("rank_lost", "hang", "launcher_lost")  # the watchdog's
# With several hosts, pdsh prefixes each line with the host's name.
RETURN_CODE = re.compile(r"(?:^(?P<host>\S+): )?.*exits with return code = (?P<code>-?\d+)")
TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? [\d,-]+: (?P<how>.+)")
SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
SYMPTOMS = ("SIGABRT", "SIGTERM", "exit code 1")  # ends of ranks that have lost a peer
ERROR_LINE = re.compile(r"(Error\b|Exception\b|refused|watchdog:|FAULT |pretrain\.py: |[Kk]illed)")
MAX_ERROR_LINES = 8


class _LostRank(TypedDict):
    rank: Count
    host: str
    pid: Count
    reason: str
    step: Count
    sequences: tuple[Count, Count] | None
    stacks: str | None


class _Lost(TypedDict):
    """The fields of a `rank_lost` or `hang` event that this module reads."""

    ended: str | None
    ranks: list[_LostRank]


class _Place(TypedDict):
    host: str


class _SlowHost(TypedDict):
    """The fields of a `slow_host` event that this module reads."""

    host: str
    slow: bool


class _Corrupted(TypedDict):
    """The fields of a `corrupted` event that this module reads."""

    reason: str
    places: list[_Place]


@dataclass
class Outcome:
    """How a launch ended.

    Attributes:
        exit_code: one of zerolm's exit codes, which may differ from the launcher's.
        step: optimizer step in progress; None if no step had started.
        sequences: (first, count) of the step's sequence numbers, if known.
        reasons: what happened, one line each.
        values_changed: refused because a value in the command, or in a file that it names, differs
            from the run's original value.
        corrupt_hosts: hosts that computed or stored wrong values.
        slow_hosts: hosts that were slower than the others when the launch ended.
        error_lines: the last lines of the launch's output that look like errors.
        downtime: additional keys for the event `attempt_failed`, from `downtime.downtime`.
    """

    exit_code: int
    step: int | None = None
    sequences: Sequence[int] | None = None
    reasons: list[str] = field(default_factory=list)
    values_changed: bool = False
    corrupt_hosts: list[str] = field(default_factory=list)
    slow_hosts: list[str] = field(default_factory=list)
    error_lines: list[str] = field(default_factory=list)
    downtime: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`in step 7`, or `before its first step`."""
        return "before its first step" if self.step is None else f"in step {self.step}"


def classify(
    returncode: int,
    events: Sequence[dict[str, Any]],
    heartbeats: Sequence[Heartbeat],
    output: Iterable[str],
    kill_reason: str | None,
    killed: Sequence[int],
    last_logged: int | None = None,
) -> Outcome:
    """Return how a launch ended.

    Args:
        returncode: the launcher's return code, as reported by `subprocess`.
        events, heartbeats: events and heartbeats of this launch only.
        output: last lines of the launcher's output.
        kill_reason: why the supervisor killed the launch; None if it did not.
        killed: IDs of processes that had to be killed after the launcher had ended.
        last_logged: step of the newest metrics.
    """
    steps = [beat["step"] for beat in heartbeats if beat["step"]]
    if steps and last_logged is not None and last_logged > max(steps):
        steps.append(last_logged + 1)  # a heartbeat may be seconds old
    output = list(output)
    outcome = Outcome(_exit_code(returncode, events, output), max(steps, default=None))
    if outcome.exit_code in (EXIT_DONE, EXIT_STOPPED) and not killed:
        return outcome
    if kill_reason:
        outcome.reasons.append(kill_reason)
    codes = _codes(output)
    newest = {
        event["host"]: event["slow"]
        for event in events
        if event["event"] == "slow_host" and not mismatch(event, _SlowHost)
    }
    outcome.slow_hosts = [host for host, slow in newest.items() if slow]
    for event in events:
        if event["event"] in LOST_EVENTS:
            _add_event(outcome, event, codes)
        elif event["event"] == "corrupted" and not mismatch(event, _Corrupted):
            outcome.reasons.append(event["reason"])
            outcome.corrupt_hosts += [place["host"] for place in event["places"]]
    if outcome.sequences is None:
        known = [beat["sequences"] for beat in heartbeats if beat["step"] == outcome.step]
        outcome.sequences = next(filter(None, known), None)
    if outcome.exit_code == EXIT_REFUSED:
        outcome.reasons += _refusal(output)
        # A changed world size does not count: hosts may come back.
        changed = [line for line in output if OLD_VALUE in line and ": world_size: " not in line]
        outcome.values_changed = bool(changed)
    saved = any(event.get("reason") == RUNNER_GONE for event in events)
    if codes and not outcome.reasons and not saved:
        outcome.reasons.append(_ended_with(codes))
    if outcome.exit_code == EXIT_BUG and not outcome.reasons:
        but = "the ranks were alive and saved" if saved else "the run logged no `done` event"
        outcome.reasons.append(f"the launcher ended with {shown_code(returncode)}, but {but}")
    if killed:
        outcome.reasons.append(f"killed {len(killed)} orphaned process(es): {list(killed)}")
    outcome.error_lines = [line for line in output if ERROR_LINE.search(line)][-MAX_ERROR_LINES:]
    return outcome


def _exit_code(returncode: int, events: Sequence[dict[str, Any]], output: Sequence[str]) -> int:
    if any(event.get("reason") == RUNNER_GONE for event in events):
        # The ranks saved and stopped because `deepspeed` ended: did it end on request, or was it
        # killed?
        for number in (signal.SIGTERM, signal.SIGHUP):
            if returncode in (-number, 128 + number):
                return EXIT_STOPPED
        return EXIT_BUG
    logged = {event["event"] for event in events}
    for name, code in FINAL_EVENTS.items():
        if name in logged:
            return code
    if returncode in (EXIT_REFUSED, EXIT_STOPPED, EXIT_GAVE_UP):
        return returncode
    # If several ranks refuse, srun kills the slower ones and returns their exit code.
    reported = {int(match["code"]) for match in map(RETURN_CODE.match, output) if match}
    return EXIT_REFUSED if EXIT_REFUSED in reported and _refusal(output) else EXIT_BUG


def _codes(output: Iterable[str]) -> dict[str | None, str]:
    """Return {host: how its first rank ended}, as reported by launchers; None is this host."""
    codes: dict[str | None, str] = {}
    for line in output:
        if match := RETURN_CODE.match(line):
            host = match["host"] and _short(match["host"])
            codes[host] = shown_code(int(match["code"]))
        elif match := TASK_ENDED.match(line):
            how = match["how"].removesuffix(" (core dumped)").replace("Exited with ", "")
            codes.setdefault(_short(match["host"]), SIGNALS.get(how, how))
    return codes


def _ended_with(codes: Mapping[str | None, str]) -> str:
    """Return how each host's ranks ended, as a message; mere loss of a peer comes last."""
    hosts = sorted(codes, key=lambda host: codes[host] in SYMPTOMS)
    clauses = [f"{f'on {host} ' if host else ''}ended with {codes[host]}" for host in hosts]
    return f"a rank {', another '.join(clauses)}"


def _refusal(output: Sequence[str]) -> list[str]:
    """Return the first problem of a refusal with the line before it; [] if none was printed."""
    first = (n for n, line in enumerate(output) if line.startswith("pretrain.py: refused"))
    return [" ".join(output[n : n + 2]) for n in first][-1:]


def _add_event(outcome: Outcome, event: dict[str, Any], codes: Mapping[str | None, str]) -> None:
    """Add the reasons from a watchdog event.

    Args:
        codes: {host: how one of its ranks ended}, as reported by the launchers; None is this host.
    """
    if event["event"] == "launcher_lost":
        outcome.reasons.append(f"the node launcher on {event.get('host')} has ended")
        return
    if mismatch(event, _Lost):
        return
    outcome.step = max(outcome.step or 0, event["step"])
    if not event["ranks"] and event.get("reason"):
        outcome.reasons.append(f"{event['reason']}, in step {outcome.step}")
    for rank in event["ranks"]:
        outcome.sequences = rank["sequences"] if rank["step"] == event["step"] else None
        reason = rank["reason"]
        rank_exit = codes.get(_short(rank["host"]), codes.get(None))
        if event["event"] == "rank_lost" and event["ended"] is None and rank_exit is not None:
            reason += f" (the launcher reported {rank_exit})"
        stacks = f"; stacks: {rank['stacks']}" if rank["stacks"] else ""
        outcome.reasons.append(
            f"rank {rank['rank']} on {rank['host']} (pid {rank['pid']}) {reason}, "
            f"in step {outcome.step}{stacks}"
        )


def _short(host: str) -> str:
    return host.partition(".")[0]


def shown_code(code: int) -> str:
    """Format a process's return code, as in `SIGKILL` or `exit code 1`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"
