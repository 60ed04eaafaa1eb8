"""--compile: the curve of plain PyTorch, and checkpoints from which a run without it resumes."""

import json

import numpy as np
import pytest

from tests.end_to_end import plain_pytorch
from tests.end_to_end.recipe import (
    BATCH,
    STEPS,
    WARMUP_TOKENS,
    profile,
    recipe,
)
from tests.launching import LLAMA, rows, run_ranks

# bf16: the compiler does not round between the operations that it fuses
TOLERANCES = {False: 1e-5, True: 5e-3}


@pytest.mark.soak  # always: tests/zerolm/model/test_compile.py
@pytest.mark.parametrize(("stage", "bf16"), [(3, False), (2, False), (2, True), (3, True)])
def test_compiled_blocks_give_the_curve_of_plain_pytorch(
    tmp_path, corpus, held_out, llama, stage, bf16
) -> None:
    """The first half runs compiled; the second half resumes from its checkpoint, not compiled."""
    expected = plain_pytorch.train(LLAMA, corpus, bf16=bf16)
    json_file = profile(tmp_path / "ds.json", stage, bf16)
    flags = recipe(llama, corpus, tmp_path / "run", json_file, STEPS, BATCH // 4)
    flags += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    flags += ["--val_data", held_out, "--eval_interval", STEPS, "--eval_tokens", 512]
    done = run_ranks(2, *flags, "--compile", "--checkpoint_interval", STEPS // 2, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "compile: 2 blocks (LlamaDecoderLayer)" in done.stdout
    assert "graph breaks" not in done.stdout, "one graph, also under ZeRO-3"
    found = np.array(list(rows(tmp_path / "run", "train/loss").values()))
    losses = np.array([step.loss for step in expected])
    assert losses[0] - losses[-1] > 0.1, "the reference itself must learn"
    np.testing.assert_allclose(found, losses, rtol=TOLERANCES[bf16])
    newest = tmp_path / "run/checkpoints" / f"step-{STEPS:08d}"
    for damage in newest.iterdir():
        damage.unlink() if damage.is_file() else None
    again = run_ranks(2, *flags, timeout=500)
    assert again.returncode == 0, again.stdout[-4000:]
    assert f"step {STEPS // 2}" in again.stdout and "bit-identical to the saved one" in again.stdout
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"train/loss"' in line][-STEPS // 2 :]
    resumed = [row["train/loss"] for row in last]
    np.testing.assert_allclose(resumed, losses[STEPS // 2 :], rtol=TOLERANCES[bf16])
