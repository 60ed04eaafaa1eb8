"""The bytes that a plan assumes for gradients and the optimizer are those of DeepSpeed."""

import json
from pathlib import Path

import pytest

from launch.estimate import step_time
from tests.launching import run_workers

ACCUMULATION = 4  # in the worker


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_moves_the_bytes_that_the_plan_assumes(tmp_path, ranks):
    output = tmp_path / "moved.json"
    run_workers(ranks, Path(__file__).with_name("moved_bytes_worker.py"), output)
    found = {int(stage): each for stage, each in json.loads(output.read_text()).items()}
    assert set(found) == ({1, 2, 3} if ranks == 1 else {1, 2})
    gradients, steps = step_time.GRADIENT_BYTES, step_time.STEP_BYTES
    if ranks == 1:
        gradients, steps = step_time.ALONE_GRADIENT_BYTES, step_time.ALONE_STEP_BYTES
    for stage, moved in found.items():
        expected = ACCUMULATION * gradients[stage].total(1, 1 / ranks)
        expected += steps[stage].total(1, 1 / ranks)
        assert moved == pytest.approx(expected, abs=0.1), f"stage {stage}"
