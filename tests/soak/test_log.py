"""The campaign's log: what is left to do after an interruption, and its table."""

import random

import pytest

from tests.launching import environment
from tests.soak import comparison, configurations, kills, log
from tests.soak.campaign import Campaign
from tests.soak.chunk import performed
from tests.soak.kills import KINDS, Kill
from zerolm.common import faults
from zerolm.preflight import check


def entry(number: int, kinds: list[str], differences: list[str] | None = None) -> log.Chunk:
    hit = [
        Kill(kind, 7, 0, at_step=7, recovered_seconds=10.0 + place, reported_seconds=0.5,
             parts={"imports": 4.0})
        for place, kind in enumerate(kinds)
    ]  # fmt: skip
    return {
        "chunk": number, "configuration": f"zero{number}", "commit": "0123456789", "starts": 1,
        "date": "2026-11-23 07:00", "machine": "CPU", "steps": 100, "seconds": 60.0,
        "training_seconds": 15.0 * len(hit), "kills": performed(hit),
        "differences": differences or [], "problems": [],
        "recoveries": [{"seconds": 9.0, "repeated_steps": 3, "parts": {"noticed": 2.0}}],
    }  # fmt: skip


def test_a_campaign_continues_after_the_chunks_in_its_log(tmp_path):
    path = tmp_path / "results" / "kills.jsonl"
    assert log.read(path) == [] and log.next_number([]) == 0
    first, third = entry(0, ["one rank"] * 9), entry(2, ["stop"], ["rows: step 3"])
    log.append(path, first)
    with open(path, "a") as file:
        file.write('{"chunk": 1, "kil')  # the machine stopped
    assert log.read(path) == [first]
    log.append(path, third)
    assert log.read(path) == [first, third], "the line that was cut off is repeated, no other"
    campaign = Campaign(tmp_path, path, num_kills=11, steps=100)
    assert [campaign.next_chunk(), campaign.next_chunk()] == [1, 3]
    campaign.running.clear()
    assert campaign.next_chunk() == 1, "a chunk that was interrupted is repeated"
    assert Campaign(tmp_path, path, num_kills=10, steps=100).next_chunk() is None, "enough kills"
    late = Campaign(tmp_path, path, num_kills=11, steps=100, until=0.0)
    assert late.next_chunk() is None, "no time is left"


def test_the_table_counts_kills_by_kind_and_runs_that_differ():
    chunks = [
        entry(2, ["one rank", "stop", "one rank"]),
        entry(3, ["stop"], ["row 7: 1, expected 2"]),
    ]
    lines = log.table(chunks, "python -m tests.soak").splitlines()
    assert any("4 kills in 2 runs" in line and "every 15 s" in line for line in lines)
    assert any("1 of 2 runs are equal" in line for line in lines)
    assert {"| one rank | 2 | 2 |", "| stop | 2 | 1 |", "| zero3 | 1 | 0 |"} <= set(lines)
    assert "| kill to next step | 4 | 10.5 | 12.0 |" in lines
    assert "| start: imports | 4 | 4.0 | 4.0 |" in lines
    assert {
        "| failure to next new step | 2 | 9.0 | 9.0 |",
        "| of that: noticed | 2 | 2.0 | 2.0 |",
    } <= {*lines}
    assert "- run 3 (zero3): row 7: 1, expected 2" in lines


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_every_kind_once_before_any_twice(seed):
    configuration = random.Random(seed).choice(configurations.ROTATION)
    kinds = kills.applicable(configuration, is_root=True)
    ranks = configuration.ranks
    plan = kills.planned(random.Random(seed), kinds, ranks, 4000, len(kinds))
    assert sorted(kill.kind for kill in plan) == sorted(kinds)
    again = kills.planned(random.Random(seed), kinds, ranks, 4000, len(kinds))
    assert plan == again, "an interrupted chunk is repeated with the same kills"
    injected = [kill.detail for kill in plan if KINDS[kill.kind].fault]
    assert len(set(injected)) == len(faults.parse_faults(",".join(injected))) == len(injected)
    assert [kill.step for kill in plan] == sorted(kill.step for kill in plan)
    everything = {kind for each in configurations.ROTATION for kind in kills.applicable(each, True)}
    assert everything == set(KINDS)


def test_the_preflight_accepts_every_configuration(tmp_path):
    configurations.write_data(tmp_path / "data")
    for each in configurations.ROTATION:
        flags = configurations.flags(each, tmp_path, tmp_path / "run", 4000)
        ranks = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(each.ranks))
        alone = {**environment(), **ranks}
        check.check([*map(str, flags), "--check"], alone)


def test_a_difference_in_any_part_is_found():
    parts = ("rows", "progress", "tensors", "sequences", "replays")
    reference = {part: {"a": "1", "b": "2"} for part in parts}
    assert comparison.differences(reference, reference) == []
    for part in parts:
        for ours in ({"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "3"}):
            assert len(comparison.differences({**reference, part: ours}, reference)) == 1


def test_every_metric_but_times_and_memory_is_compared(tmp_path):
    row = '{"step": 1, "tokens": 9, "train/loss": 0.1, "throughput/step_seconds": 2, "new": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(row)
    keys = {key.partition(": ")[2] for key in comparison.rows(tmp_path)}
    assert keys == {"tokens", "train/loss", "new"}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(row)
    with pytest.raises(AssertionError, match=r"step 1: train/loss was logged twice"):
        comparison.rows(tmp_path)


def test_a_step_that_is_repeated_with_other_sequences_is_found(tmp_path):
    same = '{"step": 1, "sequences": [1], "sources": [0]}\n'
    (tmp_path / "rank-00000.jsonl").write_text(same + same)
    assert comparison.read_ledger(tmp_path)[1] == {}
    (tmp_path / "rank-00000.jsonl").write_text(same + same.replace("[1]", "[2]"))
    assert list(comparison.read_ledger(tmp_path)[1]) == ["rank-00000, step 1"]
