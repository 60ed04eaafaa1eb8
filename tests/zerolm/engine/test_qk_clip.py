"""The weights of chosen heads are scaled, and no others, whatever part of them a rank has."""

from pathlib import Path

import pytest

from tests.ds_config_checks import check_in_ranks
from tests.zerolm.engine.test_step_gate import configs

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
    more = {"gradient_accumulation_steps": 1, "communication_data_type": "fp32"}
    chosen = {name: {**configs()[name], **more} for name in names}
    worker = Path(__file__).with_name("qk_clip_worker.py")
    assert check_in_ranks(worker, tmp_path, chosen) == {name: [] for name in names}
