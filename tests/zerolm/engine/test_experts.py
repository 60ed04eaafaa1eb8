"""A parameter that is divided over ranks, beside one that all have, in DeepSpeed's engine."""

import json
from pathlib import Path

import pytest

from tests.launching import run_workers


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    output = tmp_path_factory.mktemp("experts") / "report.json"
    run_workers(4, Path(__file__).with_name("experts_worker.py"), output)
    return json.loads(output.read_text())


@pytest.mark.parametrize("way", ["owners", "one call", "ZeRO-3"])
def test_each_gradient_is_reduced_over_the_ranks_that_have_the_parameter(report, way):
    """And divided by the number of all ranks, whose tokens it is from."""
    assert report[way]["worst"] < 1e-6
    assert report[way]["values"] == {"dense": 35, "experts": 90}, "each value is on one rank"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_gathered_parameter_is_whole_and_a_set_one_has_its_slice(report, stage):
    found = report[stage]
    assert found["gathered"] and found["dense"] and found["changed"] and found["set"]


@pytest.mark.parametrize("stage", ["1", "3"])
def test_the_norm_of_the_weights_counts_each_value_once(report, stage):
    found, expected = report[stage]["norm"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_zero_3_partitions_a_slice_over_the_ranks_that_have_it(report):
    """Ranks 0 and 2 have the first 45 values, 23 and 22 of them."""
    assert report["3"]["start"] == [0, 45, 23, 68]


def test_ranks_with_other_weights_than_their_copies_are_named(report):
    """A rank of four in the majority against rank 2; of experts there are only two copies."""
    assert report["named"] == [
        [False, True, [[2], [], []]],
        [False, True, [[], [], [1, 3]]],
    ]
