"""Determine from the heartbeats of all ranks which ranks hang.

A rank that waits in a collective is held up by another rank. Each rank numbers the collectives in a
process group, so the numbers show which rank waits for which, even if a rank waits for its device
outside any collective, as with NCCL. The following ranks are blamed:

- a rank that entered a collective whose kind or size differs from the other ranks' collective with
  the same number;
- a rank that has not entered a collective in which others wait, and that waits for no other rank;
- a rank without progress that does not wait in a collective, while no rank is behind another;
- no rank, if all ranks have entered the same collectives but these do not finish.

Clocks of different hosts are never compared. Every rank that reads the same heartbeats reaches the
same verdict. No side effects.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Heartbeat = Mapping[str, Any]
CONTEXT = 8
MAX_CONTEXT = 64  # number of calls before a mismatch to compare with earlier steps
MAX_NAMED = 8  # maximum number of ranks or hosts to list in a message


class Verdict(NamedTuple):
    """Why the run hangs.

    Attributes:
        blamed: {blamed rank: description}; empty if the communication is at fault.
        reason: description of the collective that all ranks wait for, if no rank is blamed.
        witnesses: the ranks whose heartbeats support the verdict.
    """

    blamed: dict[int, str]
    reason: str
    witnesses: list[int]


class _Member(NamedTuple):
    """A rank's state in a process group."""

    rank: Heartbeat
    group: Mapping[str, Any]


def find_hung_ranks(heartbeats: Iterable[Heartbeat], complete: bool = True) -> Verdict | None:
    """Return a verdict about the ranks that hang, or None if the run may only be slow.

    Args:
        heartbeats: heartbeats of all ranks that have not ended. Keys used: `rank`, `host`,
            `quiet_seconds` (time since the rank's last progress), `limit_seconds` (time allowed
            without progress in the rank's phase), `waiting` (whether the rank is inside a
            collective), `doing`, `groups`, `calls`.
        complete: whether every rank is included; a missing rank may be making progress.
    """
    ranks = sorted(heartbeats, key=_number)
    overdue = [rank for rank in ranks if rank["quiet_seconds"] > rank["limit_seconds"]]
    if not overdue:
        return None
    members: dict[str, list[_Member]] = defaultdict(list)
    for rank in ranks:
        for name, group in rank["groups"].items():
            members[name].append(_Member(rank, group))
    if (verdict := _mismatch(members)) is not None:
        return verdict

    lacks, held_up = _behind_and_ahead(members)
    roots = lacks.keys() - held_up.keys()
    if lacks:
        culprits = [rank for rank in overdue if _number(rank) in roots and not rank["waiting"]]
    else:
        culprits = [rank for rank in overdue if not _waits(rank)]
        if len(culprits) == len(ranks) > 1 and members and not _finished_known(ranks):
            culprits = []  # they may be waiting for their devices
    if not culprits and len(overdue) == len(ranks) and complete:
        culprits = [rank for rank in ranks if _number(rank) in roots]
    if culprits:
        waiting = [_number(rank) for rank in ranks if rank not in culprits and _waits(rank)]
        blamed = {
            _number(rank): _account(rank, lacks.get(_number(rank)), members, waiting)
            for rank in culprits
        }
        return Verdict(blamed, "", list(blamed))
    if len(overdue) < len(ranks) or not complete:
        return None  # a rank that others wait for makes progress or has time left
    everyone = [_number(rank) for rank in ranks]
    if lacks:  # a cycle, in which every rank waits for another
        circle = [rank for rank in ranks if _number(rank) in held_up]
        return Verdict(_out_of_order(circle, held_up), "", everyone)
    if (late := _late_devices(members)) is not None:
        return Verdict(late, "", everyone)
    return Verdict({}, _communication(ranks, members), everyone)


