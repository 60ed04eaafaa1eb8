"""Fewer passes over memory change no bit of weights, master weights and moments."""

import json
from pathlib import Path

import pytest

from tests.launching import run_workers


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_steps_with_fewer_passes_over_memory_are_the_same_in_every_bit(tmp_path, ranks):
    output = tmp_path / "report.json"
    run_workers(ranks, Path(__file__).with_name("gradient_sums_worker.py"), output)
    for stage, found in json.loads(output.read_text()).items():
        assert found["different"] == [], f"stage {stage}"
        assert found["norms"][0] == found["norms"][1] > 1, f"stage {stage}"
        assert found["left"] == [], f"stage {stage}: gradients kept beside their sums"
