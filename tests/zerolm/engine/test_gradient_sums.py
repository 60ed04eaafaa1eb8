"""Fewer passes over memory, and half of the bytes between ranks, change no bit of a curve."""

import json
from pathlib import Path

import pytest

from tests.launching import run_workers
from zerolm.engine.reduction_choice import pieces_save_time, small_pieces_pay


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)]
)
def test_steps_are_those_of_deepspeed_and_reduce_half_of_the_bytes(tmp_path, ranks):
    output = tmp_path / "report.json"
    run_workers(ranks, Path(__file__).with_name("gradient_sums_worker.py"), output)
    reports = json.loads(output.read_text())
    for name, found in reports.items():
        # The order of a sum of two values does not matter.
        limit = 0.0 if ranks <= 2 else 1e-6
        assert max(found["different"].values(), default=0.0) <= limit, name
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=limit), name
        assert found["norms"][0] > 1
        assert found["left"] == [], f"{name}: gradients kept beside their sums"
        is_ours = name.startswith("1") and name != "1, true" and ranks > 1
        assert (found["early"] is not None) == is_ours, name
    if ranks == 1:
        return
    # An all-reduce sends each value twice.
    sent = {name: found["sent"] for name, found in reports.items()}
    for stage, values in (("1", 1.0), ("2", 1.68)):
        assert sent[f"{stage}, true"][0] == sent[f"{stage}, true"][1], "what the key asks for"
        assert sent[f"{stage}, false"] == sent[f"{stage}, a call for each owner"]
        usual, ours = sent[f"{stage}, a call for each owner"]
        assert usual["all_reduce values"] == pytest.approx(values, abs=0.01)
        assert ours["reduce values"] == pytest.approx(values, abs=0.01)
        assert ours.get("all_reduce values", 0) < 0.01, "once: which buckets are complete"
    assert sent["1, a call for all"][1] == {
        "reduce_scatter_tensor calls": 1.0, "reduce_scatter_tensor values": 1.0,
    }  # fmt: skip
    usual, ours = sent["2, a call for all"]
    assert ours == usual, "DeepSpeed's all-reduce"
    early, buckets = reports["1, a call for each owner"]["early"]
    assert 0 < early < buckets, "not those of a weight without a gradient, which come last"


def test_one_collective_for_all_is_used_where_many_would_wait_for_each_other():
    billion, buckets = 10**9, 20
    for ranks, pays in ((8, True), (64, True), (512, False), (1024, False)):
        assert small_pieces_pay(billion, buckets + ranks, ranks) == pays
    assert small_pieces_pay(70 * billion, 1400 + 128, 128)


def test_stage_2_reduces_to_owners_where_latency_is_less_than_the_bytes_that_it_saves():
    values, calls = 6_738_415_616, 135  # a 7B in buckets of 50M
    for ranks, saves in ((16, True), (32, True), (64, False), (256, False)):
        assert pieces_save_time(values, calls + 2 * ranks, ranks, ranks // 8) == saves
    assert pieces_save_time(values, calls + 128, 64, 64), "hosts of one device each"