def _behind_and_ahead(
    groups: Mapping[str, list[_Member]],
) -> tuple[dict[int, str], dict[int, tuple[str, int]]]:
    """Return the ranks that are behind others, and the ranks that are ahead of others.

    If a rank is behind or ahead in several groups, the group with the most ranks is returned.

    Returns:
        {rank: group in which it is behind}, and {rank: (group, number) of a collective that it has
        entered and others have not}.
    """
    behind: dict[int, str] = {}
    ahead: dict[int, tuple[str, int]] = {}
    for name, members in sorted(groups.items(), key=lambda item: len(item[1])):
        entered = [member.group["entered"] for member in members]
        for member in members:
            if member.group["entered"] > min(entered):
                ahead[_number(member.rank)] = (name, min(entered) + 1)
            elif max(entered) > min(entered):
                behind[_number(member.rank)] = name
    return behind, ahead


# -------------------------------------------------------------------------------------------------
# Each kind of hang


def _mismatch(groups: Mapping[str, list[_Member]]) -> Verdict | None:
    """Blame the ranks whose collective differs from other ranks' collective of the same number."""
    for name, members in groups.items():
        finished = min(member.group["finished"] or 0 for member in members)
        calls = {_number(member.rank): _calls(member.rank, name) for member in members}
        for number in sorted(set().union(*calls.values())):
            callers = {rank: known[number] for rank, known in calls.items() if number in known}
            if number <= finished or len(set(callers.values())) == 1:
                continue
            ranks = [member.rank for member in members if _number(member.rank) in callers]
            wrong = _unusual(callers, {_number(rank): (rank, name, number) for rank in ranks})
            where = f"collective {number} of {_named(members)}"
            right = [rank for rank in callers if rank not in wrong]
            other = f" where {_list('rank', right)} entered {callers[right[0]]}" if right else ""
            blamed = {rank: f"entered {callers[rank]}{other} ({where})" for rank in wrong}
            return Verdict(blamed, "", list(callers))
    return None


def _out_of_order(
    ranks: Sequence[Heartbeat], held_up: Mapping[int, tuple[str, int]]
) -> dict[int, str]:
    """Blame ranks that called collectives of several groups in another order than the other ranks.

    Args:
        ranks: heartbeats of ranks that wait for each other.
        held_up: {rank: (group, number) of the collective in which it waits}.
    """
    calls = {_number(rank): (rank, *held_up[_number(rank)]) for rank in ranks}
    wrong = _unusual({rank: name for rank, (_, name, _) in calls.items()}, calls)
    return {
        rank: f"entered {_calls(beat, name).get(number, 'a collective')} in a different process "
        f"group from the ranks that wait for it"
        for rank, (beat, name, number) in calls.items()
        if rank in wrong
    }


def _unusual(
    values: Mapping[int, str], calls: Mapping[int, tuple[Heartbeat, str, int]]
) -> list[int]:
    """Return the ranks whose value is not the most common one, or all ranks if this is undecided.

    If several values are equally common, the value of the ranks whose calls best match earlier
    steps is considered correct.

    Args:
        values: {rank: value}.
        calls: {rank: (heartbeat, group of its call, number of its call)}.
    """
    (usual, most), *others = Counter(values.values()).most_common()
    right = {usual}
    if any(count == most for _, count in others):
        ranks = {value: rank for rank, value in values.items()}
        known = {value: _familiarity(*calls[rank]) for value, rank in ranks.items()}
        right = {value for value in known if known[value] == max(known.values())}
    wrong = [rank for rank, value in values.items() if value not in right]
    return wrong or list(values)


def _familiarity(rank: Heartbeat, name: str, number: int) -> tuple[int, int]:
    """Return how well a call and the calls before it match an earlier sequence of the rank's calls.

    Args:
        rank: the rank's heartbeat.
        name, number: group and number of the call.

    Returns:
        (length of the longest match, number of matches with at least `CONTEXT` calls).
    """
    history = [(group, kind) for group, _, kind in rank["calls"]]
    numbers = [(group, each) for group, each, _ in rank["calls"]]
    if (name, number) not in numbers:
        return 0, 0
    at = numbers.index((name, number))
    lengths = [0]
    for end in range(at):
        length = 0
        while length <= min(end, MAX_CONTEXT) and history[end - length] == history[at - length]:
            length += 1
        lengths.append(length)
    return max(lengths), sum(length >= CONTEXT for length in lengths)


