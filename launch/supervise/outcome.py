"""Classify how a launch ended, from its events, heartbeats, output and exit code. No side effects.

The launcher's exit code alone is not reliable: `deepspeed` exits with 0 when its node launcher is
killed. The events that the run itself logged during the launch take precedence.
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
LOST_EVENTS = ("rank_lost", "hang", "launcher_lost")  # logged by the watchdog
# With several hosts, pdsh prefixes each line with the host's name.
RETURN_CODE = re.compile(r"(?:^(?P<host>\S+): )?.*exits with return code = (?P<code>-?\d+)")
TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? [\d,-]+: (?P<how>.+)")
SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
SYMPTOMS = ("SIGABRT", "SIGTERM", "exit code 1")  # how ranks end that have lost a peer
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
        step: optimizer step that was in progress; None if no step had started.
        sequences: (number of the step's first sequence, number of sequences), if known.
        reasons: what happened, one line per reason.
        values_changed: whether the launch was refused because a value in the command, or in a file
            that it names, differs from the run's original value.
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
        """Where the launch ended, such as `in step 7` or `before its first step`."""
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
    """Classify how a launch ended.

    Args:
        returncode: the launcher's return code, as reported by `subprocess`.
        events, heartbeats: events and heartbeats of this launch only.
        output: last lines of the launcher's output.
        kill_reason: why the supervisor killed the launch; None if it did not kill it.
        killed: IDs of processes that had to be killed after the launcher had exited.
        last_logged: last step in the run's metrics; None if there are no metrics.
    """
    steps = [beat["step"] for beat in heartbeats if beat["step"]]
    if steps and last_logged is not None and last_logged > max(steps):
        steps.append(last_logged + 1)  # heartbeats may be seconds old
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
        # A changed world size does not count, since hosts may return.
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
        # The ranks saved and stopped because `deepspeed` ended, either on request or because it was
        # killed.
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
    """Return {host: how a rank on it ended}, as reported by the launchers; None means this host."""
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
    """Return a message about how a rank ended on each host; mere symptoms are listed last."""
    hosts = sorted(codes, key=lambda host: codes[host] in SYMPTOMS)
    clauses = [f"{f'on {host} ' if host else ''}ended with {codes[host]}" for host in hosts]
    return f"a rank {', another '.join(clauses)}"


def _refusal(output: Sequence[str]) -> list[str]:
    """Return the first problem of the last refusal in the output, as a list of one reason.

    It includes the line `pretrain.py: refused`, which precedes the problem. Return [] if the output
    contains no refusal.
    """
    first = (n for n, line in enumerate(output) if line.startswith("pretrain.py: refused"))
    return [" ".join(output[n : n + 2]) for n in first][-1:]


def _add_event(outcome: Outcome, event: dict[str, Any], codes: Mapping[str | None, str]) -> None:
    """Add the reasons in a watchdog event to the outcome.

    Args:
        codes: {host: how a rank on it ended}, from `_codes`.
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
        stage = f", stage {rank['stage']}" if rank.get("stage") else ""
        outcome.reasons.append(
            f"rank {rank['rank']} on {rank['host']} (pid {rank['pid']}{stage}) {reason}, "
            f"in step {outcome.step}{stacks}"
        )


def _short(host: str) -> str:
    return host.partition(".")[0]


def shown_code(code: int) -> str:
    """Format a process's return code, such as `SIGKILL` or `exit code 1`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"
