"""Which ranks are blamed, from heartbeats alone; `tests.injected_hangs` has real processes."""

from typing import Any

from zerolm.watchdog.hang_detection import Verdict, find_hung_ranks

LIMIT = 600.0
WORLD, HALF = "0/0", "1/0"


def group(entered: int, finished: int | None = None, started: int | None = None) -> Any:
    return {"entered": entered, "finished": finished, "started": started}


def beat(rank: int, quiet: float = 700, waiting: bool = False, calls: Any = (), **groups: Any):
    return {
        "rank": rank, "host": f"node{rank // 2}", "quiet_seconds": quiet, "limit_seconds": LIMIT,
        "waiting": waiting, "doing": "read in windows.py:7", "calls": calls,
        "groups": {{"world": WORLD, "half": HALF}[name]: each for name, each in groups.items()},
    }  # fmt: skip


def verdict(*beats: dict[str, Any]) -> Verdict:
    found = find_hung_ranks(beats)
    assert found is not None
    return found


def blamed(*beats: dict[str, Any]) -> list[int] | None:
    found = find_hung_ranks(beats)
    return None if found is None else list(found.blamed)


def stalled(
    rank: int, entered: int, finished: int | None = None, started: Any = None, calls: Any = ()
) -> dict[str, Any]:
    """Return the heartbeat of a rank that waits in `.tolist()`, as all do with NCCL.

    Args:
        calls: kinds of the last collectives; the last one is number `entered`.
    """
    first = entered - len(calls) + 1
    numbered = [(WORLD, first + number, call) for number, call in enumerate(calls)]
    return beat(rank, calls=numbered, world=group(entered, finished, started))


def test_a_rank_that_has_entered_fewer_collectives_is_blamed() -> None:
    for finished in (None, 4):  # the flight recorder may be off
        ranks = [stalled(0, 9, finished), stalled(1, 5, finished), stalled(2, 9, finished)]
        assert blamed(*ranks) == [1]
        assert blamed(*(rank | {"waiting": rank["rank"] != 1} for rank in ranks)) == [1]


def test_no_rank_is_blamed_while_the_one_that_is_behind_works() -> None:
    slow = beat(1, 300, world=group(5))
    assert blamed(stalled(0, 9), slow, stalled(2, 9)) is None
    writes = slow | {"quiet_seconds": 0.0}  # bytes count as progress: see ProgressMonitor
    assert blamed(stalled(0, 9), writes, stalled(2, 9)) is None


def test_a_message_names_the_collective_that_others_wait_for() -> None:
    found = verdict(
        stalled(0, 6, 4, calls=["gather of 7 Float", "all_reduce of 5 Double"]), stalled(1, 4, 4)
    )
    assert found.blamed == {
        1: "has made no progress for 700 s (read in windows.py:7); waiting for it in gather of 7 "
        "Float, collective 5 of ranks 0, 1: rank 0"
    }


def test_the_first_cause_is_found_through_several_groups() -> None:
    """Rank 3 sleeps; 2 waits for it in their half; 0 and 1 wait for 2 and 3 in the world."""
    assert blamed(
        beat(0, world=group(8, 7)), beat(1, world=group(8, 7)),
        beat(2, world=group(7, 7), half=group(3, 2)), beat(3, world=group(7, 7), half=group(2, 2)),
    ) == [3]  # fmt: skip


def test_of_ranks_that_wait_for_each_other_the_one_that_changed_the_order_is_blamed() -> None:
    first, second = (WORLD, "gather"), (HALF, "sum")
    right = [(*first, 5), (*second, 5), (*first, 6), (*second, 6), (*first, 7)]
    wrong = [*right[:4], (*second, 7)]
    for victim in (0, 1):
        ranks = []
        for rank in (0, 1):
            calls = wrong if rank == victim else right
            world, half = (6, 7) if rank == victim else (7, 6)
            numbered = [(name, number, kind) for name, kind, number in calls]
            ranks.append(beat(rank, calls=numbered, world=group(world, 6), half=group(half, 6)))
        found = verdict(*ranks)
        assert list(found.blamed) == [victim]
        assert found.blamed[victim].startswith("entered sum in a different process group")
        assert blamed(*(rank | {"calls": []} for rank in ranks)) == [0, 1], "not known"


