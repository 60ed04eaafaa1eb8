"""States sharded inside groups of ranks: the curve of ZeRO-1 over all, and equal copies."""

import json
from pathlib import Path

import pytest

from tests.launching import run_workers


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    output = tmp_path_factory.mktemp("shard_groups") / "report.json"
    run_workers(4, Path(__file__).with_name("shard_groups_worker.py"), output)
    return json.loads(output.read_text())


@pytest.mark.parametrize("way", ["groups", "groups, one call"])
def test_steps_are_those_without_groups_and_copies_have_the_same_bits(reports, way):
    usual, found = reports["all"], reports[way]
    assert max(found["different"].values()) < 1e-5, "only rounding"
    for ours, theirs in zip(found["norms"][0], usual["norms"][0], strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), rel=1e-5)
    assert found["update"] == pytest.approx(usual["update"], rel=1e-4)
    assert all(norms == found["norms"][0] for norms in found["norms"]), "a bit decides of clipping"
    first, second, third, fourth = found["states"]
    assert first == third and second == fourth, "the copies of a partition"
    assert first["exp_avg 0"] != second["exp_avg 0"], "two partitions"
    assert len({states["weights 0"] for states in found["states"]}) == 1


@pytest.mark.parametrize(
    ("way", "inside"), [("groups", "reduce"), ("groups, one call", "reduce_scatter_tensor")]
)
def test_only_the_partition_is_sent_between_groups_once_a_step(reports, way, inside):
    sent = reports[way]["sent"]
    assert sent[f"{inside}, near"] == pytest.approx(1.0, abs=0.02)
    assert sent["all_gather_into_tensor, near"] == pytest.approx(1.0, abs=0.02)
    assert sent["all_reduce, far"] == pytest.approx(0.5, abs=0.02), "half of the values: a part"
    rest = {name: values for name, values in sent.items() if not name.startswith(inside)}
    del rest["all_gather_into_tensor, near"], rest["all_reduce, far"]
    assert sum(rest.values()) < 0.02, "once: which buckets are complete"
    assert set(reports["all"]["sent"]) == {
        "reduce, all",
        "all_gather_into_tensor, all",
        "all_reduce, all",
    }


def test_a_copy_of_a_state_that_has_another_bit_is_found(reports):
    assert reports["groups"]["equal"] == [True, False]
    assert reports["all"]["equal"] == [True, True], "each state is there once"