def _account(
    rank: Heartbeat, name: str | None, groups: Mapping[str, list[_Member]], waiting: Sequence[int]
) -> str:
    """Describe what a rank without progress is doing, and which ranks wait for it.

    Args:
        name: the group in which the rank is behind others, if any.
        waiting: the ranks that wait in a collective.
    """
    text = f"has made no progress for {rank['quiet_seconds']:.0f} s"
    text += f" ({rank['doing']})" if rank.get("doing") else ""
    if name is None:
        return text + (f"; waiting in a collective: {_list('rank', waiting)}" if waiting else "")
    number = min(member.group["entered"] for member in groups[name]) + 1
    ahead = [member.rank for member in groups[name] if member.group["entered"] >= number]
    call = next(filter(None, (_calls(each, name).get(number) for each in ahead)), "a collective")
    others = _list("rank", list(map(_number, ahead)))
    return (
        f"{text}; waiting for it in {call}, collective {number} of {_named(groups[name])}: {others}"
    )


def _late_devices(groups: Mapping[str, list[_Member]]) -> dict[int, str] | None:
    """Blame ranks whose device has not started a collective that other devices have started."""
    for members in groups.values():
        started = {_number(each.rank): each.group["started"] for each in members}
        if None in started.values() or len(set(started.values())) == 1:
            continue
        least = min(started.values())
        return {
            rank: f"has entered collective {least + 1} of {_named(members)}, but unlike other "
            f"devices its device has not begun it: it is stuck in an earlier kernel"
            for rank, number in started.items()
            if number == least
        }
    return None


def _communication(ranks: list[Heartbeat], groups: Mapping[str, list[_Member]]) -> str:
    """Return a message that names the collective that does not finish, and its hosts."""
    what, members = "a collective", [_Member(rank, {}) for rank in ranks]
    for name, group in groups.items():
        pending = [each for each in group if _unfinished(each.group)]
        if pending:
            first = min(each.group["finished"] for each in pending) + 1
            call = next(filter(None, (_calls(each.rank, name).get(first) for each in pending)), "")
            what, members = f"{call}, collective {first}", group
            break
    hosts = list(dict.fromkeys(member.rank["host"] for member in members))
    return (
        f"{_named(members)} on {_list('host', hosts)} have all entered {what}, but it does not "
        f"finish: the network or the links between the devices are at fault, not a rank"
    )


# -------------------------------------------------------------------------------------------------
# Values from heartbeats


def _number(rank: Heartbeat) -> int:
    return rank["rank"]


def _calls(rank: Heartbeat, name: str) -> dict[int, str]:
    """Return {number: kind and size} for a rank's last collectives in a group."""
    return {number: call for group, number, call in rank["calls"] if group == name}


def _unfinished(group: Mapping[str, Any]) -> bool:
    return group["finished"] is not None and group["entered"] > group["finished"]


def _waits(rank: Heartbeat) -> bool:
    return rank["waiting"] or any(_unfinished(group) for group in rank["groups"].values())


def _finished_known(ranks: Iterable[Heartbeat]) -> bool:
    return any(g["finished"] is not None for rank in ranks for g in rank["groups"].values())


def _named(members: Sequence[_Member]) -> str:
    return _list("rank", [_number(member.rank) for member in members])


def _list(noun: str, values: Sequence[int | str]) -> str:
    """Return `rank 1`, `ranks 0, 1` or `ranks 0, 1 ... (512)`."""
    shown = ", ".join(map(str, values[:MAX_NAMED]))
    more = f" ... ({len(values)})" if len(values) > MAX_NAMED else ""
    return f"{noun}{'s' if len(values) > 1 else ''} {shown}{more}"
