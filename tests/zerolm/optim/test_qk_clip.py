"""The weights of chosen heads are scaled, and no others, whatever part of them a rank has."""

import json
from pathlib import Path

import pytest

from tests.launching import run_workers, write_json
from tests.zerolm.train.test_step_gate import configs

QUICK = ("zero1-bf16-float32-gradients", "zero3-bf16")


@pytest.mark.parametrize(
    "names",
    [
        QUICK,
        pytest.param(
            tuple(name for name in configs() if name not in QUICK), marks=pytest.mark.soak
        ),
    ],
    ids=["usual", "others"],
)
def test_a_step_that_is_taken_scales_exactly_the_chosen_heads_of_masters_and_model(tmp_path, names):
    files = [
        write_json(
            tmp_path / f"{name}.json",
            {
                **configs()[name],
                "gradient_accumulation_steps": 1,
                "communication_data_type": "fp32",
            },
        )
        for name in names
    ]
    report = tmp_path / "report.json"
    run_workers(2, Path(__file__).with_name("qk_clip_worker.py"), report, *files)
    found = {Path(path).stem: problems for path, problems in json.loads(report.read_text()).items()}
    assert found == {name: [] for name in names}
