"""fp16 with a loss scale, on a CPU with fp16: skipped steps, the curve, and a resume."""

import json
import shutil

import numpy as np
import pytest

from tests.end_to_end.recipe import STEP_TOKENS, recipe
from tests.launching import rows, run_ranks, write_json
from zerolm.ds_config.precision import cpu_has_fp16

STEPS, SAVED = 16, 12


@pytest.mark.soak
@pytest.mark.skipif(not cpu_has_fp16(), reason="this CPU has no fp16")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_loss_scale_skips_steps_and_is_restored_on_resume(
    tmp_path, corpus, llama, stage
) -> None:
    """Skipped steps advance neither tokens nor the schedule; a resumed run skips none again."""
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    plain = write_json(tmp_path / "fp32.json", config)
    scale = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 100}
    half = write_json(tmp_path / "fp16.json", {**config, "fp16": scale})

    def run(name: str, json_file, *more: object) -> list[dict]:
        flags = recipe(llama, corpus, tmp_path / name, json_file, STEPS, micro=2)
        flags += ["--checkpoint_interval", SAVED, "--wandb", "off", *more]
        done = run_ranks(2, *flags, timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "train/loss" in row]

    exact = run("fp32", plain)
    found = run("fp16", half)
    skipped = found[-1]["health/skipped_steps"]
    assert 0 < skipped < SAVED
    assert len(found) == STEPS + skipped and found[-1]["tokens"] == STEPS * STEP_TOKENS
    before = [0, *(row["tokens"] for row in found)]
    taken = [row for row, tokens in zip(found, before, strict=False) if row["tokens"] > tokens]
    rates = [row["train/learning_rate"] for row in taken]
    np.testing.assert_allclose(rates, [row["train/learning_rate"] for row in exact], rtol=1e-6)
    assert found[0]["train/loss"] == pytest.approx(exact[0]["train/loss"], rel=1e-3)
    assert found[-1]["train/loss"] < found[0]["train/loss"] - 0.05

    expected = rows(tmp_path / "fp16", "train/loss")
    last = sorted((tmp_path / "fp16/checkpoints").glob("step-*"))[-1]
    shutil.rmtree(last)
    again = run("fp16", half)
    assert again[-1]["health/skipped_steps"] == skipped
    resumed = {row["step"]: row["train/loss"] for row in again if row["step"] > SAVED}
    assert resumed == {step: loss for step, loss in expected.items() if step > SAVED}
