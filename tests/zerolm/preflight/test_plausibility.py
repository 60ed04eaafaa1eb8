"""Notices about values that are valid and senseless; the limits are computed by hand."""

import pytest

from tests.launching import LLAMA, write_json
from tests.zerolm.preflight.preflight_inputs import command
from zerolm.preflight import check, plausibility

WINDOWS = (20_000 - 1) // 32  # of the source; the default learning rate of so small a run is 0.003
CASES = {
    "nothing": ("--learning_rate 0.03 --total_tokens 199680", []),  # 10 x 624 windows
    "a rate": ("--learning_rate 0.09", ["--learning_rate: 0.09 is 30 times the default", "0.003"]),
    "a tiny rate": ("--learning_rate 1e-7", ["--learning_rate: 1e-07 is 3.33e-05 times"]),
    "no decay": (
        "--learning_rate 1e-3 --min_learning_rate 1e-3",
        ["--min_learning_rate: 0.001 is the peak, so cosine does not decay"],
    ),
    "a warm-up": ("--warmup_tokens 51200", ["--warmup_tokens: 51,200 of 51,200 tokens"]),
    "steps as tokens": (
        "--total_tokens 1000 --warmup_tokens 0",
        ["--total_tokens: 1,000 tokens are 2 step(s) of 512", "1,000 steps", "_tokens 512000"],
    ),
    "a few steps": ("--total_tokens 3072", []),  # 6
    "epochs": (
        "--total_tokens 51200k",
        [f"read source web {51_200_000 / 32 / WINDOWS:,.0f} times", "--max_epochs"],
    ),
    "some epochs": ("--total_tokens 256k", ["read source web 12.8 times"]),
    "epochs that were asked for": ("--total_tokens 256k --max_epochs 20", []),
    "a vocabulary": ("--model_config {wide}", ["vocab_size: 8,192", "512 tokens", "uses 94% of"]),
    "half a vocabulary": ("--model_config {half}", []),
}


@pytest.mark.parametrize(("change", "parts"), CASES.values(), ids=list(CASES))
def test_a_senseless_value_is_named(inputs, tmp_path, change, parts):
    sizes = {"wide": 8192, "half": 1024}
    for name, size in sizes.items():
        write_json(tmp_path / f"{name}.json", {**LLAMA, "vocab_size": size})
    change = change.format(**{name: tmp_path / f"{name}.json" for name in sizes})
    plan = check.check(command(inputs, change), {})
    notices = plausibility.notices(plan)
    assert len(notices) == bool(parts), notices
    assert all(part in notices[0] and notices[0] in plan.notices for part in parts), notices
    assert "e+" not in plan.derived["epochs"]