def test_the_rank_with_another_collective_under_the_same_number_is_blamed() -> None:
    right, wrong = ["a", "b", "c"], ["a", "x", "c"]
    ranks = [stalled(rank, 9, 6, calls=wrong if rank == 2 else right) for rank in range(4)]
    found = verdict(*ranks)
    assert found.blamed == {
        2: "entered x where ranks 0, 1, 3 entered b (collective 8 of ranks 0, 1, 2, 3)"
    }
    done = [rank | {"groups": {WORLD: group(9, 8)}} for rank in ranks]
    assert blamed(*done) == [], "it has finished on all ranks, so it did match"


def test_of_two_ranks_the_one_that_leaves_the_pattern_of_the_steps_is_blamed() -> None:
    step = ["gather", "scatter", "sums"]
    skips = [*step, *step, "gather", "sums"]
    goes_on = [*step, *step, "gather", "scatter"]
    for wrong in (0, 1):
        ranks = [stalled(rank, 8, 7, calls=skips if rank == wrong else goes_on) for rank in (0, 1)]
        assert blamed(*ranks) == [wrong]
        step = ["a", "a", "b", "b"]  # the first `a` is skipped, which shows in the second
        ends = [["a", "b"] if rank == wrong else ["a", "a"] for rank in (0, 1)]
        ranks = [stalled(rank, 10, 8, calls=[*step, *step, *ends[rank]]) for rank in (0, 1)]
        assert blamed(*ranks) == [wrong], "`a, b` is known, but not after `b`"
    unknown = [stalled(0, 1, 0, calls=["gather"]), stalled(1, 1, 0, calls=["sums"])]
    assert blamed(*unknown) == [0, 1], "the first collective of a run shows no pattern"


def test_a_device_that_has_not_begun_what_others_have_is_blamed() -> None:
    ranks = [stalled(rank, 9, 7, started=8 if rank == 1 else 9) for rank in range(3)]
    found = verdict(*ranks)
    assert list(found.blamed) == [1] and "its device has not begun it" in found.blamed[1]


def test_no_rank_is_blamed_if_what_all_have_entered_does_not_finish() -> None:
    ranks = [stalled(rank, 9, 7, calls=["gather of 5 Float", "sums"]) for rank in range(4)]
    found = verdict(*ranks)
    assert found.blamed == {} and found.witnesses == [0, 1, 2, 3]
    assert found.reason.startswith(
        "ranks 0, 1, 2, 3 on hosts node0, node1 have all entered gather of 5 Float, collective 8, "
        "but it does not finish"
    )
    early = ranks[0] | {"quiet_seconds": 500.0}
    assert blamed(early, *ranks[1:]) is None, "one has time left"
    assert find_hung_ranks(ranks[1:], complete=False) is None, "one is missing"
    for waiting in (False, True):  # without the flight recorder
        found = verdict(*(stalled(rank, 9) | {"waiting": waiting} for rank in range(4)))
        assert found.blamed == {} and "does not finish" in found.reason


def test_a_rank_that_waits_for_no_other_is_blamed_if_none_is_behind() -> None:
    ranks = [stalled(0, 9, 8), stalled(1, 9, 9), stalled(2, 9, 8)]
    assert blamed(*ranks) == [1]
    assert blamed(stalled(0, 9, 9), stalled(1, 9, 9)) == [0, 1], "a file system is gone"


def test_a_single_rank_can_be_blamed() -> None:
    assert blamed(beat(0)) == [0]
    assert blamed(beat(0, world=group(9, 9))) == [0]
    assert blamed(beat(0, 500)) is None
