"""The bytes that a plan assumes for gradients and the optimizer are those of DeepSpeed."""

import json
from pathlib import Path

import pytest

from launch.plan import step_time
from tests.launching import run_workers


@pytest.mark.soak
def test_deepspeed_moves_the_bytes_that_the_plan_assumes(tmp_path):
    output = tmp_path / "moved.json"
    run_workers(1, Path(__file__).with_name("moved_bytes_worker.py"), output)
    found = {int(stage): each for stage, each in json.loads(output.read_text()).items()}
    assert set(found) == {1, 2, 3}
    for stage, (micro_batch, step) in found.items():
        assert step_time.GRADIENT_BYTES[stage] == pytest.approx(micro_batch, abs=0.1)
        assert step_time.STEP_BYTES[stage] == pytest.approx(step, abs=0.1)
